"""Seconds by rows as a Gaussian process over the logarithms, learned run by run with the speed.

The logarithm of what a forward takes is that of the machine's speed just now, one for all kinds of
calls, and that of its curve: a level, a slope in log rows, bent at a few widths where a device may
saturate, and a small effect of each width's own. So one prior serves all models. What a run says is
divided between the speed and the curve by how uncertain each of them is (a Kalman filter), and the
doubt that is left is remembered as what the curve would be if the speed were another: a run of
another width, or kind, settles it later. Who runs in a busy minute looks no better or worse by it.

A curve has its widths' means and covariance *given the speed*, and how they go with it. A run of
one kind changes nothing there for other kinds: it says no more about them, only the speed is known
better. So kinds need no covariance among each other.

Sources: Kalman, A New Approach to Linear Filtering and Prediction Problems, Journal of Basic
Engineering 82, 1960; Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, chapter 2
and section 5.4.2 (leave one out); robust weights: Lange, Little & Taylor, Robust Statistical
Modeling Using the t Distribution, Journal of the American Statistical Association 84, 1989.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

KNOTS = (2, 4, 8, 16, 32)  # rows after which the slope may change
SLOPE = 0.65  # expected: 0 is where rows cost nothing, 1 where they gain nothing
LEVEL_SD = 30.0  # of log seconds: any machine, any model
SLOPE_SD = 0.4
BEND_SD = 0.25  # at each knot
OWN = 0.03  # of a width's own effect
CLIP = 2.0  # standard deviations of a run: more does not move anything more
NU = 4.0  # degrees of freedom of the t distribution
ROUNDS = 3  # of reweighting
LEAST = 1e-9  # variance
MOST = 4.0**2  # variance, of what was not seen for long


class KnownSpeed(NamedTuple):
    """The logarithm of the machine's speed, as known."""

    log: float
    variance: float
    kept: float = 0.0  # of all drifts so far: logarithms of the part of its variance that was known


class CurveState(NamedTuple):
    """The logarithms of a curve's seconds, at the widths that were seen."""

    rows: tuple[int, ...]
    mean: Array  # if the speed is as below
    slope: Array  # what the mean changes by, a unit of the speed's logarithm
    covariance: Array  # if the speed is known
    speed: KnownSpeed
    at_s: float  # device seconds


def begin(at_s: float) -> CurveState:
    """Nothing seen yet."""
    none = np.zeros(0)
    return CurveState((), none, none, np.zeros((0, 0)), KnownSpeed(0.0, 0.0), at_s)


def from_table(table: Mapping[int, float], variance: float, at_s: float) -> CurveState:
    """The state after reading a table whose entries may be far off: contradicted ones count less.

    Args:
        table: logarithms of seconds by rows.
        variance: of an entry.
    """
    rows = tuple(sorted(table))
    seen = np.array([table[n] for n in rows])
    prior, mean = _covariance(rows, rows), _expected(rows)
    odd = np.zeros(len(rows))  # variance that contradicted entries are granted
    for _ in range(ROUNDS):
        inverse = np.linalg.inv(prior + np.diag(variance + odd))
        certain = inverse.diagonal()
        apart = inverse @ (seen - mean) / certain  # from what all others say
        z_squared = apart**2 / np.maximum(1 / certain - odd, LEAST)
        odd = (variance + OWN**2) * (np.maximum(1.0, (NU + z_squared) / (NU + 1)) - 1)
    gain = prior @ np.linalg.inv(prior + np.diag(variance + odd))
    return CurveState(
        rows,
        mean + gain @ (seen - mean),
        np.zeros(len(rows)),
        prior - gain @ prior,
        KnownSpeed(0.0, 0.0),
        at_s,
    )


def drifted(state: CurveState, speed: KnownSpeed, at_s: float, forgotten_s: float) -> CurveState:
    """A state as it is by now.

    Args:
        speed: as known by now.
        forgotten_s: device seconds in which variances grow by e.
    """
    slope, covariance = state.slope, state.covariance
    kept = exp(speed.kept - state.speed.kept)
    if kept < 1.0:
        covariance = covariance + _outer(slope, slope) * (state.speed.variance * (1 - kept))
        slope = slope * kept
    mean = state.mean + slope * (speed.log - state.speed.log)
    if at_s > state.at_s and state.rows:
        most = max(1.0, MOST / float(covariance.diagonal().max()))
        covariance = covariance * min(most, exp((at_s - state.at_s) / forgotten_s))
    return CurveState(state.rows, mean, slope, covariance, speed, max(at_s, state.at_s))


