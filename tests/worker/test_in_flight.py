"""Which requests go to the next worker: the guilty one is identified, the others are answered."""

from collections import Counter
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from carpool.types import CheckedRequest
from carpool.worker.guilt import Death
from carpool.worker.in_flight import InFlight, RequestInFlight
from carpool.worker.protocol import Submit


class Requests(InFlight):
    """Requests in flight, called by their names."""

    def add_new(self, *names: str) -> None:
        for name in names:
            submit = Submit(CheckedRequest(request_id=name, seed=0, arguments={}))
            self[name] = RequestInFlight(submit, cast("Any", None))  # nobody waits for its answer

    def due(self) -> list[str]:
        return [one.request_id for one in self.take_due()]

    def start(self, *names: str) -> None:
        for name in names:
            if found := self.get(name):
                found.has_started = True

    def advance(self, name: str, position: int) -> None:
        if found := self.get(name):
            found.evidence.reached(position)

    def died(self, *, is_explained: bool = False) -> list[str]:
        """A worker dies; returns what fails once the next one is ready."""
        self.worker_died(Death(self, 0.0, is_explained))
        return [one.request_id for one in self.take_guilty()]

    def answer(self, name: str) -> bool:
        found = self.get(name)
        return found is not None and self.remove(found)


def running(*names: str) -> Requests:
    """These are running in a worker."""
    requests = Requests()
    requests.add_new(*names)
    assert requests.due() == list(names)
    requests.start(*names)
    return requests


def die_together(requests: Requests, *names: str) -> None:
    """Two workers die in which all of these ran."""
    for _ in range(2):
        assert requests.died() == []
        requests.due()
        requests.start(*names)


def test_each_request_is_sent_once_in_the_order_of_arrival() -> None:
    requests = running("a", "b")

    assert requests.due() == []
    requests.add_new("c")
    assert requests.due() == ["c"]


def test_after_one_death_all_go_again_together() -> None:
    requests = running("a", "b")

    assert requests.died() == []
    assert requests.due() == ["a", "b"]


def test_after_two_deaths_at_one_point_each_that_ran_goes_alone_and_newcomers_wait() -> None:
    requests = running("a", "b")
    requests.died()
    requests.due()
    requests.start("a", "b")
    requests.died()
    requests.add_new("new")

    assert requests.due() == ["a"]
    assert requests.due() == []
    assert requests.answer("a")
    assert requests.due() == ["b"]
    requests.answer("b")
    assert requests.due() == ["new"]


def test_a_suspect_that_gets_past_the_point_lets_the_others_in() -> None:
    requests = running("a")
    die_together(requests, "a")
    requests.add_new("new")
    assert requests.due() == []

    requests.advance("a", 1)

    assert requests.due() == ["new"]


def test_after_deaths_with_progress_or_an_explanation_all_go_again_together() -> None:
    requests = running("advancing", "stuck")
    for position in range(1, 12):
        requests.advance("advancing", position)
        assert requests.died(is_explained=True) == []
        assert requests.due() == ["advancing", "stuck"]
        requests.start("advancing", "stuck")


def test_who_kills_alone_as_well_fails_and_the_others_go_on_together() -> None:
    requests = running("bad", "good", "better")
    die_together(requests, "bad", "good", "better")

    assert requests.died() == []  # "bad" was alone for the first time
    assert requests.due() == ["bad"]
    assert requests.died() == ["bad"]
    assert requests.due() == ["good", "better"]


def test_of_two_suspects_the_one_that_killed_alone_goes_first() -> None:
    requests = running("good", "bad")
    die_together(requests, "good", "bad")  # "good" runs alone from here on
    requests.advance("good", 1)
    requests.answer("good")
    requests.add_new("new")
    assert requests.due() == ["bad"]
    requests.died()

    assert requests.due() == ["bad"]
    assert requests.died() == ["bad"]
    assert requests.due() == ["new"]


def test_who_only_waited_in_the_queue_is_not_to_blame() -> None:
    requests = running("running")
    requests.add_new("waiting")
    requests.due()
    for _ in range(2):
        requests.died()
        requests.due()
        requests.start("running")

    assert requests.died() == ["running"]
    assert requests.due() == ["waiting"]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 4)
)
def test_all_innocent_are_answered_and_all_guilty_fail_after_few_runs(
    kinds_of_requests: list[tuple[bool, bool]], places: int
) -> None:
    """A worker runs so many at once and dies of a guilty one; not all say that they started."""
    guilty = {f"{n}" for n, (is_guilty, _) in enumerate(kinds_of_requests) if is_guilty}
    tells = {f"{n}" for n, (_, does_tell) in enumerate(kinds_of_requests) if does_tell}
    requests, runs, failed, answered = Requests(), Counter[str](), set[str](), set[str]()
    for n in range(len(kinds_of_requests)):
        requests.add_new(f"{n}")

    queue: list[str] = []
    while len(requests):
        queue += requests.due()
        in_worker, queue = queue[:places], queue[places:]
        runs.update(in_worker)
        for name in tells & set(in_worker):
            requests.start(name)
        if guilty & set(in_worker):
            failed |= set(requests.died())
            queue = []
        else:
            answered |= {name for name in in_worker if requests.answer(name)}

    assert failed == guilty
    assert answered == runs.keys() - guilty
    if len(tells) == len(kinds_of_requests):
        assert max(runs.values()) <= 1 + 4 * len(guilty)
