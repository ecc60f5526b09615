"""HTTP over one connection: uvicorn's own, with an end to what a client may make it hold or await.

Uvicorn leaves that to a proxy in front of it, which not everybody has.
"""

import asyncio
from typing import Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10  # request line and headers, beyond what one read brings


class Wire(HttpToolsProtocol):
    """Hangs up on a request whose head is too long, or which takes too long to arrive."""

    head_timeout_s = 20.0  # from the connection, or the first byte, to the last header
    body_timeout_s = 120.0  # from there to the last byte of the body
    _head_bytes = 0  # without the first piece that was read
    _timer: asyncio.TimerHandle | None = None
    _part: Literal["none", "head", "body"] = "none"  # of a request, that has come in part

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._give(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # the next request of this connection
            self._give(self.head_timeout_s)
        was_head = self._part == "head"
        super().data_received(data)
        if was_head and self._part == "head" and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.logger.warning("a request's headers exceed %d bytes", MOST_HEAD_BYTES)
                self.send_400_response(f"The headers exceed {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._part, self._head_bytes = "head", 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._part = "body"
        self._give(self.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._part = "none"
        self._give(None)
        super().on_message_complete()

    def _give(self, seconds: float | None) -> None:
        """Hang up after so many seconds, unless told otherwise before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._hang_up)

    def _hang_up(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._part != "body" and is_answering:  # the request before this one is being worked on
            self._give(self.head_timeout_s)
        else:
            self.transport.close()
