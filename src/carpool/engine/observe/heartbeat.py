"""The main loop's heartbeat: tells other threads how long it has been busy with one thing."""

from dataclasses import dataclass

from carpool.types import Clock


@dataclass(slots=True)
class Heartbeat:
    """When the loop last began something, and how long that is expected to take."""

    clock: Clock
    _now: tuple[float, float | None] | None = None  # since when, and the expected seconds

    def beat(self, expected_s: float | None = 0.0) -> None:
        """Something begins that is expected to take so long; None: not known."""
        self._now = self.clock(), expected_s

    def idle(self) -> None:
        """There is nothing to do."""
        self._now = None

    def read(self) -> tuple[float, float | None]:
        """Seconds since the last beat, 0 when idle; and those expected then. From any thread."""
        now = self._now  # one read: the other thread writes a whole pair
        return (0.0, 0.0) if now is None else (self.clock() - now[0], now[1])
