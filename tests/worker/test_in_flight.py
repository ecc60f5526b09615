"""Who goes to the next worker: the guilty are found, the innocent are answered."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.types import CheckedRequest
from carpool.worker.in_flight import RERUNS, Manifest
from carpool.worker.protocol import Submit


def submit(name: str) -> Submit:
    return Submit(CheckedRequest(request_id=name, seed=0, arguments={}))


def ids(due: list[Submit]) -> list[str]:
    return [one.job.request_id for one in due]


def boarded(*names: str) -> Manifest:
    """These are running."""
    manifest = Manifest()
    for name in names:
        manifest.add(submit(name))
    assert ids(manifest.due()) == list(names)
    for name in names:
        manifest.started(name)
    return manifest


def test_everybody_is_sent_once_in_the_order_of_coming() -> None:
    manifest = boarded("a", "b")

    assert manifest.due() == []
    manifest.add(submit("c"))
    assert ids(manifest.due()) == ["c"]


def test_after_one_death_all_go_again_together() -> None:
    manifest = boarded("a", "b")

    assert manifest.died() == []
    assert ids(manifest.due()) == ["a", "b"]


def test_after_two_deaths_each_that_ran_goes_alone_and_newcomers_wait() -> None:
    manifest = boarded("a", "b")
    manifest.died()
    manifest.due()
    manifest.started("a")
    manifest.started("b")
    manifest.died()
    manifest.add(submit("new"))

    assert ids(manifest.due()) == ["a"]
    assert manifest.due() == []
    assert manifest.remove("a")
    assert ids(manifest.due()) == ["b"]
    manifest.remove("b")
    assert ids(manifest.due()) == ["new"]


def test_who_kills_alone_as_well_fails_and_the_others_go_on() -> None:
    manifest = boarded("bad", "good")
    for _ in range(2):
        manifest.died()
        manifest.due()
        manifest.started("bad")
        manifest.started("good")

    assert manifest.died() == ["bad"]
    assert ids(manifest.due()) == ["good"]


def test_who_only_waited_in_line_is_not_to_blame() -> None:
    manifest = boarded("running")
    manifest.add(submit("waiting"))
    manifest.due()
    for _ in range(2):
        manifest.died()
        manifest.due()
        manifest.started("running")

    assert manifest.died() == ["running"]
    assert ids(manifest.due()) == ["waiting"]


def test_a_worker_that_dies_before_it_says_who_started_is_blamed_on_all_it_had() -> None:
    manifest = Manifest()
    manifest.add(submit("a"))
    for _ in range(RERUNS):
        manifest.due()
        assert manifest.died() == []
    manifest.due()

    assert manifest.died() == ["a"]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 4)
)
def test_all_innocent_are_answered_and_all_guilty_fail_after_three_runs(
    passengers: list[tuple[bool, bool]], places: int
) -> None:
    """A worker runs so many at once and dies of a guilty one; not all say that they started."""
    guilty = {f"{n}" for n, (is_guilty, _) in enumerate(passengers) if is_guilty}
    tells = {f"{n}" for n, (_, does_tell) in enumerate(passengers) if does_tell}
    manifest, runs, failed, answered = Manifest(), Counter[str](), set[str](), set[str]()
    for n in range(len(passengers)):
        manifest.add(submit(f"{n}"))

    line: list[str] = []
    while len(manifest):
        line += ids(manifest.due())
        running, line = line[:places], line[places:]
        runs.update(running)
        for name in tells & set(running):
            manifest.started(name)
        if guilty & set(running):
            failed |= set(manifest.died())
            line = []
        else:
            answered |= {name for name in running if manifest.remove(name)}

    assert failed == guilty
    assert answered == runs.keys() - guilty
    if len(tells) == len(passengers):
        assert max(runs.values()) <= 1 + RERUNS
