"""Strict, bounded JSON: no duplicate keys, limited depth, a limited number of values.

RFC 8259 leaves open which of two equal keys counts, and parsers differ: one program may check one
value while another uses the other. Null members are dropped in all bodies: clients write null for
fields that they do not set. NaN and Infinity are not JSON; `carpool.request.parameters` refuses
them by the name of the parameter.

Python's parser holds the GIL for the whole body, and two bytes of JSON may become thirty bytes of
memory. So pictures (long `data:` URLs) are cut out of a body first, and the rest is parsed only if
it has at most `MOST_BYTES`; checks of values begin only if there are at most `MOST_VALUES`.
"""

import json
import re
import secrets
from collections import Counter
from typing import Any

import numpy as np
from fastapi import HTTPException, Request
from starlette.datastructures import Headers

from carpool.errors import BodyTooLarge

MOST_DEPTH = 32  # depth of nested lists and objects
MOST_KEY = 200  # characters: keys are repeated in errors
MOST_VALUES = 20_000  # entries of lists and objects
MOST_TEXT = 64 << 10  # characters of JSON inside a text
MOST_BYTES = 1 << 20  # without pictures
MOST_PICTURES = 64  # pictures that do not count as bytes
LEAST_PICTURE = 1 << 10  # bytes; shorter pictures stay in the body

_BEGINS = {  # start of a picture in quotes: URLs only, or also bare base64 of PNG, JPEG, WebP
    False: re.compile(rb'"data:'),
    True: re.compile(rb'"(?:data:|iVBORw0KGgo|(?:\\?/|_)9j(?:\\?/|_)|UklGR)'),
}
_ESCAPES = {  # escapes in base64: PHP and .NET escape some letters, all programs line ends
    rb"\/": b"/", rb"\n": b"\n", rb"\r": b"\r", rb"\t": b"\t", rb"\u002b": b"+", rb"\u002B": b"+",
    rb"\u002f": b"/", rb"\u002F": b"/", rb"\u003d": b"=", rb"\u003D": b"=",
    rb"\u000a": b"\n", rb"\u000A": b"\n", rb"\u000d": b"\r", rb"\u000D": b"\r",
}  # fmt: skip
_LONGEST_ESCAPE = 6
_KIND = re.compile(r"application/([a-z0-9.!#$&^_-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_PIECE = 1 << 16  # bytes scanned at once: other threads may run in between


def check_is_json(headers: Headers) -> None:
    """Refuse (415) a body of another content type: web pages may send those without CORS."""
    kind = headers.get("content-type", "").strip()
    is_there = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if is_there and not _KIND.fullmatch(kind):
        text = f"is {kind[:60]!a}" if kind else "has no content-type"
        of_json = "JSON, sent as application/json (curl: -H 'content-type: application/json')"
        of_form = "a form with pictures, sent as multipart/form-data"
        raise HTTPException(415, f"the body {text}: it must be {of_json}, or {of_form}")


async def received(request: Request, limit: int | None = None) -> bytearray:
    """The body of a request, as it was sent.

    Raises:
        BodyTooLarge: the body has more than `limit` bytes.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if limit is not None and len(body) > limit:
            raise BodyTooLarge(f"the picture has more than {limit} bytes: send a smaller one")
    return body


def in_text(text: str) -> Any:
    """Parse JSON inside a text, such as a form field.

    Raises:
        HTTPException, ValueError, RecursionError: invalid or too large.
    """
    if len(text) > MOST_TEXT:
        raise ValueError(f"JSON in a text may have {MOST_TEXT} characters")
    value = json.loads(text, object_pairs_hook=_members)
    check(value)
    return value


def read(body: bytes | bytearray) -> Any:
    """Parse a body without pictures: `parse`, and 413 above the size limit."""
    if len(body) > MOST_BYTES:
        raise HTTPException(413, f"the body has {len(body)} bytes: the limit is {MOST_BYTES}")
    return parse(bytes(body))


def parse(text: bytes, *, has_places: bool = True) -> Any:
    """Parse JSON, and check its limits.

    Raises:
        HTTPException: 400 with the problem; `has_places` adds its position.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_members)
    except UnicodeDecodeError as error:
        raise HTTPException(400, "the body is not JSON: it is not UTF-8") from error
    except json.JSONDecodeError as error:
        where = f" (line {error.lineno}, column {error.colno})" if has_places else ""
        raise HTTPException(400, f"the body is not JSON: {error.msg}{where}") from error
    except RecursionError:
        raise _deep() from None
    except ValueError as error:
        raise HTTPException(400, "the body has a number of too many digits") from error
    check(value)
    return value


