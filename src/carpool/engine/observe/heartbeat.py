"""Whether the loop still turns, told to other threads."""

from dataclasses import dataclass

from carpool.types import Clock


@dataclass(slots=True)
class Pulse:
    """When the loop last did something, and how long it may be busy with what it does now."""

    clock: Clock
    _now: tuple[float, float | None] | None = None  # since, and what it is likely to take

    def beat(self, expected_s: float | None = 0.0) -> None:
        """Something begins that is likely to take so long; None: nobody knows."""
        self._now = self.clock(), expected_s

    def rest(self) -> None:
        """There is nothing to do."""
        self._now = None

    def read(self) -> tuple[float, float | None]:
        """Seconds since the last beat, 0 at rest; and what was likely then. From any thread."""
        now = self._now  # one read: the other thread writes a whole pair
        return (0.0, 0.0) if now is None else (self.clock() - now[0], now[1])
