"""Trials: forwards of an uncertain width, run to learn how long it takes (exploration).

*Budget.* A trial is charged with the device time that it is expected to lose: in a burst, the delay
of the burst's end; else, the loss of its round for the present requests. All trials together may
lose `SHARE` of the device's time. Outside bursts a few forwards' worth is free at the beginning, as
nothing is known.

*Worth.* A trial is run if the expected gain of knowing the width, over all forwards to come with as
many calls waiting, exceeds the loss of as many trials as it takes to know. Where few calls ever
wait, wide forwards are of little use, and so is knowing how long they take.

Sources: expected improvement, Jones, Schonlau & Welch, Efficient Global Optimization of Expensive
Black-Box Functions, Journal of Global Optimization 13, 1998; a budget of regret, after Lai &
Robbins, Asymptotically Efficient Adaptive Allocation Rules, Advances in Applied Mathematics 6,
1985.
"""

from dataclasses import dataclass, field
from math import erfc, exp, inf, pi, sqrt
from typing import Any

SHARE = 0.01  # of device time
FREE = 8.0  # forwards of the width that is best, in seconds, for each kind: what trials may lose
FLOOR = 0.02  # of its own seconds: what a trial loses at least, as far as anybody knows
HORIZON = 1000  # forwards that are to come, at most: as many as there were
REMEMBERED = 1000.0  # forwards whose queue depths are remembered
SURE = 0.005  # of its seconds: a width that is no more uncertain than this is known


def value(worse: float, sd: float, runs: float) -> float:
    """Expected gain of knowing a width, in forwards of the best one.

    Args:
        worse: than the best, as far as is known, in parts of it.
        sd: standard deviation of that.
        runs: of the kind so far, whose lines were long enough for the width.
    """
    if sd < SURE:
        return 0.0
    z = worse / sd
    better = sd * (exp(-z * z / 2) / sqrt(2 * pi) - z * erfc(z / sqrt(2)) / 2)
    return min(HORIZON, runs) * better


@dataclass(slots=True)
class QueueDepths:
    """How many calls waited for each forward of a kind: a width is of use where as many wait."""

    _weights: list[float] = field(default_factory=lambda: [1.0])  # by calls, less one
    _weight: float = 1.0  # of the next: it grows, instead of all others becoming less

    def ran(self, calls: int) -> None:
        """Note a forward, and how many calls could have been in it."""
        if calls > len(self._weights):
            self._weights += [0.0] * (calls - len(self._weights))
        self._weights[calls - 1] += self._weight
        self._weight *= 1 + 1 / REMEMBERED
        if self._weight > 1e9:
            self._weights = [weight / self._weight for weight in self._weights]
            self._weight = 1.0

    def share(self, calls: int) -> float:
        """The part of forwards lately for which as many calls waited, or more."""
        return sum(self._weights[calls - 1 :]) / sum(self._weights)


def price(loss: float, sd: float, noise: float) -> float:
    """Expected loss of trials until a width is known twice as well, in forwards of the best one.

    Args:
        loss: of each.
        sd: of what is known, in parts of the best.
        noise: of a run, the same.
    """
    return loss * max(1.0, (noise / sd) ** 2) if sd else inf


@dataclass(slots=True)
class Trials:
    """The budget of trials: spent, and allowed."""

    count: int = 0
    lost_s: float = 0.0  # predicted when they began
    device_s: float = 0.0  # of all forwards
    free_s: float = 0.0

    def allow(self, loss_s: float, *, in_burst: bool = False) -> bool:
        """Whether a trial that is likely to lose so much may be run.

        Args:
            in_burst: nothing is free: its first forwards, which grow, tell the most already.
        """
        free_s = 0.0 if in_burst else self.free_s
        return self.lost_s + loss_s <= free_s + SHARE * self.device_s

    def ran(self, loss_s: float) -> None:
        """Note that a trial is run."""
        self.count += 1
        self.lost_s += loss_s

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "lost_s": self.lost_s,
            "allowed_s": self.free_s + SHARE * self.device_s,
            "device_s": self.device_s,
        }