def check(value: Any) -> None:
    """Refuse (400) a value with too many entries or levels."""
    level, count = [[value]], 0
    for _ in range(MOST_DEPTH + 1):
        count += sum(map(len, level))
        if count > MOST_VALUES:
            raise HTTPException(400, f"the body has more than {MOST_VALUES} values")
        level = [
            list(entry.values()) if isinstance(entry, dict) else entry
            for entries in level
            for entry in entries
            if isinstance(entry, (dict, list))
        ]
        if not level:
            return
    raise _deep()


def cut(
    body: bytes | bytearray, *, takes_base64: bool = False
) -> tuple[bytes, dict[str, memoryview]]:
    """Cut pictures out of a large body until it is small, without copying them.

    Args:
        takes_base64: also cut bare base64, without a URL.

    Returns:
        The rest of the body, and the pictures' URLs by their placeholders in it.

    Raises:
        HTTPException: 413; the body is too large even without its pictures.
    """
    parts, pictures = list[bytes](), dict[str, memoryview]()
    secret = secrets.token_hex(8)  # clients cannot guess a placeholder
    at = search_end = 0  # ends of the copied and of the searched part
    budget = MOST_BYTES
    while len(body) - at > budget:
        match = _BEGINS[takes_base64].search(body, search_end, at + budget)
        if match is None or len(pictures) == MOST_PICTURES:
            raise HTTPException(
                413,
                f"the body has more than {MOST_BYTES} bytes besides {len(pictures)} pictures, "
                "which are data:image/...;base64, URLs",
            )
        start = match.start()
        search_end = start + 1
        end = body.find(b'"', search_end)
        if body.startswith(b"\\", start - 1) or (url := _picture(body, search_end, end)) is None:
            continue
        name = f"{secret}-{len(pictures)}"
        pictures[name] = url
        parts += [bytes(body[at:start]), f'"{name}"'.encode()]
        budget -= start - at
        at = search_end = end + 1
    return b"".join([*parts, bytes(body[at:])]), pictures


def _picture(body: bytes | bytearray, start: int, end: int) -> memoryview | None:
    """The quoted text, if it is long ASCII with no escapes but those of base64."""
    if end - start < LEAST_PICTURE or body.startswith(b"\\", end - 1):
        return None
    letters = np.frombuffer(body, np.uint8, end - start, start)
    if letters.min() < 0x20 or letters.max() > 0x7E:
        return None
    if body.find(b"\\", start, end) < 0:
        return memoryview(body)[start:end]
    plain = bytearray()
    while start < end:
        until = min(end, start + _PIECE)
        if until < end:  # keeps an escape sequence whole
            escape = body.rfind(b"\\", until - _LONGEST_ESCAPE + 1, until)
            until = escape if escape >= 0 else until
        piece = body[start:until]
        for sequence, letter in _ESCAPES.items():
            if b"\\" not in piece:
                break
            piece = piece.replace(sequence, letter)
        if b"\\" in piece:
            return None
        plain += piece
        start = until
    return memoryview(plain)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, without null members; refuse duplicate and long keys."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise HTTPException(400, f"the body has {twice[:40]!a} twice: send it once")
    if any(len(key) > MOST_KEY for key in members):
        raise HTTPException(400, f"the body has a key of more than {MOST_KEY} characters")
    return {key: value for key, value in members.items() if value is not None}


def _deep() -> HTTPException:
    return HTTPException(400, f"the body nests lists or objects more than {MOST_DEPTH} deep")
