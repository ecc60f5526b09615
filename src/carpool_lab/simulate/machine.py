"""Disturbances of forwards, as on a real machine, for simulations with learned costs.

Forwards vary by 20 % (lognormal); one in a hundred takes ten times as long; in phases of 30 s all
forwards take twice as long; after ten minutes the device is 30 % slower permanently.

To compare modes with few runs, chance affects all modes as equally as possible. Phases and the
slowdown come at equal times, and a given step of a request that runs alone has an equal factor.
Each hundred shared forwards have the same hundred factors, in a mode's own order. Outliers hit one
hundredth of the device's undisturbed time, at any width.

Source: stratified sampling and common random numbers, Owen, Monte Carlo theory, methods and
examples, 2013, chapter 8.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import exp
from statistics import NormalDist

from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind

SPREAD = 0.2  # standard deviation of the logarithm of a forward's seconds
HUNDRED = 100  # forwards in a stratum: one outlier, equal factors in all modes
OUTLIER = 10.0  # factor of an outlier
PHASE_S = 30.0
BETWEEN_S = 120.0  # mean time between slow phases
BUSY = 2.0  # factor in a slow phase
WORN_AFTER_S = 600.0
WORN = 1.3  # factor after that
WRONG = 4.0  # error factor of a table's entry, up or down
WIDTHS = (1, 2, 3, 4, 6, 8)  # widths of a table
FACTORS = tuple(
    exp(NormalDist(-(SPREAD**2) / 2, SPREAD).inv_cdf((place + 0.5) / HUNDRED))
    for place in range(HUNDRED)
)  # percentiles of a lognormal distribution with mean 1


@dataclass(slots=True)
class Machine:
    """Computes the factor on the duration of each forward."""

    seed: int
    _forwards: random.Random = field(init=False)
    _phases: random.Random = field(init=False)
    _phase_s: float = 0.0  # start of the current or next slow phase
    _unused: list[int] = field(default_factory=list)  # unused indices of the hundred factors
    _due_s: float = 0.0  # seconds of outliers that are due
    _strikes: float = 0.0  # threshold of the next outlier, in mean forwards
    _mean_s: float = 0.0  # mean seconds of shared forwards
    _shared: int = 0

    def __post_init__(self) -> None:
        self._forwards, self._phases = random.Random(self.seed), random.Random(self.seed + 1)
        self._phase_s = self._gap_s()
        self._strikes = self._forwards.random()

    def factor(self, now_s: float, calls: int, step: tuple[int, int, int], seconds: float) -> float:
        """The factor on the seconds of the next forward. `now_s` never decreases.

        Args:
            calls: number of calls in it.
            step: the leader's request, its stage, and its finished calls.
            seconds: its undisturbed duration.
        """
        while now_s >= self._phase_s + PHASE_S:
            self._phase_s += PHASE_S + self._gap_s()
        if calls == 1:
            digest = blake2b(repr((self.seed, step)).encode(), digest_size=16).digest()
            varies, strikes = (int.from_bytes(digest[i : i + 8], "big") for i in (0, 8))
            factor, is_outlier = FACTORS[varies % HUNDRED], strikes % HUNDRED == 0
        else:
            if not self._unused:
                self._unused = self._forwards.sample(range(HUNDRED), HUNDRED)
            factor, is_outlier = FACTORS[self._unused.pop()], self._is_struck(seconds)
        factor *= OUTLIER if is_outlier else 1.0
        factor *= BUSY if now_s >= self._phase_s else 1.0
        return factor * (WORN if now_s >= WORN_AFTER_S else 1.0)

    def _is_struck(self, seconds: float) -> bool:
        self._shared += 1
        self._mean_s += (seconds - self._mean_s) / self._shared
        self._due_s += seconds / HUNDRED
        if self._due_s < self._strikes * self._mean_s:
            return False
        self._due_s -= seconds
        self._strikes = self._forwards.random()
        return True

    def _gap_s(self) -> float:
        return self._phases.expovariate(1 / BETWEEN_S)


def wrong(costs: Costs, seed: int) -> Costs:
    """A table with an error of 4 times at one width of each kind."""
    rng, curves = random.Random(seed), dict[CallKind, Curve]()
    for kind, curve in costs:
        table: Mapping[int, float] = {rows: curve.seconds(rows) for rows in WIDTHS}
        width, times = rng.choice(WIDTHS), rng.choice((1 / WRONG, WRONG))
        curves[kind] = Curve({**table, width: table[width] * times}, 1.0)
    return Costs(dict(curves))
