"""HTTP over one connection: uvicorn's own, with an end to what a client may make it hold or await.

Uvicorn leaves that to a proxy in front of it, which not everybody has.
"""

import asyncio
import select
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_HEAD_BYTES = 64 << 10  # request line and headers, beyond what one read brings
_LEFT = getattr(select, "POLLRDHUP", 0)  # the other side has hung up; Linux only


class Wire(HttpToolsProtocol):
    """Hangs up on a request whose head is too long, or which takes too long to arrive.

    A client that hangs up ends what runs for it, whatever else it has sent in advance.
    """

    head_timeout_s = 20.0  # from the connection, or the first byte, to the last header
    body_timeout_s = 120.0  # from there to the last byte of the body
    look_s = 1.0  # how often it is seen whether the client is there, while nothing is read
    _head_bytes = 0  # without the first piece that was read
    _timer: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _part: Literal["none", "head", "body"] = "none"  # of a request, that has come in part
    _running: RequestResponseCycle | None = None  # `cycle` is the newest, which may have to wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._give(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give(None)
        if self._looking is not None:
            self._looking.cancel()
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

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
        if self.flow.read_paused and self._looking is None:
            self._looking = self.loop.call_later(self.look_s, self._look)

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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: it is answered as HTTP. Uvicorn warns twice a request."""

    def _give(self, seconds: float | None) -> None:
        """Hang up after so many seconds, unless told otherwise before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._hang_up)

    def _hang_up(self) -> None:
        is_answering = self._running is not None and not self._running.response_complete
        is_ours = self._part == "body" and self.cycle is self._running
        if is_answering and (self.flow.read_paused or not is_ours):
            self._give(self.head_timeout_s)  # the request before this one is being worked on
        else:
            self.transport.close()

    def _look(self) -> None:
        """See whether the client is there: where nothing is read, nobody would notice its end."""
        self._looking = None
        if not self.flow.read_paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _LEFT)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(self.look_s, self._look)
