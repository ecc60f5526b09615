"""Texts of error messages: values, near misses, and what others' exceptions say, without paths."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

MOST_TEXT = 10_000  # characters of a foreign message: a traceback fits, a printed tensor is cut
_CAUSE: Any = vars(BaseException)["__cause__"]
_PATH = re.compile(
    r"""(['"`])(?:[a-z]+:/*)?~?/[\w.~@+-][^'"`\n]*\1"""  # in quotes, spaces and all
    r"""|(?:\b[a-z]+:)?/{3,}[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""  # file:///etc
    r"""|(?<![\w./])(?:~\w*)?/(?=[\w.~@+-])[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""
)


def without_paths(text: str) -> str:
    """A text of somebody else's without the absolute paths in it; URLs and fractions stay."""
    return _PATH.sub(lambda match: f"{match[1] or ''}<path>{match[1] or ''}", text)


def text_of(error: BaseException) -> str:
    """The message of an exception, as UTF-8 can hold it, whatever its class does when asked."""
    try:
        text = str(error)
    except BaseException as defect:  # even one that ends programs: it is only a message
        text = f"its message cannot be read: {type(defect).__name__}"
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}... ({len(text)} characters)"
    return _encodable(text)


def reason(error: BaseException) -> str:
    """The message of a foreign exception as clients may read it: without paths."""
    is_of_the_system = issubclass(type(error), OSError)  # not `isinstance`: a class may lie
    if is_of_the_system and type(error.strerror) is str and error.strerror:  # type: ignore[attr-defined]
        return _encodable(error.strerror)  # type: ignore[attr-defined]  # names of files are apart
    return without_paths(text_of(error))


def named(error: BaseException) -> str:
    """The class and the message of a foreign exception, as clients may read them."""
    return f"{type(error).__name__}: {reason(error)}"


def in_full(error: BaseException) -> str:
    """The messages of an exception and its causes, for the log."""
    messages, cause, ids = [text_of(error)], _cause_of(error), {id(error)}
    while cause is not None and id(cause) not in ids:  # `raise error from error` is a circle
        ids.add(id(cause))
        messages.append(f"{type(cause).__name__}: {text_of(cause)}")
        cause = _cause_of(cause)
    return "; caused by ".join(messages)


def _cause_of(error: BaseException) -> BaseException | None:
    cause: BaseException | None = _CAUSE.__get__(error)  # of a class that may have its own
    return cause


def _encodable(text: str) -> str:
    """A plain string that UTF-8 can hold: without half characters, and of no class of its own."""
    return text.encode(errors="replace").decode()


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or nothing."""
    by_lowercase = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name[:100].lower(), list(by_lowercase), n=1, cutoff=0.5)
    return f"; did you mean {by_lowercase[close[0]]!r}?" if close else ""


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
