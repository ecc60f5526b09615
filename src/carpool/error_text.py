"""Texts of error messages: values, near misses, and what others' exceptions say, without paths."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

_PATH = re.compile(
    r"""(['"`])(?:[a-z]+:/*)?~?/[\w.~@+-][^'"`\n]*\1"""  # in quotes, spaces and all
    r"""|(?:\b[a-z]+:)?/{3,}[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""  # file:///etc
    r"""|(?<![\w./])(?:~\w*)?/(?=[\w.~@+-])[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""
)


def without_paths(text: str) -> str:
    """A text of somebody else's without the absolute paths in it; URLs and fractions stay."""
    return _PATH.sub(lambda found: f"{found[1] or ''}<path>{found[1] or ''}", text)


def reason(error: BaseException) -> str:
    """The message of a foreign exception as clients may read it: without paths."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # the names of files are apart from it
    return without_paths(str(error))


def in_full(error: BaseException) -> str:
    """The messages of an exception and its causes, for the log."""
    said, cause = [str(error)], error.__cause__
    while cause is not None:
        said.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "; caused by ".join(said)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def show(value: Any) -> str:
    """A value as JSON has it, in Python's words where it has none; cut to what a log can bear."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a character
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no integer of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 60 else text[:57] + "..."
