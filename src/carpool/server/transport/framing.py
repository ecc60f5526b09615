"""Checks that a request is unambiguous HTTP/1.1, and finds the end of its body.

Stricter than RFC 9112 where it leaves a choice: a request that another server could parse in
another way raises `InvalidHTTP`.
"""

import re
from collections.abc import Sequence

from carpool.errors import InvalidHTTP

MOST_EXCESS_BYTES = 16 << 10
"""Limit for chunk extensions and trailers of one body, beyond 16 bytes a chunk."""

_REQUEST_LINE = re.compile(rb"[A-Z-]{1,20} [!\"$-~]+ HTTP/1\.[01]\r\n")  # no fragment
_LINE_ENDS = re.compile(rb"\r(?!\n)|(?<!\r)\n|\n[ \t]")  # bare CR, bare LF, a folded header
_UPGRADE = re.compile(rb"\r\nupgrade:[\t -~\x80-\xff]*(?=\r\n)", re.IGNORECASE)
_HOST = re.compile(rb"([A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\])(:[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)/.*", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?\r\n")
_CHUNK_LINE_BYTES = 16  # free bytes of each chunk's line


class ContentLengthBody:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._missing = length

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def scan(self, received: bytearray) -> int:
        """Count the leading bytes that belong to the body; the caller removes them."""
        step = min(self._missing, len(received))
        self._missing -= step
        return step


class ChunkedBody:
    """A chunked body. Finds its end; the parser checks the content of its lines."""

    def __init__(self) -> None:
        self._missing = 0  # bytes of the current chunk still to come, with CR LF
        self._excess = 0
        self._is_in_trailers = False
        self.is_whole = False

    def scan(self, received: bytearray) -> int:
        """As `ContentLengthBody.scan`; an incomplete line is scanned again.

        Raises:
            InvalidHTTP: a chunk has no size, or extensions and trailers are too long.
        """
        at = min(self._missing, len(received))
        self._missing -= at
        if self._missing:
            return at
        if not self._is_in_trailers:
            at = self._scan_chunks(received, at)
        if self._is_in_trailers:
            at = self._scan_trailers(received, at)
        return at

    def _scan_chunks(self, received: bytearray, at: int) -> int:
        end, excess = len(received), self._excess  # local, for speed: chunks may be tiny
        while at < end:
            line = _CHUNK.match(received, at)
            if line is None:
                if received.find(b"\r\n", at) >= 0:
                    raise InvalidHTTP("a chunk of the body does not begin with its size")
                _check_excess(excess + end - at)
                break
            excess += line.end() - at - _CHUNK_LINE_BYTES
            if excess < 0:
                excess = 0
            elif excess > MOST_EXCESS_BYTES:
                _check_excess(excess)
            size = int(line[1], 16)
            at = line.end()
            if not size:
                self._is_in_trailers = True
                break
            at += size + 2
        self._missing, self._excess = max(0, at - end), excess
        return min(at, end)

    def _scan_trailers(self, received: bytearray, at: int) -> int:
        while not self.is_whole and (end := received.find(b"\r\n", at)) >= 0:
            self.is_whole = end == at
            self._excess += end + 2 - at
            at = end + 2
        _check_excess(self._excess + (0 if self.is_whole else len(received) - at))
        return at


def _check_excess(excess: int) -> None:
    if excess > MOST_EXCESS_BYTES:
        problem = f"more than {MOST_EXCESS_BYTES} bytes of chunk extensions and trailers"
        raise InvalidHTTP(f"the body has {problem}")


MessageBody = ContentLengthBody | ChunkedBody


def check_start(received: bytes | bytearray) -> None:
    """Raise InvalidHTTP if the received bytes cannot begin an HTTP/1.x request."""
    is_partial = b"\n" not in received and (not received or received[:1].isupper())
    if not is_partial and not _REQUEST_LINE.match(received):
        raise InvalidHTTP("the request does not begin with METHOD TARGET HTTP/1.1")


def check_lines(head: bytes) -> None:
    """Raise InvalidHTTP if parsers could split a complete head into different lines."""
    check_start(head)
    if _LINE_ENDS.search(head):
        raise InvalidHTTP("a line of the head does not end with CR LF, or is folded")
    if head.startswith(b"CONNECT "):
        raise InvalidHTTP("CONNECT is not supported: this is no proxy")


def without_upgrade(head: bytes) -> bytes:
    """The head without `Upgrade`, which a server may ignore (RFC 9110, section 7.8).

    With it llhttp treats the bytes after the head as another protocol, which httptools cannot
    disable: the body would be parsed as the next request.
    """
    return _UPGRADE.sub(b"", head)


def body_of(version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> MessageBody:
    """Check the host and body headers of a parsed head; returns the body's reader.

    Args:
        version: "1.0" or "1.1".
        headers: names in lower case.

    Raises:
        InvalidHTTP: a header is missing, or headers contradict each other.
    """

    def values(of: bytes) -> list[bytes]:
        return [value for name, value in headers if name == of]

    hosts, codings = values(b"host"), values(b"transfer-encoding")
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidHTTP(f"the request has {len(hosts)} Host headers: send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidHTTP("Host is not a name or an address, with or without a port")
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.fullmatch(target)
        if not absolute or [absolute[1].lower()] != [host.lower() for host in hosts]:
            raise InvalidHTTP("the target is neither a path nor a URL of the host in Host")
    lengths = values(b"content-length")
    if codings:
        if version == "1.0" or lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            rule = "must be 'chunked', once, without Content-Length"
            raise InvalidHTTP(f"Transfer-Encoding {rule}")
        return ChunkedBody()
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise InvalidHTTP("Content-Length must be one whole number")
    return ContentLengthBody(int(lengths[0]) if lengths else 0)
