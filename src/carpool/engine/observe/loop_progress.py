"""The main loop's heartbeat: shows other threads for how long it has been busy with one task."""

from dataclasses import dataclass

from carpool.types import Clock


@dataclass(slots=True)
class LoopProgress:
    """The start of the loop's current task, and its expected duration.

    On an accelerator the work after a forward may wait for it, so the forward's seconds count until
    the next launch.
    """

    clock: Clock
    _now: tuple[float, float | None] | None = None  # start, and the expected seconds
    _queued_s: float | None = 0.0  # seconds of the forward that may still run on the device
    _before_compiling: float | None = 0.0

    def beat(self, expected_s: float | None = 0.0) -> None:
        """Start a task that is expected to take `expected_s`; None: unknown."""
        queued_s = self._queued_s
        if expected_s is not None:
            expected_s = None if queued_s is None else expected_s + queued_s
        self._now = self.clock(), expected_s

    def progressed(self) -> None:
        """Note that a part of the current task has ended, such as a block of a sweep."""
        if self._now is not None:
            self._now = self.clock(), self._now[1]

    def launched(self, expected_s: float | None) -> None:
        """Note that a forward is queued on the device; all earlier ones have ended."""
        self._queued_s = expected_s

    def compiling(self) -> None:
        """Note that a compilation has started inside the current task: its duration is unknown."""
        self._before_compiling = None if self._now is None else self._now[1]
        self._now = self.clock(), None

    def compiled(self) -> None:
        """Note that the compilation has ended: the task continues."""
        self._now = self.clock(), self._before_compiling

    def idle(self) -> None:
        """Note that the loop is idle."""
        self._now = None

    def read(self) -> tuple[float, float | None]:
        """Seconds since the last beat, 0 when idle; and the expected seconds. From any thread."""
        now = self._now  # read once: the other thread replaces the whole pair
        return (0.0, 0.0) if now is None else (self.clock() - now[0], now[1])
