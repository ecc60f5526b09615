"""The main loop's heartbeat: tells other threads how long it has been busy with one thing."""

from dataclasses import dataclass

from carpool.types import Clock


@dataclass(slots=True)
class LoopProgress:
    """When the loop last began something, and how long that is expected to take.

    On an accelerator whatever comes after a forward may wait for it, so that its seconds count
    until the next one is launched.
    """

    clock: Clock
    _now: tuple[float, float | None] | None = None  # start, and the expected seconds
    _queued_s: float | None = 0.0  # seconds of the forward that may still run on the device
    _before_compiling: float | None = 0.0

    def beat(self, expected_s: float | None = 0.0) -> None:
        """Work begins that is expected to take so long; None: unknown."""
        queued_s = self._queued_s
        if expected_s is not None:
            expected_s = None if queued_s is None else expected_s + queued_s
        self._now = self.clock(), expected_s

    def launched(self, expected_s: float | None) -> None:
        """A forward of so many seconds is queued on the device; those before it are over."""
        self._queued_s = expected_s

    def compiling(self) -> None:
        """Code is being compiled in the middle of other work: it may take any time."""
        self._before_compiling = None if self._now is None else self._now[1]
        self._now = self.clock(), None

    def compiled(self) -> None:
        """Compiling has ended: the work begun before it goes on."""
        self._now = self.clock(), self._before_compiling

    def idle(self) -> None:
        """There is nothing to do."""
        self._now = None

    def read(self) -> tuple[float, float | None]:
        """Seconds since the last beat, 0 when idle; and those expected then. From any thread."""
        now = self._now  # one read: the other thread writes a whole pair
        return (0.0, 0.0) if now is None else (self.clock() - now[0], now[1])
