"""Medians of noisy seconds, and the nearest values that never fall."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WidthMedian:
    """What was seen of one width."""

    seconds: float  # median
    weight: float  # runs that it stands for


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall, by pooling neighbours that do.

    Source: pool adjacent violators, Ayer et al., Annals of Mathematical Statistics 26, 1955.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, i), (b, n, j) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    return [mean for mean, _, count in pools for _ in range(count)]


def weighted_median(pairs: list[tuple[float, float]]) -> float:
    """The least value that half of the weight does not exceed.

    Args:
        pairs: values with their weights; at least one.
    """
    half = sum(weight for _, weight in pairs) / 2
    below = 0.0
    for value, weight in sorted(pairs):
        below += weight
        if below >= half:
            return value
    return max(pairs)[0]  # rounding