def with_width(state: CurveState, rows: int) -> CurveState:
    """A state that has a width, too: by what the others say of it."""
    if rows in state.rows:
        return state
    wider = (*state.rows, rows)
    mean, covariance, given = _predicted(state, (rows,))
    size = len(state.rows)
    whole = np.empty((size + 1, size + 1))
    whole[:size, :size] = state.covariance
    whole[size, :size] = whole[:size, size] = given[0] @ state.covariance
    whole[size, size] = covariance[0]
    slope = np.append(state.slope, given[0] @ state.slope)
    return CurveState(wider, np.append(state.mean, mean), slope, whole, state.speed, state.at_s)


def surprise(
    state: CurveState, speed: KnownSpeed, rows: int, seen: float, noise: float
) -> tuple[float, float]:
    """The innovation of a run: seen minus expected, and its standard deviation.

    Args:
        state: as by now, with the width.
        seen: logarithm of its seconds.
        noise: variance of a run.
    """
    place = state.rows.index(rows)
    own = 1.0 + float(state.slope[place])
    variance = own * own * speed.variance + float(state.covariance[place, place]) + noise
    return seen - speed.log - float(state.mean[place]), variance**0.5


def updated(
    state: CurveState, speed: KnownSpeed, rows: int, seen: float, noise: float
) -> tuple[CurveState, KnownSpeed]:
    """A state and the speed after a run. The arguments are those of `surprise`."""
    place = state.rows.index(rows)
    beyond, sd = surprise(state, speed, rows, seen, noise)
    variance = sd * sd
    beyond = min(CLIP * sd, beyond)  # what is far too fast is no outlier
    with_speed = state.slope * speed.variance
    whole = state.covariance + _outer(state.slope, with_speed)
    own = (speed.variance + float(with_speed[place])) / variance
    gain = (with_speed + whole[:, place]) / variance
    left = max(LEAST, speed.variance - own * own * variance)
    slope = (with_speed - gain * (own * variance)) / left
    covariance = whole - _outer(gain, gain * variance) - _outer(slope, slope * left)
    covariance = (covariance + covariance.T) / 2  # for ever, however it is rounded
    now = KnownSpeed(speed.log + own * beyond, left, speed.kept)
    return CurveState(
        state.rows, state.mean + gain * beyond, slope, covariance, now, state.at_s
    ), now


def _outer(one: Array, other: Array) -> Array:
    """The outer product of two vectors: `numpy.outer` takes three times as long for short ones."""
    product: Array = one[:, None] * other
    return product


def curve(state: CurveState, most: int) -> tuple[Array, Array]:
    """Seconds of 1, 2, ... rows, and the standard deviation of each beside all of them together.

    What all widths have in common is left out: it is told from the speed by nothing.
    """
    mean, variance, _ = _predicted(state, tuple(range(1, most + 1)))
    if state.rows:
        size = len(state.rows)
        precision = np.linalg.inv(state.covariance + LEAST * np.eye(size)).sum()
        variance = variance - 1 / precision
    seconds = np.exp(mean)
    return seconds, seconds * np.sqrt(np.maximum(variance, 0.0))


def _predicted(state: CurveState, asked: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Means and variances of widths, and what they take of those that were seen."""
    given, left, expected = _given(state.rows, asked)
    mean = expected + given @ (state.mean - _expected(state.rows))
    return mean, left + np.einsum("ij,jk,ik->i", given, state.covariance, given), given


@lru_cache(maxsize=1024)
def _given(rows: tuple[int, ...], asked: tuple[int, ...]) -> tuple[Array, Array, Array]:
    cross, prior = _covariance(asked, rows), _covariance(rows, rows)
    given = np.linalg.solve(prior, cross.T).T if rows else cross
    left = np.maximum(_covariance(asked, asked).diagonal() - (given * cross).sum(axis=1), 0.0)
    return given, left, _expected(asked)


@lru_cache(maxsize=1024)
def _expected(rows: tuple[int, ...]) -> Array:
    expected: Array = SLOPE * np.log(np.array(rows, dtype=float))
    return expected


@lru_cache(maxsize=1024)
def _covariance(some: tuple[int, ...], others: tuple[int, ...]) -> Array:
    prior = np.array([LEVEL_SD, SLOPE_SD] + [BEND_SD] * len(KNOTS)) ** 2
    same = np.equal.outer(np.array(some), np.array(others))
    covariance: Array = (_features(some) * prior) @ _features(others).T + OWN**2 * same
    return covariance


def _features(rows: tuple[int, ...]) -> Array:
    log_rows = np.log(np.array(rows, dtype=float))
    bends = [np.maximum(0.0, log_rows - np.log(knot)) for knot in KNOTS]
    return np.stack([np.ones(len(rows)), log_rows, *bends], axis=-1)
