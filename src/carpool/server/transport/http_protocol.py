"""HTTP/1.1 over one connection: uvicorn's protocol, made strict and bounded.

Uvicorn leaves both to a proxy in front of it, which not every deployment has. This class adds:

* An ambiguous request, which two servers could parse differently, gets 400, and the connection is
  closed: `framing.py` has the checks.
* Each message has its own parser, which gets no byte of the next message; the next request is
  parsed after this one is answered. So no upgrade, trailer or error affects another request.
* Heads, trailers, chunk extensions and the duration of each part are limited. A client disconnect
  cancels its request, even if the client has sent more requests in advance.

The names of uvicorn used here are public but undocumented: pyproject.toml pins one minor version,
and `tests/server/transport/test_pinned_libraries.py` reports changes in another version.
"""

import asyncio
import json
import select

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carpool.errors import InvalidHTTP
from carpool.server.transport import framing
from carpool.types import new_request_id

MOST_HEAD_BYTES = 64 << 10  # request line and headers
_HEAD_END = b"\r\n\r\n"
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux only


class StrictHTTPProtocol(HttpToolsProtocol):
    """The protocol of one connection; see the module."""

    head_timeout_s = 20.0  # connection or first byte to last header
    body_timeout_s = 120.0  # last header to last byte of the body
    idle_timeout_s = 20  # between requests: longer than clients keep connections (httpx: 5 s,
    # aiohttp: 15 s), because a request is lost if the server closes first
    disconnect_poll_s = 1.0  # interval of disconnect checks while reading is paused
    _timer: asyncio.TimerHandle | None = None
    _poll: asyncio.TimerHandle | None = None
    _is_last = False  # this request is the last one to be read
    _is_new = False  # the new parser has not begun its message
    _body: framing.MessageBody | None = (
        None  # the current request's body, until it is parsed completely
    )
    _error = InvalidHTTP("the request is not valid HTTP/1.1")  # default until a check finds more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received = bytearray()  # bytes to be parsed
        self._close_after(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_after(None)
        if self._poll is not None:
            self._poll.cancel()
        self._received.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse()

    def _parse(self) -> None:
        """Parse the received bytes, up to the end of an unanswered request."""
        if self._received and self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        try:
            while self._received and not self._is_over() and self._parse_next():
                pass
        except InvalidHTTP as error:
            self._refuse(error)
        if self._is_over():
            self._received.clear()
        if self.flow.read_paused and self._poll is None:
            self._poll = self.loop.call_later(self.disconnect_poll_s, self._poll_disconnect)

    def _is_over(self) -> bool:
        """Return whether reading has stopped: an answer or a timer closed the connection."""
        return self._is_last or self.transport.is_closing()

    def _parse_next(self) -> bool:
        """Parse a head, or more of a body; returns whether there may be more to parse."""
        if self._body is not None:
            return self._parse_body(self._body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.flow.pause_reading()  # the next request waits for this answer
            return False
        if self._timer is None:
            self._close_after(self.head_timeout_s)
        while self._received.startswith(b"\r\n"):
            del self._received[:2]
        end = self._received.find(_HEAD_END, 0, MOST_HEAD_BYTES)
        if end < 0:
            framing.check_start(self._received)
            if len(self._received) >= MOST_HEAD_BYTES:
                raise InvalidHTTP(f"the headers exceed {MOST_HEAD_BYTES} bytes")
            return False
        head = self._take(end + len(_HEAD_END))
        framing.check_lines(head)
        self.parser, self._is_new = httptools.HttpRequestParser(self), True
        super().data_received(framing.without_upgrade(head))
        return True

    def _parse_body(self, body: framing.MessageBody) -> bool:
        """Parse more of the body, but no byte after it."""
        size = body.scan(self._received)
        super().data_received(self._take(size))
        if not self._is_last and body.is_whole != (self._body is None):
            raise InvalidHTTP("the body does not end where it says")
        return size > 0

    def _take(self, size: int) -> bytes:
        piece = bytes(self._received[:size])
        del self._received[:size]
        return piece

    # The parser's callbacks. An exception ends in `send_400_response`.

    def on_message_begin(self) -> None:
        if not self._is_new:
            raise self._error  # the parser ended the message earlier than `framing`
        self._is_new = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is None:  # trailers are dropped
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        try:
            body = framing.body_of(self.parser.get_http_version(), self.url, self.headers)
        except InvalidHTTP as error:
            self._error = error
            raise
        if self.parser.should_upgrade():
            raise self._error  # the parser would skip the body
        super().on_headers_complete()
        self._body = body
        self._close_after(self.body_timeout_s)

    def on_message_complete(self) -> None:
        self._body, self._is_last = None, not self.cycle.keep_alive
        # after an early answer, uvicorn's own idle timer is already cancelled
        self._close_after(self.head_timeout_s if self.cycle.response_complete else None)
        super().on_message_complete()

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """Uvicorn's hook for requests that its parser refuses; answers with our error format."""
        self._refuse(self._error)

    def _refuse(self, error: InvalidHTTP) -> None:
        """Answer with the error, unless an answer has begun, and close the connection."""
        self.logger.info("refused: %s", error.message)
        self._is_last = True
        is_answered = False
        if self._body is not None:  # the request is running
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
        if self._body is not None and self.flow.read_paused and not self.cycle.response_complete:
            self._close_after(self.head_timeout_s)  # the application reads slowly
        else:
            self.transport.close()

    def _poll_disconnect(self) -> None:
        """Check for a client disconnect, which asyncio does not report while paused."""
        self._poll = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _PEER_CLOSED)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._poll = self.loop.call_later(self.disconnect_poll_s, self._poll_disconnect)
