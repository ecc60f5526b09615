"""Trials: forwards of a width that is uncertain, run to learn what it takes.

A trial is charged with the device time that it is likely to lose: in a burst with what this ends
later by, with the round of those who were left out, else with what its round is worse by for those
who are there. All of them together may lose `SHARE` of the device's time, and outside bursts less.
At the beginning a few forwards' worth is free there, as nothing is known.

One is worth it if what is gained, in the mean, by knowing the width, in all the forwards to come,
is more than as many trials lose as it takes to tell.

Sources: expected improvement, Jones, Schonlau & Welch, Efficient Global Optimization of Expensive
Black-Box Functions, Journal of Global Optimization 13, 1998; a budget of regret, after Lai &
Robbins, Asymptotically Efficient Adaptive Allocation Rules, Advances in Applied Mathematics 6,
1985.
"""

from dataclasses import dataclass
from math import erfc, exp, inf, pi, sqrt
from typing import Any

SHARE = 0.01  # of device time
SHARE_OF_LINES = 0.003  # outside bursts: who comes later waits, too; 1 % is 5 % of the mean there
FREE = 8.0  # forwards of the width that is best, in seconds, for each kind: what trials may lose
FLOOR = 0.02  # of its own seconds: what a trial loses at least, as far as anybody knows
HORIZON = 1000  # forwards that are to come, at most: as many as there were
SURE = 0.005  # of its seconds: a width that is no more uncertain than this is known


def value(worse: float, sd: float, runs: int) -> float:
    """What is gained, in the mean, by knowing a width, in forwards of the best one.

    Args:
        worse: than the best, as far as is known, in parts of it.
        sd: standard deviation of that.
        runs: of the kind, so far.
    """
    if sd < SURE:
        return 0.0
    z = worse / sd
    better = sd * (exp(-z * z / 2) / sqrt(2 * pi) - z * erfc(z / sqrt(2)) / 2)
    return min(HORIZON, runs) * better


def price(loss: float, sd: float, noise: float) -> float:
    """What trials lose until a width is known twice as well, in forwards of the best one.

    Args:
        loss: of each.
        sd: of what is known, in parts of the best.
        noise: of a run, the same.
    """
    return loss * max(1.0, (noise / sd) ** 2) if sd else inf


@dataclass(slots=True)
class Trials:
    """What was spent on trials, and how much may be."""

    count: int = 0
    lost_s: float = 0.0  # predicted when they began
    device_s: float = 0.0  # of all forwards
    free_s: float = 0.0

    def allow(self, loss_s: float, *, in_burst: bool = False) -> bool:
        """Whether a trial that is likely to lose so much may be run.

        Args:
            in_burst: nothing is free: its first forwards, which grow, tell the most already.
        """
        return self.lost_s + loss_s <= (self._in_bursts_s if in_burst else self._in_lines_s)

    @property
    def _in_bursts_s(self) -> float:
        return SHARE * self.device_s

    @property
    def _in_lines_s(self) -> float:
        return self.free_s + SHARE_OF_LINES * self.device_s

    def ran(self, loss_s: float) -> None:
        """Note that a trial is run."""
        self.count += 1
        self.lost_s += loss_s

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "lost_s": self.lost_s,
            "allowed_s": max(self._in_bursts_s, self._in_lines_s),
            "device_s": self.device_s,
        }
