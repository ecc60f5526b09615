"""Texts for error messages: values, suggestions, and foreign exceptions without paths."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

MOST_TEXT = 10_000  # characters of a foreign message; fits a traceback, cuts a printed tensor
_CAUSE: Any = vars(BaseException)["__cause__"]
_PATH = re.compile(
    r"""(['"`])(?:[a-z]+:/*)?~?/[\w.~@+-][^'"`\n]*\1"""  # in quotes, with spaces
    r"""|(?:\b[a-z]+:)?/{3,}[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""  # file:///etc
    r"""|(?<![\w./])(?:~\w*)?/(?=[\w.~@+-])[^\s'"`<>|,;()\[\]{}]+(?<![:.!?])"""
)


def without_paths(text: str) -> str:
    """Remove absolute paths from a foreign text; URLs and fractions stay."""
    return _PATH.sub(lambda match: f"{match[1] or ''}<path>{match[1] or ''}", text)


def text_of(error: BaseException) -> str:
    """The message of an exception as valid UTF-8, even if its `__str__` raises."""
    try:
        text = str(error)
    except BaseException as defect:  # even SystemExit: the caller only needs a message
        text = f"its message cannot be read: {type(defect).__name__}"
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}... ({len(text)} characters)"
    return _encodable(text)


def reason(error: BaseException) -> str:
    """The message of a foreign exception for clients, without paths."""
    is_of_the_system = issubclass(type(error), OSError)  # not `isinstance`: a class may fake it
    if is_of_the_system and type(error.strerror) is str and error.strerror:  # type: ignore[attr-defined]
        return _encodable(error.strerror)  # type: ignore[attr-defined]  # names of files are apart
    return without_paths(text_of(error))


def named(error: BaseException) -> str:
    """The class and message of a foreign exception, for clients."""
    return f"{type(error).__name__}: {reason(error)}"


def in_full(error: BaseException) -> str:
    """The messages of an exception and its causes, for the log."""
    messages, cause, ids = [text_of(error)], _cause_of(error), {id(error)}
    while cause is not None and id(cause) not in ids:  # `raise error from error` makes a cycle
        ids.add(id(cause))
        messages.append(f"{type(cause).__name__}: {text_of(cause)}")
        cause = _cause_of(cause)
    return "; caused by ".join(messages)


def _cause_of(error: BaseException) -> BaseException | None:
    cause: BaseException | None = _CAUSE.__get__(error)  # the class may redefine it
    return cause


def _encodable(text: str) -> str:
    """A plain `str` of valid UTF-8: no lone surrogates, no subclass."""
    return text.encode(errors="replace").decode()


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest name, or an empty text."""
    by_lowercase = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name[:100].lower(), list(by_lowercase), n=1, cutoff=0.5)
    return f"; did you mean {by_lowercase[close[0]]!r}?" if close else ""


def show(value: Any) -> str:
    """A value as JSON, or as its Python `repr`; shortened for logs."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # lone surrogate
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print very long integers
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 60 else text[:57] + "..."
