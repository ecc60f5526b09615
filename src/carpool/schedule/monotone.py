"""The nearest values that never fall: more rows never take less time, whatever was measured."""

from collections.abc import Sequence


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
