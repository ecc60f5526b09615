"""Several models behind one address: by name, on demand, in each other's place."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from carpool.config import EngineSettings
from carpool.errors import DeadlineExceeded, Draining, LoadFailed, ModelNotFound, Starting, TooLate
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.pool import Pool
from carpool.types import CheckedRequest
from support.fake_hosts import settle
from support.fake_workers import FakeWorker


class Models:
    """A fleet of fake models, each with one worker at a time."""

    def __init__(self, **on_demand: bool) -> None:
        self.workers: dict[str, list[FakeWorker]] = {name: [] for name in on_demand}
        self._deployments = [
            Deployment(name, self._maker(name), is_on_demand)
            for name, is_on_demand in on_demand.items()
        ]

    def fleet(self, max_loaded: int | None = None) -> Fleet:
        return Fleet(self._deployments, max_loaded)

    @asynccontextmanager
    async def serving(self, max_loaded: int | None = None) -> AsyncIterator[Fleet]:
        fleet = self.fleet(max_loaded)
        fleet.start()
        await settle()
        yield fleet
        await fleet.stop()

    def _maker(self, name: str) -> Callable[[], Pool]:
        def make(device: str, listener: Any) -> FakeWorker:
            self.workers[name].append(FakeWorker(device, listener))
            return self.workers[name][-1]

        return lambda: Pool(make, ["cpu"], EngineSettings())

    def newest(self, name: str) -> FakeWorker:
        return self.workers[name][-1]


def request(name: str, model: str, **others: Any) -> CheckedRequest:
    return CheckedRequest(name, 1, {"prompt": "a cat"}, model=model, **others)


async def test_requests_go_to_the_model_that_they_name_and_to_the_first_without_a_name() -> None:
    models = Models(one=False, two=False)
    async with models.serving() as fleet:
        for name in ("one", "two"):
            models.newest(name).load()
        await settle()
        tasks = [
            asyncio.create_task(fleet.submit(request(f"to-{m}", m))) for m in ("two", "", "one")
        ]
        await settle()
        assert sorted(models.newest("two").running) == ["to-two"]
        assert sorted(models.newest("one").running) == ["to-", "to-one"]
        with pytest.raises(ModelNotFound, match="'one', 'two'"):
            await fleet.submit(request("x", "tow"))
    assert all(isinstance(task.exception(), Draining) for task in tasks)


async def test_a_model_on_demand_is_loaded_once_for_all_who_ask_and_they_wait_for_it() -> None:
    models = Models(one=True)
    async with models.serving() as fleet:
        assert (fleet.state, fleet.of("one").state) == ("ready", "unloaded")
        assert not models.workers["one"]
        tasks = [asyncio.create_task(fleet.submit(request(name, "one"))) for name in "ab"]
        await settle()
        assert fleet.of("one").state == "starting"
        assert (fleet.of("one").ready_in_s(asyncio.get_running_loop().time()) or 0) > 0
        models.newest("one").load()
        await settle()
        assert len(models.workers["one"]) == 1
        assert sorted(models.newest("one").running) == ["a", "b"]
        assert fleet.of("one").ready_in_s(0.0) is None
    assert all(task.exception() for task in tasks)


async def test_the_model_that_was_used_least_recently_makes_room_but_none_that_works() -> None:
    models = Models(one=True, two=True, three=True)
    async with models.serving(max_loaded=2) as fleet:

        async def ask(name: str) -> asyncio.Task[Any]:
            task = asyncio.create_task(fleet.submit(request(f"to-{name}", name)))
            await settle()
            if models.workers[name] and models.newest(name).state == "starting":
                models.newest(name).load()
            await settle()
            return task

        async def end(name: str) -> None:
            models.newest(name).finish(f"to-{name}")
            await settle()

        await ask("one")
        await end("one")
        await ask("two")
        await end("two")
        await ask("one")
        await end("one")  # so that two is the one used least recently
        await ask("three")
        assert [fleet.of(n).state for n in ("one", "two", "three")] == [
            "ready", "unloaded", "ready",
        ]  # fmt: skip
        await ask("one")  # both work now
        waiting = await ask("two")
        assert fleet.of("two").state == "unloaded"
        await end("three")
        await settle()
        models.newest("two").load()
        await settle()
        assert fleet.of("three").state == "unloaded"
        assert "to-two" in models.newest("two").running
    assert isinstance(waiting.exception(), Draining)


async def test_where_loading_fails_an_idle_model_is_unloaded_and_it_is_tried_again() -> None:
    models = Models(one=True, two=True)
    async with models.serving() as fleet:
        first = asyncio.create_task(fleet.submit(request("a", "one")))
        await settle()
        models.newest("one").load()
        await settle()
        models.newest("one").finish("a")
        await first
        second = asyncio.create_task(fleet.submit(request("b", "two")))
        await settle()
        models.newest("two").fail("out of memory", wants_memory=True)
        await settle()
        assert fleet.of("one").state == "unloaded"
        assert len(models.workers["two"]) == 2
        models.newest("two").fail("out of memory", wants_memory=True)
        await settle()
        with pytest.raises(LoadFailed, match="out of memory"):
            second.result()
        assert fleet.of("two").state == "unloaded"


async def test_a_model_goes_when_it_was_not_used_for_its_keep_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.fleet.loader.INTERVAL_S", 0.0)

    models = Models(one=True)
    fleet = models.fleet()
    fleet.of("one").keep_alive_s = 0.0
    fleet.start()
    task = asyncio.create_task(fleet.submit(request("a", "one")))
    await settle()
    models.newest("one").load()
    await settle()
    assert fleet.of("one").state == "ready"  # it works
    models.newest("one").finish("a")
    await task
    await settle()
    assert (fleet.of("one").state, models.newest("one").stopped) == ("unloaded", True)
    assert fleet.of("one").ready is not None  # its card is still known
    await fleet.stop()


async def test_a_model_that_cannot_load_at_the_start_ends_the_server() -> None:
    models = Models(one=False, two=False)
    fleet = models.fleet()
    running = fleet.start()
    await settle()
    models.newest("two").fail("it is broken")
    with pytest.raises(LoadFailed, match="it is broken"):
        await running
    await fleet.stop()


async def test_a_model_that_cannot_load_beside_a_ready_one_is_tried_again_and_says_why() -> None:
    models = Models(one=False, two=False)
    fleet = models.fleet()
    running = fleet.start()
    await settle()
    models.newest("two").load()
    await settle()
    assert (await fleet.wait_ready()).card  # although the first is not
    models.newest("one").fail("4 workers died while they loaded the model")
    await settle()
    assert not running.done()
    assert (fleet.state, fleet.is_degraded) == ("ready", True)
    [shown] = fleet.deployments["one"].pool.workers()  # type: ignore[union-attr]
    assert shown["error"] == "4 workers died while they loaded the model"
    with pytest.raises(Starting, match=r"cannot be loaded now: 4 workers died .* again") as told_:
        await fleet.submit(request("a", "one"))
    assert told_.value.retry_after_s == 30
    other = asyncio.create_task(fleet.submit(request("b", "two")))
    await settle()
    models.newest("two").finish("b")
    assert (await other).request_id == "b"
    models.newest("one").load()
    await settle()
    assert not fleet.is_degraded
    assert "error" not in fleet.deployments["one"].pool.workers()[0]  # type: ignore[union-attr]
    running.cancel()
    await fleet.stop()


async def test_activity_says_of_which_model_it_is_of_models_that_are_loaded_later_too() -> None:
    models, seen = Models(one=False, two=True), list[tuple[str, int]]()
    fleet = models.fleet()
    fleet.start()
    await settle()
    models.newest("one").load()
    fleet.watch_activity(lambda activity: seen.append((activity.model, activity.worker)))
    asking = asyncio.create_task(fleet.loaded("two"))
    await settle()
    models.newest("two").load()
    await asking
    for name in ("two", "one"):
        models.newest(name).act(1.0)
    assert seen == [("two", 0), ("one", 0)]
    await fleet.stop()


async def test_who_waits_for_one_model_is_not_let_in_by_another_and_has_it_loaded() -> None:
    models = Models(first=False, second=False, third=True)
    fleet = models.fleet()
    running = fleet.start()
    await settle()
    models.newest("first").load()
    models.newest("second").load()
    await settle()
    models.newest("second").die()
    await settle()
    waits = {name: asyncio.create_task(fleet.wait_open(name)) for name in models.workers}
    await settle()
    assert [name for name, one in waits.items() if one.done()] == ["first"]
    models.newest("second").load()
    models.newest("third").load()
    await settle()
    assert all(one.done() for one in waits.values())
    running.cancel()
    await fleet.stop()


async def asked(fleet: Fleet, name: str, model: str, **others: Any) -> "asyncio.Task[Any]":
    task = asyncio.create_task(fleet.submit(request(name, model, **others)))
    await settle()
    return task


async def running(models: Models, fleet: Fleet, name: str, model: str) -> asyncio.Task[Any]:
    """A request whose model is loaded for it."""
    task = await asked(fleet, name, model)
    models.newest(model).load()
    await settle()
    return task


async def test_a_load_whose_client_leaves_serves_the_next_one_who_asks() -> None:
    models = Models(one=True)
    async with models.serving() as fleet:
        first = await asked(fleet, "a", "one")
        first.cancel()
        await settle()
        second = await running(models, fleet, "b", "one")
        assert len(models.workers["one"]) == 1
        models.newest("one").finish("b")
        assert (await second).request_id == "b"


async def test_what_nobody_waits_for_any_more_takes_no_place() -> None:
    models = Models(one=True, two=True)
    async with models.serving(max_loaded=1) as fleet:
        first = await running(models, fleet, "a", "one")
        second = await asked(fleet, "b", "two")
        second.cancel()
        await settle()
        models.newest("one").finish("a")
        await first
        await settle()
        assert (fleet.of("one").state, models.workers["two"]) == ("ready", [])


async def test_a_model_that_is_broken_costs_no_other_one_its_place() -> None:
    models = Models(one=True, two=True)
    async with models.serving() as fleet:
        first = await running(models, fleet, "a", "one")
        models.newest("one").finish("a")
        await first
        second = await asked(fleet, "b", "two")
        models.newest("two").fail("there is no such folder")
        with pytest.raises(LoadFailed, match="no such folder"):
            await second
        assert (fleet.of("one").state, len(models.workers["two"])) == ("ready", 1)


async def test_what_does_not_fit_beside_a_model_that_works_waits_until_that_has_ended() -> None:
    models = Models(one=True, two=True)
    async with models.serving() as fleet:
        first = await running(models, fleet, "a", "one")
        second = await asked(fleet, "b", "two")
        models.newest("two").fail("out of memory", wants_memory=True)
        await settle()
        assert (fleet.of("one").state, second.done()) == ("ready", False)
        models.newest("one").finish("a")
        await first
        await settle()
        assert (fleet.of("one").state, len(models.workers["two"])) == ("unloaded", 2)
        models.newest("two").load()
        await settle()
        models.newest("two").finish("b")
        assert (await second).request_id == "b"


async def test_a_model_that_always_has_requests_makes_room_in_the_end_and_they_go_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.fleet.loader.PATIENCE_S", 0.0)

    models = Models(one=True, two=True)
    async with models.serving(max_loaded=1) as fleet:
        tasks = [await asked(fleet, "a1", "one")]
        models.newest("one").load()
        await settle()
        tasks += [await asked(fleet, "b", "two"), await asked(fleet, "a2", "one")]
        assert list(models.newest("one").running) == ["a1"]  # the second one waits
        models.newest("one").finish("a1")
        await settle()
        models.newest("two").load()
        await settle()
        assert (fleet.of("one").state, list(models.newest("two").running)) == ("unloaded", ["b"])
        models.newest("two").finish("b")
        await settle()
        models.newest("one").load()
        await settle()
        models.newest("one").finish("a2")
        assert [(await one).request_id for one in tasks] == ["a1", "b", "a2"]
        assert [len(workers) for workers in models.workers.values()] == [2, 1]


async def test_two_models_that_are_asked_for_at_once_are_both_served_in_the_place_of_one() -> None:
    models = Models(one=True, two=True, three=True)
    async with models.serving(max_loaded=1) as fleet:
        tasks = {name: await asked(fleet, name, name) for name in models.workers}
        for name, task in tasks.items():
            models.newest(name).load()
            await settle()
            models.newest(name).finish(name)
            await task
            await settle()
        assert all(len(workers) == 1 for workers in models.workers.values())


async def test_loading_counts_towards_the_times_of_a_request() -> None:
    models = Models(one=True)
    async with models.serving() as fleet:
        hasty = await asked(fleet, "a", "one", timeout_s=0.01)
        late = await asked(fleet, "b", "one", deadline_s=0.01)
        patient = await asked(fleet, "c", "one", timeout_s=60.0)
        with pytest.raises(DeadlineExceeded, match=r"timeout_s=0.01 .* 'one' is not loaded yet"):
            await hasty
        with pytest.raises(TooLate, match=r"deadline_s=0.01 cannot be met: 'one' is not loaded"):
            await late
        models.newest("one").load()
        await settle()
        [(name, waited_s, _)] = models.newest("one").got
        assert (name, waited_s > 0) == ("c", True)
        models.newest("one").finish("c")
        await patient


async def test_a_deadline_that_loading_would_exceed_loads_nothing() -> None:
    models = Models(one=True)
    async with models.serving() as fleet:
        one = fleet.of("one")
        first = await running(models, fleet, "a", "one")
        models.newest("one").finish("a")
        await first
        assert one.pool is not None
        one.last_ready, one.pool, one.took_s = one.pool.ready, None, 60.0  # as if it was unloaded
        with pytest.raises(TooLate, match="loading takes some 60 s"):
            await fleet.submit(request("b", "one", deadline_s=5.0))
        assert len(models.workers["one"]) == 1


async def test_a_server_that_drains_loads_nothing_for_what_still_waits_for_a_place() -> None:
    models = Models(one=True, two=True)
    async with models.serving(max_loaded=1) as fleet:
        first = await running(models, fleet, "a", "one")
        second = await asked(fleet, "b", "two")
        await fleet.drain(0.01)
        with pytest.raises(Draining):
            await second
        assert not models.workers["two"]
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("seed", [*range(7), 16])
async def test_whoever_asks_leaves_or_fails_to_load_everybody_else_is_served(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can happen to models on demand, at random moments."""
    rng = random.Random(seed)
    monkeypatch.setattr("carpool.fleet.loader.PATIENCE_S", rng.choice((0.0, 10.0)))
    monkeypatch.setattr("carpool.fleet.loader.INTERVAL_S", 0.0)

    models = Models(one=True, two=True, three=True)
    fleet, tasks = models.fleet(rng.choice((1, 2, None))), dict[str, asyncio.Task[Any]]()
    fleet.of("two").keep_alive_s = 0.0
    fleet.start()

    def living() -> list[FakeWorker]:
        every = [one for each in models.workers.values() for one in each]
        return [one for one in every if not one.stopped and not one.has_failed]

    def go_on() -> None:
        for worker in living():
            if worker.state == "starting":
                worker.load()
            for name, answer in worker.running.items():
                if not answer.done():
                    worker.finish(name)

    for number in range(120):
        name, model = f"r{number}", rng.choice(list(models.workers))
        tasks[name] = asyncio.create_task(fleet.submit(request(name, model)))
        if rng.random() < 0.5:
            rng.choice(list(tasks.values())).cancel()
        for worker in living():
            if worker.state == "starting" and rng.random() < 0.2:
                worker.fail("it does not load", wants_memory=rng.random() < 0.5)
            elif worker.state == "starting" and rng.random() < 0.5:
                worker.load()
            elif open_ := [n for n, answer in worker.running.items() if not answer.done()]:
                worker.finish(rng.choice(open_))
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
    while any(not task.done() for task in tasks.values()):
        go_on()
        await settle()
    for name, task in tasks.items():
        if not task.cancelled() and task.exception() is None:
            assert task.result().request_id == name
    errors = {type(task.exception()) for task in tasks.values() if not task.cancelled()}
    assert errors <= {type(None), LoadFailed}
    for name in models.workers:
        one = fleet.of(name)
        assert (one.in_flight, one.waiting, one.makes_room) == (0, 0, False)
    assert len(living()) <= sum(one.pool is not None for one in fleet.deployments.values())
    await fleet.stop()
