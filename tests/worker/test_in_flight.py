"""Which requests go to the next worker: the guilty one is found, the others are answered."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.types import CheckedRequest
from carpool.worker.in_flight import MAX_RERUNS, InFlight, InFlightRequest
from carpool.worker.protocol import Submit


def request(name: str) -> InFlightRequest:
    return InFlightRequest(Submit(CheckedRequest(request_id=name, seed=0, arguments={})))


class Requests(InFlight[InFlightRequest]):
    """Requests in flight, called by their names."""

    def add_new(self, *names: str) -> None:
        for name in names:
            self.add(request(name))

    def due(self) -> list[str]:
        return [one.id for one in self.take_due()]

    def start(self, *names: str) -> None:
        for name in names:
            if found := self.get(name):
                found.has_started = True

    def died(self) -> list[str]:
        return [one.id for one in self.worker_died()]

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


def test_each_request_is_sent_once_in_the_order_of_arrival() -> None:
    requests = running("a", "b")

    assert requests.due() == []
    requests.add_new("c")
    assert requests.due() == ["c"]


def test_after_one_death_all_go_again_together() -> None:
    requests = running("a", "b")

    assert requests.died() == []
    assert requests.due() == ["a", "b"]


def test_after_two_deaths_each_that_ran_goes_alone_and_newcomers_wait() -> None:
    requests = running("a", "b")
    requests.died()
    requests.due()
    requests.start("a")
    requests.start("b")
    requests.died()
    requests.add_new("new")

    assert requests.due() == ["a"]
    assert requests.due() == []
    assert requests.answer("a")
    assert requests.due() == ["b"]
    requests.answer("b")
    assert requests.due() == ["new"]


def test_who_kills_alone_as_well_fails_and_the_others_go_on() -> None:
    requests = running("bad", "good")
    for _ in range(2):
        requests.died()
        requests.due()
        requests.start("bad")
        requests.start("good")

    assert requests.died() == ["bad"]
    assert requests.due() == ["good"]


def test_who_only_waited_in_line_is_not_to_blame() -> None:
    requests = running("running")
    requests.add_new("waiting")
    requests.due()
    for _ in range(2):
        requests.died()
        requests.due()
        requests.start("running")

    assert requests.died() == ["running"]
    assert requests.due() == ["waiting"]


def test_a_worker_that_dies_before_it_says_who_started_is_blamed_on_all_it_had() -> None:
    requests = Requests()
    requests.add_new("a")
    for _ in range(MAX_RERUNS):
        requests.due()
        assert requests.died() == []
    requests.due()

    assert requests.died() == ["a"]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.integers(1, 4)
)
def test_all_innocent_are_answered_and_all_guilty_fail_after_three_runs(
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
        assert max(runs.values()) <= 1 + MAX_RERUNS
