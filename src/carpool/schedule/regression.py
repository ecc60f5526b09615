"""Fit seconds by rows from noisy medians: a robust Bayesian regression over all widths together.

The curve is a fixed part and a part a row, bent at a few widths where a device may saturate, and a
small effect of each width's own. Everything is in units of one row's seconds, so one prior serves
all models. Points that the others contradict count less: weights of a Student t distribution,
found in a few rounds of iteratively reweighted least squares on leave-one-out residuals. A
contradicted width that was run often keeps its own value: there it is the curve that is odd.

Sources: Lange, Little & Taylor, Robust Statistical Modeling Using the t Distribution, Journal of
the American Statistical Association 84, 1989; leave-one-out residuals of Gaussian processes:
Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool.schedule.medians import WidthMedian, weighted_median

KNOTS = (2, 4, 8, 16, 32)  # rows after which the slope may change
SLOPE = 0.5  # expected: a row more takes half of what the first took
PRIOR_MEAN = np.array([1.0, SLOPE] + [0.0] * len(KNOTS))
PRIOR_VARIANCE = np.array([0.5, 0.35] + [0.15] * len(KNOTS)) ** 2
OWN = 0.03  # standard deviation of a width's own effect, relative
NU = 4.0  # degrees of freedom of the t distribution
OFTEN = 5.0  # runs, by weight, that are believed against the rest of the curve
ROUNDS = (2, 3)  # of reweighting: to find what one row takes, then in units of that
LEAST = 0.02  # of one row's seconds: no width takes less
MEDIAN_LOSS = 1.57  # variance of a median over that of a mean: pi / 2

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds for widths of 1, 2, 3... rows, with their uncertainty."""

    seconds: Array
    sd: Array  # standard deviation, seconds


def fit(points: Mapping[int, WidthMedian], *, noise: float, most: int) -> Fitted:
    """Fit a curve through points.

    Args:
        points: by rows; at least one.
        noise: relative standard deviation of a single run.
        most: rows of the widest forward that is asked for.
    """
    ordered = sorted(points.items())
    shape = _shape(tuple(n for n, _ in ordered), most)
    seconds = np.array([point.seconds for _, point in ordered])
    weight = np.array([point.weight for _, point in ordered])
    alone = seconds / (1 + SLOPE * (shape.rows - 1))
    unit = weighted_median(sorted(zip(alone.tolist(), weight.tolist(), strict=True)))
    first, last = ROUNDS
    unit *= float(_posterior(shape, seconds / unit, weight, noise, first)[0][0])
    mean, variance = _posterior(shape, seconds / unit, weight, noise, last)
    return Fitted(mean * unit, np.sqrt(variance) * unit)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What depends on no seconds: of the widths that were run, and of those that are asked for."""

    rows: Array  # that were run
    inside: Array  # whether each of them is asked for
    expected: Array  # of those that were run
    smooth: Array  # their covariance, where the curve has no kinks of its own
    asked: Array  # what is expected of those that are asked for
    asked_variance: Array
    cross: Array  # covariance of the two


@lru_cache(maxsize=256)
def _shape(runs: tuple[int, ...], most: int) -> _Shape:
    rows, asked = np.array(runs), np.arange(1, most + 1)
    features, wanted = _features(rows), _features(asked)
    return _Shape(
        rows,
        rows <= most,
        features @ PRIOR_MEAN,
        (features * PRIOR_VARIANCE) @ features.T,
        wanted @ PRIOR_MEAN,
        (wanted**2) @ PRIOR_VARIANCE,
        (wanted * PRIOR_VARIANCE) @ features.T,
    )


def _posterior(
    shape: _Shape, seen: Array, weight: Array, noise: float, rounds: int
) -> tuple[Array, Array]:
    """Mean and variance at the widths that are asked for, in units of about one row."""
    is_often, runs = weight >= OFTEN, np.maximum(weight, 0.02)
    others = seen  # what all other widths say of each that was seen
    odd = np.zeros(len(seen))  # variance that contradicted points are granted
    for last in [*[False] * rounds, True]:
        level = np.sqrt(seen * np.maximum(seen / 16, others))  # far too low is not exact for that
        chance = (noise * level) ** 2 * MEDIAN_LOSS / runs
        own = (OWN * level) ** 2
        covariance = shape.smooth.copy()
        covariance.ravel()[:: len(seen) + 1] += chance + own + odd  # its diagonal
        inverse = np.linalg.inv(covariance)
        solved = inverse @ (seen - shape.expected)
        certain = inverse.diagonal()  # one over the leave-one-out variance
        others = seen - solved / certain
        if not last:
            z_squared = (solved / certain) ** 2 / np.maximum(1 / certain - odd, 1e-12)
            odd = (chance + own) * (np.maximum(1.0, (NU + z_squared) / (NU + 1)) - 1)
    mean = shape.asked + shape.cross @ solved
    known = np.einsum("ij,jk,ik->i", shape.cross, inverse, shape.cross)
    variance = np.maximum(shape.asked_variance - known, 0.0) + (OWN * mean) ** 2
    noise_part = chance + np.where(is_often, 0.0, odd)
    before = np.maximum(1 / certain - noise_part, 1e-12)
    gain = before / (before + noise_part)
    inside = shape.inside
    at = shape.rows[inside] - 1
    mean[at] = (others + gain * (seen - others))[inside]
    variance[at] = (before * (1 - gain))[inside]
    return np.maximum(mean, LEAST), np.maximum(variance, 0.0)


def _features(rows: Array) -> Array:
    """One, the rows after the first, and those after each knot."""
    columns = [np.ones(len(rows)), rows - 1.0]
    return np.stack([*columns, *(np.maximum(0.0, rows - knot) for knot in KNOTS)], axis=-1)
