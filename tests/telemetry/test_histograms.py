"""Histograms of an engine, as `/stats` has them."""

from bisect import bisect_left
from functools import reduce
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from carpool.telemetry.histograms import histogram, statistics_of
from carpool.types import BUCKETS_S


@given(st.lists(st.floats(0.0, 1e4) | st.sampled_from(BUCKETS_S)))
def test_each_value_counts_once_at_the_first_bound_that_is_not_below_it(
    values: list[float],
) -> None:
    one = histogram(BUCKETS_S)

    for value in values:
        one.observe(value)

    counts = [0] * (len(BUCKETS_S) + 1)
    for value in values:
        counts[bisect_left(BUCKETS_S, value)] += 1
    total_s = reduce(add, values, 0.0)  # from Python 3.12 on, `sum` rounds otherwise
    assert statistics_of(one) == {"bounds": [*BUCKETS_S], "counts": counts, "sum": total_s}
