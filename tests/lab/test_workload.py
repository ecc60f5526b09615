"""Workloads: arrivals as they were asked for, mixes and traces as they were written, by seed."""

import itertools
import json
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidValue
from carpool_lab.workload import (
    PROMPTS,
    Arrival,
    Mix,
    Setting,
    bursts,
    generators,
    kind_of,
    plan,
    read_mix,
    read_trace,
)

NOTHING = Mix([Setting()])


def lines(*entries: Any) -> str:
    return "\n".join(json.dumps(entry) for entry in entries)


def asked(mix: Mix, seed: int = 0, count: int = 200) -> list[dict[str, Any]]:
    _, what = generators(seed)
    return [mix.choose(what) for _ in range(count)]


# Arrivals


@given(st.floats(0.01, 100), st.integers(1, 9), st.integers(0, 2**32))
def test_arrivals_never_go_back_and_bursts_come_at_once(
    rate_per_s: float, size: int, seed: int
) -> None:
    when, _ = generators(seed)

    times = list(itertools.islice(bursts(rate_per_s, when, size=size), 5 * size))

    assert times == sorted(times)
    assert times[0] > 0
    assert len(set(times)) == 5
    assert all(len(set(times[i * size : (i + 1) * size])) == 1 for i in range(5))


@pytest.mark.parametrize("size", [1, 8])
def test_the_rate_counts_requests_also_when_they_come_in_bursts(size: int) -> None:
    when, _ = generators(0)

    last_s = list(itertools.islice(bursts(4.0, when, size=size), 20_000))[-1]

    assert 20_000 / last_s == pytest.approx(4.0, rel=0.05)


def test_gaps_between_poisson_arrivals_vary_as_much_as_their_mean() -> None:
    when, _ = generators(0)

    times = list(itertools.islice(bursts(2.0, when, size=1), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]

    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)


def test_an_infinite_rate_is_all_at_once() -> None:
    when, _ = generators(0)

    assert set(itertools.islice(bursts(inf, when, size=1), 50)) == {0.0}


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_not_above_0_is_refused(rate_per_s: float) -> None:
    with pytest.raises(InvalidValue, match="must be above 0"):
        bursts(rate_per_s, generators(0)[0], size=1)


# Seeds


def test_the_seed_decides_everything_and_the_rate_does_not_change_what_is_asked_for() -> None:
    def planned(seed: int, rate_per_s: float) -> list[Arrival]:
        when, what = generators(seed)
        return plan(bursts(rate_per_s, when, size=1), NOTHING, what, count=20)

    once, again, faster, other = planned(1, 1), planned(1, 1), planned(1, 4), planned(2, 1)

    assert once == again
    assert [one.body for one in once] == [one.body for one in faster]
    assert [one.at_s for one in once] == pytest.approx([4 * one.at_s for one in faster])
    assert once != other


def test_every_request_has_a_seed_of_its_own_and_a_prompt() -> None:
    requests = asked(NOTHING)

    assert len({request["seed"] for request in requests}) == len(requests)
    assert all(0 <= request["seed"] < 2**32 for request in requests)
    assert {request["prompt"] for request in requests} == set(PROMPTS)


# Mixes


def test_a_mix_says_how_often_and_what_and_the_rest_comes_from_the_defaults() -> None:
    mix = read_mix(
        lines(
            {"weight": 3, "prompt": "a cat", "size": "64x64", "priority": 2},
            {"prompts": ["a dog", "a fox"], "num_inference_steps": 8, "lora": [{"id": "ink"}]},
        ),
        {"size": "32x32", "model": "m"},
    )

    requests = [{k: v for k, v in one.items() if k != "seed"} for one in asked(mix, count=2000)]

    often = {"prompt": "a cat", "size": "64x64", "model": "m", "priority": 2}
    rest = {"size": "32x32", "model": "m", "num_inference_steps": 8, "lora": [{"id": "ink"}]}
    assert requests.count(often) / 2000 == pytest.approx(0.75, abs=0.05)
    others = [one for one in requests if one != often]
    assert all(one in ({"prompt": "a dog", **rest}, {"prompt": "a fox", **rest}) for one in others)


def test_a_list_says_the_same_as_lines() -> None:
    entries = [{"prompt": "a", "size": "8x8"}, {"weight": 2}]

    assert read_mix(lines(*entries), {}) == read_mix(json.dumps(entries, indent=1), {})


def test_an_entry_that_is_weighted_0_never_comes() -> None:
    mix = read_mix(lines({"weight": 0, "prompt": "never"}, {"prompt": "always"}), {})

    assert {request["prompt"] for request in asked(mix)} == {"always"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no entry with a weight above 0"),
        ('{"weight": 0}', "no entry with a weight above 0"),
        ("prompt: a cat", "neither JSON lines nor a JSON list"),
        ("{}\n7", "entry 2: must be a JSON object, not 7"),
        ('{"weight": -1}', "entry 1: weight=-1 must be a number, 0 or more"),
        ('{"weight": true}', "entry 1: weight=True must be a number"),
        ('{"weight": NaN}', "entry 1: weight=nan must be a number"),
        ('{"prompt": "a", "prompts": ["b"]}', "entry 1: give prompt or prompts, not both"),
        ('{"prompts": []}', "entry 1: prompts must be a list of texts, not empty"),
        ('{"prompt": 3}', "entry 1: prompts must be a list of texts"),
        ('{"num_inference_steps": "8"}', "entry 1: num_inference_steps='8': a whole number"),
        ('{"num_inference_steps": 0}', "entry 1: num_inference_steps=0: a whole number, 1 or more"),
    ],
)
def test_a_wrong_mix_is_refused_with_the_entry(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        read_mix(text, {})


# Traces


def test_a_trace_says_when_and_the_mix_what_it_leaves_out() -> None:
    text = lines({"at_s": 2.5, "size": "64x64"}, {"at_s": 0, "prompt": "a cat", "seed": 7})

    first, second = read_trace(text, Mix([Setting({"size": "32x32"})]), generators(0)[1])

    assert first == Arrival(0, {"prompt": "a cat", "seed": 7, "size": "32x32"})
    assert (second.at_s, second.body["size"]) == (2.5, "64x64")
    assert second.body["prompt"] in PROMPTS


@pytest.mark.parametrize("at_s", ["null", '"1"', "-1", "Infinity"])
def test_a_trace_without_its_times_is_refused(at_s: str) -> None:
    with pytest.raises(InvalidValue, match=r"entry 1: at_s=.* must be seconds, 0 or more"):
        read_trace(f'{{"at_s": {at_s}}}', NOTHING, generators(0)[1])


# Kinds


def test_requests_are_of_one_kind_when_a_step_of_them_is_as_much_work() -> None:
    one = {"prompt": "a", "seed": 1, "size": "8x8", "num_inference_steps": 4, "user": "me"}
    alike = {"size": "8x8", "prompt": "b", "seed": 2, "num_inference_steps": 9, "priority": 1}

    assert kind_of(one) == kind_of(alike)
    assert kind_of(one) != kind_of({**one, "size": "8x16"})
    assert kind_of(one) != kind_of({**one, "negative_prompt": "b"})
    assert kind_of({**one, "negative_prompt": "c"}) == kind_of({**one, "negative_prompt": "b"})
