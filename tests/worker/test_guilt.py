"""The rule of guilt: no request fails without evidence, and none ends workers without end."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.worker.guilt import (
    ALONE_DEATHS,
    AT_ONCE_S,
    GUILTY_DEATHS,
    MOST_LIVES,
    CrashEvidence,
    Death,
    DeathLog,
)


def death(*, alone: bool = True, explained: bool = False) -> Death:
    return Death(object(), 0.0, explained, frozenset("a" if alone else "abcd"))


@dataclass(frozen=True)
class Life:
    """One worker under a request: how far that got in it, and how the worker died."""

    journal_end: int
    positions: tuple[int, ...]
    is_alone: bool
    is_explained: bool


lives = st.builds(
    Life, st.sampled_from([0, 0, 0, 3, 5]), st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.booleans(), st.booleans(),
)  # fmt: skip


def has_evidence(history: list[Life]) -> bool:
    """The rule again, over all that ever happened: slow, and without a memory."""
    furthest = max(max(life.journal_end, *life.positions, 0) for life in history)
    deaths = [
        life for life in history if (0, *life.positions)[-1] == furthest and not life.is_explained
    ]
    if len(deaths) >= GUILTY_DEATHS and sum(one.is_alone for one in deaths) >= ALONE_DEATHS:
        return True
    reached, without_progress = 0, 0
    for life in history:
        reached = max(reached, life.journal_end)
        if (best := max(life.positions, default=0)) > reached:
            reached, without_progress = best, 0
        without_progress += 1
    return without_progress >= MOST_LIVES


@given(st.lists(lives, max_size=40))
def test_a_request_is_guilty_exactly_when_there_is_evidence(history: list[Life]) -> None:
    evidence = CrashEvidence()
    for n, life in enumerate(history, 1):
        evidence.begins(life.journal_end)
        for position in life.positions:
            evidence.reached(position)
        evidence.died(death(alone=life.is_alone, explained=life.is_explained))

        assert evidence.is_guilty == has_evidence(history[:n])
        assert evidence.is_suspect or evidence.is_stuck or not evidence.is_guilty


@pytest.mark.parametrize(("point", "is_alone"), [(0, True), (7, True), (0, False), (7, False)])
def test_a_poison_fails_after_three_deaths_alone_and_after_four_in_company(
    point: int, *, is_alone: bool
) -> None:
    evidence, deaths, journal_end = CrashEvidence(), 0, 0
    while not evidence.is_guilty:
        evidence.begins(journal_end)
        evidence.reached(point)
        evidence.died(death(alone=is_alone or evidence.is_suspect))
        deaths += 1
        journal_end = 0 if evidence.is_journal_suspect else point
    assert deaths == (3 if is_alone else 4)


@given(st.randoms(use_true_random=False), st.integers(1, 30), st.booleans())
def test_a_request_that_never_gets_past_a_point_fails_however_messages_are_lost(
    rng: random.Random, point: int, has_journal: bool
) -> None:
    """The last answers may not have arrived when a worker dies; others may die at the same time."""
    evidence, deaths, journal_end = CrashEvidence(), 0, 0
    while not evidence.is_guilty:
        evidence.begins(journal_end)
        if journal_end and rng.random() < 0.5:
            evidence.reached(journal_end)
        for position in range(journal_end + 1, point + 1 - rng.randrange(3)):
            evidence.reached(position)
        if has_journal:
            journal_end = max(journal_end, evidence.position)
        evidence.died(death(alone=evidence.is_suspect, explained=rng.random() < 0.5))
        deaths += 1
        if evidence.is_journal_suspect:
            journal_end = 0
    assert deaths <= 3 * MOST_LIVES  # the furthest position is known after three


def test_a_guilty_request_explains_the_deaths_of_those_that_ran_beside_it() -> None:
    guilty, innocent = CrashEvidence(), CrashEvidence()
    for _ in range(2):
        shared = death(alone=False)
        guilty.died(shared)
        innocent.died(shared)
    assert innocent.is_suspect
    guilty.explain()
    assert not innocent.is_suspect


@pytest.mark.parametrize(("apart_s", "is_explained"), [(0.0, True), (AT_ONCE_S + 0.01, False)])
def test_deaths_of_several_workers_at_once_are_explained(
    apart_s: float, *, is_explained: bool
) -> None:
    log, first, second = DeathLog(), Death("one", 10.0), Death("two", 10.0 + apart_s)
    log.add(first)
    log.add(second)
    assert (first.is_explained, second.is_explained) == (is_explained, is_explained)


def test_deaths_of_workers_that_ran_one_request_do_not_explain_each_other() -> None:
    """A poison moves to the next worker at once, and kills that as well."""
    log = DeathLog()
    first = Death("one", 10.0, requests=frozenset({"poison", "a"}))
    second = Death("two", 10.1, requests=frozenset({"b", "poison"}))
    third = Death("three", 10.2, requests=frozenset({"c"}))
    log.add(first)
    log.add(second)
    assert not first.is_explained
    assert not second.is_explained
    log.add(third)
    assert all(one.is_explained for one in (first, second, third))


def test_one_worker_that_dies_twice_in_a_moment_explains_nothing() -> None:
    log, deaths = DeathLog(), [Death("one", 10.0), Death("one", 10.1)]
    for one in deaths:
        log.add(one)
    assert not any(one.is_explained for one in deaths)
