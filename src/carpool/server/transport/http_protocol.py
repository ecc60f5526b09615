"""HTTP/1.1 over one connection: uvicorn's protocol, made strict and bounded.

Uvicorn leaves both to a proxy in front of it, which not every deployment has. This class adds:

* A request that two servers could parse differently gets 400, and the connection is closed. llhttp
  refuses most of these; `check_head` refuses the rest.
* Each request has its own parser, and bytes behind a request are never parsed with it: they wait
  until it is answered, or the connection is closed then. So no upgrade, trailer or error affects
  another request. No common client sends requests in advance.
* The size of heads, chunk extensions and trailers, and the duration of each part are limited.

The names of uvicorn used here are public but undocumented: pyproject.toml pins one minor version,
and `tests/server/transport/test_pinned_libraries.py` reports changes in another version.
"""

import asyncio
import json
import re
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carpool.errors import InvalidHTTP
from carpool.types import new_request_id

MOST_HEAD_BYTES = 64 << 10  # request line, headers, chunk extensions and trailers
_CHUNK_LINE_BYTES = 16  # of each chunk's line these do not count
_HOST = re.compile(rb"([A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\])(:[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)/.*", re.IGNORECASE)


class StrictHTTPProtocol(HttpToolsProtocol):
    """The protocol of one connection; see the module."""

    head_timeout_s = 20.0  # connection or first byte to last header
    body_timeout_s = 120.0  # last header to last byte of the body
    idle_timeout_s = 20  # between requests: longer than clients keep connections (httpx: 5 s,
    # aiohttp: 15 s), because a request is lost if the server closes first
    _timer: asyncio.TimerHandle | None = None
    _part = "head"  # then "body", then "answer": the part of the exchange that is due
    _head_bytes = 0  # received bytes of the current request, without its content
    _behind = b""  # bytes that came before the current answer was complete
    _is_last = False  # nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = httptools.HttpRequestParser(self)
        self._close_after(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_after(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_last or self.transport.is_closing():
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._part == "answer":
            if not self.cycle.response_complete:
                self._behind += data
                if len(self._behind) > MOST_HEAD_BYTES:
                    self._read_no_more()
                return
            self.parser = httptools.HttpRequestParser(self)
            self._part, self._head_bytes = "head", 0
        if self._timer is None:
            self._close_after(self.head_timeout_s)
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._head_bytes = max(0, self._head_bytes)  # many small chunks buy no long trailer
            if self._part != "answer" and self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(InvalidHTTP(f"the headers or trailers exceed {MOST_HEAD_BYTES} bytes"))
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._part == "answer":  # bytes behind the request
                self._read_no_more()
            else:
                cause, default = error.__context__, InvalidHTTP("the request is not valid HTTP/1.1")
                self._refuse(cause if isinstance(cause, InvalidHTTP) else default)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse the head again without `Upgrade`, which a server may ignore (RFC 9110, 7.8).

        With it llhttp takes the body for another protocol, which httptools cannot disable.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser, self._head_bytes = httptools.HttpRequestParser(self), 0
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _read_no_more(self) -> None:
        """Close the connection after the answer, and read nothing before."""
        self._is_last, self._behind, self.cycle.keep_alive = True, b"", False
        if self.cycle.response_complete:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        behind, self._behind = self._behind, b""
        if behind:
            self.data_received(behind)

    # The parser's callbacks. An exception ends in `data_received`.

    def on_message_begin(self) -> None:
        if self._part == "answer" and self.cycle.response_complete and not self._is_last:
            # answered early: the client has sent the rest of the body with its next request
            self._part, self._head_bytes = "head", 0
        if self._part != "head":
            raise InvalidHTTP("bytes behind the request")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "head":  # trailers are dropped
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        check_head(method, self.url, version, self.headers)
        if self.parser.should_upgrade():
            return  # see `_parse_without_upgrade`
        super().on_headers_complete()
        self._part = "body"
        self._close_after(self.body_timeout_s)

    def on_chunk_header(self) -> None:
        self._head_bytes -= _CHUNK_LINE_BYTES

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._part == "head":
            return  # an upgrade
        self._part, self._is_last = "answer", not self.cycle.keep_alive
        # after an early answer, uvicorn's own idle timer is already cancelled
        self._close_after(self.head_timeout_s if self.cycle.response_complete else None)
        super().on_message_complete()

    def _refuse(self, error: InvalidHTTP) -> None:
        """Answer with the error, unless an answer has begun, and close the connection."""
        self.logger.info("refused: %s", error.message)
        self._is_last = True
        is_answered = False
        if self._part == "body":  # the request is running
            is_answered = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_answered:
            content = json.dumps({"error": error.body}).encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\nx-request-id: %s\r\n\r\n%s"
                % (len(content), new_request_id().encode(), content)
            )
        self.transport.close()

    # Timeouts

    def _close_after(self, seconds: float | None) -> None:
        """Set the timeout of the current part; None: no timeout."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        is_unread = self._part == "body" and self.flow.read_paused
        if is_unread and not self.cycle.response_complete:
            self._close_after(self.head_timeout_s)  # the application reads slowly
        else:
            self.transport.close()


def check_head(
    method: bytes, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    """Check what llhttp leaves open in a head.

    Args:
        version: "1.1", for example.
        headers: names in lower case.

    Raises:
        InvalidHTTP: two servers could understand the head differently.
    """
    hosts, codings = (
        [value for name, value in headers if name == wanted]
        for wanted in (b"host", b"transfer-encoding")
    )
    if version not in ("1.0", "1.1") or method in (b"CONNECT", b"PRI"):
        raise InvalidHTTP("only HTTP/1.1 and HTTP/1.0 are supported, and no CONNECT")
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidHTTP(f"the request has {len(hosts)} Host headers: send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidHTTP("Host is not a name or an address, with or without a port")
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.fullmatch(target)
        if not absolute or [absolute[1].lower()] != [host.lower() for host in hosts]:
            raise InvalidHTTP("the target is neither a path nor a URL of the host in Host")
    if b"#" in target:
        raise InvalidHTTP("the target has a fragment")
    if codings and (version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]):
        raise InvalidHTTP("Transfer-Encoding must be 'chunked', once")
