"""A pool of workers: late binding, deaths, admission, drain; before workers without processes."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from carpool.config import EngineSettings
from carpool.errors import (
    DeadlineExceeded,
    Draining,
    LoadFailed,
    LoraRejected,
    Overloaded,
    Starting,
    TooLate,
    WorkerLost,
)
from carpool.request.card import TEXT
from carpool.telemetry.activity import SeenMove
from carpool.types import CheckedRequest, JournalEntry
from carpool.worker import protocol
from support.fake_hosts import settle
from support.fake_workers import SOLO, FakeWorker, Stage


def of(workers: int, **settings: Any) -> Stage:
    return Stage(["cpu"] * workers, journals=True, settings=EngineSettings(**settings))


async def ready(workers: int = 2, **settings: Any) -> Stage:
    stage = of(workers, **settings)
    await stage.load(*range(workers))
    return stage


async def test_a_pool_is_ready_when_one_worker_is_and_degraded_until_all_are() -> None:
    stage = of(2)
    await settle()
    assert stage.pool.state == "starting"
    with pytest.raises(Starting):
        stage.pool.check_open()
    stage.workers[1].load()
    await settle()
    assert (stage.pool.state, stage.pool.is_degraded) == ("ready", True)
    stage.pool.check_open()
    stage.workers[0].load()
    assert (stage.pool.state, stage.pool.is_degraded) == ("ready", False)


async def test_requests_are_spread_held_and_bound_as_workers_get_room() -> None:
    stage = await ready()
    await stage.submit("a", "b", "c", "d")
    assert sorted(map(len, stage.has())) == [2, 2]
    await stage.submit("e", "f")
    assert sorted(map(len, stage.has())) == [2, 2]  # e and f are held
    assert (await stage.pool.statistics())["held"]["requests"] == 2
    first = stage.has()[0][0]
    stage.workers[0].finish(first)
    await settle()
    assert "e" in stage.has()[0]
    assert stage.tasks[first].result().request_id == first


async def test_what_a_dead_worker_had_runs_on_another_and_says_in_how_many_deaths_it_was() -> None:
    stage = await ready()
    await stage.submit("a", "b")
    [lost] = stage.has()[0]
    stage.workers[0].die()
    await settle()
    assert lost in stage.has()[1]
    assert (lost, 1) in [(name, deaths) for name, _, deaths in stage.workers[1].got]
    stage.workers[1].finish(lost)
    await settle()
    assert stage.tasks[lost].result().request_id == lost


async def test_while_all_workers_are_away_requests_wait_and_new_ones_are_refused() -> None:
    stage = await ready()
    await stage.submit("a")
    for worker in stage.workers:
        worker.die()
    await settle()
    assert stage.pool.state == "worker_lost"
    await stage.submit("b")
    with pytest.raises(WorkerLost):
        stage.tasks["b"].result()
    stage.workers[1].load()
    await settle()
    assert stage.has() == [[], ["a"]]


async def test_a_request_that_is_held_can_be_cancelled_and_is_never_run() -> None:
    stage = await ready(1 + 1)
    await stage.submit("a", "b", "c", "d")
    await stage.submit("e")
    stage.tasks["e"].cancel()
    await settle()
    for name in "abcd":
        for worker in stage.workers:
            if name in worker.running:
                worker.finish(name)
    await settle()
    assert not any(name == "e" for worker in stage.workers for name, _, _ in worker.got)
    assert (await stage.pool.statistics())["held"]["requests"] == 0


async def test_the_timeout_of_a_request_counts_while_it_is_held() -> None:
    stage = await ready()
    await stage.submit("a", "b", "c", "d")
    await stage.submit("late", timeout_s=0.01)
    with pytest.raises(DeadlineExceeded, match="ran out after 0 steps"):
        await stage.tasks["late"]


async def test_a_worker_is_told_how_much_is_held_for_it() -> None:
    stage = await ready()
    await stage.submit("a", "b", "c", "d")
    await stage.submit("e", "f")
    stage.workers[0].report(SOLO)
    assert stage.workers[0].held_s == pytest.approx(10.0)  # two of ten seconds, for two workers


async def test_too_many_and_too_long_and_too_late_are_refused_at_the_front() -> None:
    stage = await ready(max_running=2, max_queue=1, max_wait=1000.0)
    await stage.submit("a", "b", "c", "d", "e")
    with pytest.raises(Overloaded, match="the queue is full: 5 requests"):
        stage.pool.check_room()
    stage = await ready(max_wait=18.0)
    await stage.submit("a", "b", "c", "d")
    await stage.submit("e", steps=30)
    await stage.submit("low", priority=-1)
    assert stage.tasks["low"].done()
    with pytest.raises(Overloaded, match="overloaded"):
        stage.tasks["low"].result()
    with pytest.raises(TooLate, match="cannot be met"):
        await stage.pool.submit(
            CheckedRequest("late", 1, {"num_inference_steps": 50}, deadline_s=3.0, priority=5)
        )


async def test_texts_are_predicted_at_the_front_by_what_their_writers_wrote() -> None:
    stage = await ready()
    chat: Any = {"task": TEXT}
    rewriting: Any = {"enhance_prompt": True}
    await stage.submit("first", deadline_s=0.01, **chat)  # nothing is known of texts yet
    assert stage.all() == ["first"]
    texts = {TEXT: (20.0, [0.5, 0.6]), "text-to-image enhance_prompt": (30.0, [0.1])}
    stage.workers[0].report(SOLO, texts)

    async def is_late(name: str, deadline_s: float, **options: Any) -> bool:
        await stage.submit(name, deadline_s=deadline_s, **options)
        (task := stage.tasks[name]).cancel()
        await settle()
        return not task.cancelled() and isinstance(task.exception(), TooLate)

    assert await is_late("long", 9.0, **chat)
    assert not await is_late("in time", 11.0, **chat)
    assert not await is_late("short", 9.0, tokens=16, **chat)
    assert not await is_late("drawn", 11.0)
    assert await is_late("rewritten", 11.0, **rewriting)
    assert not await is_late("rewritten in time", 14.0, **rewriting)


async def test_what_an_earlier_server_began_is_not_refused_for_its_deadline() -> None:
    stage = await ready()
    for name in ("begun", "new"):
        stage.journals.open(name)
    stage.journals.add("begun", JournalEntry(1, b"mark", b""))

    await stage.submit("begun", "new", steps=50, deadline_s=3.0)

    assert stage.all() == ["begun"]
    with pytest.raises(TooLate, match="cannot be met"):
        await stage.tasks["new"]
    stage.tasks["begun"].cancel()


async def test_a_worker_that_cannot_load_ends_the_start_unless_another_is_ready() -> None:
    stage = of(2)
    await settle()
    stage.workers[0].fail("cuda:7 is no device")
    with pytest.raises(LoadFailed, match="cuda:7"):
        await stage.running
    stage = of(2)
    await settle()
    stage.workers[1].load()
    await settle()
    stage.workers[0].fail("cuda:7 is no device")
    await settle()
    assert not stage.running.done()
    assert stage.pool.is_degraded
    assert stage.pool.workers()[0]["error"] == "cuda:7 is no device"
    await stage.pool.stop()


async def test_a_drain_runs_what_is_held_and_takes_nothing_new() -> None:
    stage = await ready()
    await stage.submit("a", "b", "c", "d", "e")
    draining = asyncio.create_task(stage.pool.drain(5.0))
    await settle()
    assert stage.pool.state == "draining"
    with pytest.raises(Draining):
        stage.pool.check_open()
    while running := [(w, name) for w in stage.workers for name in w.running]:
        worker, name = running[0]
        worker.finish(name)
        await settle()
    await draining
    assert all(isinstance(task.result(), protocol.Done) for task in stage.tasks.values())


async def test_a_drain_fails_what_is_left_at_its_timeout() -> None:
    stage = await ready()
    await stage.submit("a", "b", "c", "d", "e")
    await stage.pool.drain(0.0)
    await settle()
    assert all(isinstance(task.exception(), Draining) for task in stage.tasks.values())


async def test_adapters_are_registered_on_all_workers_and_on_new_ones_before_they_load() -> None:
    stage = await ready()
    await stage.pool.add_lora("watercolour", "w.safetensors")
    assert [worker.lora for worker in stage.workers] == [{"watercolour": "w.safetensors"}] * 2
    stage.pool.add_worker()
    assert stage.workers[2].listener.adapters == {"watercolour": "w.safetensors"}
    with pytest.raises(LoraRejected, match="it is no LoRA"):
        await stage.pool.add_lora("other", "broken")
    assert stage.workers[2].listener.adapters == {"watercolour": "w.safetensors"}
    stage.pool.reload()
    assert all("reloaded" in worker.lora for worker in stage.workers)


async def test_timelines_are_found_wherever_a_request_ran() -> None:
    stage = await ready()
    await stage.submit("a", "b")
    found = await stage.pool.timelines(["b", "nobody", "a"])
    assert [one["id"] for one in found] == ["b", "a"]


async def test_a_pool_of_one_worker_leaves_the_queue_to_it_and_has_what_it_lost_run_again() -> None:
    stage = await ready(1, max_wait=1.0)
    stage.journals.steps_again = 3  # by requests that have ended
    assert (await stage.pool.statistics())["steps_again"] == 3
    stage.journals.open("h", [JournalEntry(1, b"mark", b"")])
    await stage.submit(*"abcdefgh", steps=50, deadline_s=3.0)
    [worker] = stage.workers
    names = [*"abcdefgh"]
    assert stage.has() == [names]
    assert worker.admitted == dict.fromkeys(names, False) | {"h": True}
    assert await stage.pool.statistics() == {
        "waiting": 0, "running": 8, "requests": 8, "steps_again": 3,
    }  # fmt: skip
    worker.die()
    await settle()
    assert stage.has() == [[]]
    with pytest.raises(WorkerLost):
        stage.pool.check_open()
    worker.load()
    await settle()
    assert stage.has() == [names]
    assert worker.admitted == dict.fromkeys(names, True)  # by the one that died
    for name in names:
        worker.finish(name)
    await settle()
    assert {task.result().request_id for task in stage.tasks.values()} == set(names)


def test_requests_are_compared_for_moves_only_where_some_are_held_never_those_of_a_single_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = list[float]()
    monkeypatch.setattr("carpool.fleet.moves.Moves.pause", lambda _, now_s: looks.append(now_s))

    async def story(workers: int, names: str) -> int:
        stage = await ready(workers)
        await stage.submit(*names)
        looks.clear()
        stage.workers[0].report(SOLO)
        return len(looks)

    assert [asyncio.run(story(*case)) for case in ((1, "abcdef"), (2, "abcd"), (2, "abcdef"))] == [
        0, 0, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_pool_that_is_full_is_so_until_a_request_ends(workers: int) -> None:
    stage = await ready(workers, max_running=1, max_queue=1)
    names = "abc"[: workers + 1]
    for name in names:
        stage.pool.check_room()
        await stage.submit(name)

    full = f"{workers + 1} requests wait or run, the limit is {workers} \\+ 1"
    with pytest.raises(Overloaded, match=full) as refusal:
        stage.pool.check_room()

    assert refusal.value.retry_after_s
    stage.tasks["a"].cancel()
    await settle()
    stage.pool.check_room()


async def test_a_full_pool_says_when_the_first_of_its_workers_has_a_place() -> None:
    stage = await ready(2, max_running=1, max_queue=0)
    await stage.submit("a", "b")
    for again_s, places_s in ((1.0, [None, None]), (7.0, [None, 7.0]), (3.0, [3.0, 7.0])):
        for worker, place_s in zip(stage.workers, places_s, strict=True):
            worker.listener.reported(protocol.Report({}, {}, place_s=place_s))
        with pytest.raises(Overloaded) as refusal:
            stage.pool.check_room()
        assert refusal.value.retry_after_s == again_s


async def test_a_viewer_is_told_which_worker_did_something() -> None:
    stage, seen = await ready(), list[tuple[int, float]]()
    stage.pool.watch_activity(
        lambda activity: seen.append((activity.worker, activity.requests.now_s))
    )
    stage.workers[1].act(3.0)
    stage.workers[0].act(4.0)
    stage.pool.watch_activity(None)
    stage.workers[0].act(5.0)
    assert seen == [(1, 3.0), (0, 4.0)]


async def test_an_estimate_is_of_the_worker_that_would_begin_first() -> None:
    stage = await ready()
    stage.workers[0].wait_s, stage.workers[1].wait_s = 7.0, 2.0
    told_ = await stage.pool.estimate(CheckedRequest("a", 1, {"prompt": "a cat"}))
    assert told_.wait_s == 2.0


async def test_what_a_worker_has_that_is_to_end_moves_to_others_and_says_so() -> None:
    stage, seen = await ready(), list[SeenMove]()
    stage.pool.watch_activity(lambda activity: seen.extend(activity.moves))
    await stage.submit("a", "b", steps=100)
    [moving] = stage.has()[0]
    stage.workers[0].report(SOLO, **{moving: 60.0})
    ending = asyncio.create_task(stage.pool.remove_worker(stage.pool.members()[0]))
    await settle()
    assert stage.has()[1] == ["a", "b"]
    assert stage.workers[1].got[-1][2] == 0  # no death is counted
    for at_s in (1.0, 2.0):
        stage.workers[1].act(at_s)
    told_ = [(one.request_id, one.from_worker, one.to_worker, one.why) for one in seen]
    assert told_ == [(moving, 0, 1, "drain")]  # once
    async with asyncio.timeout(5):
        await ending
    assert stage.workers[0].retired
    [told] = await stage.pool.timelines([moving])
    [move] = told["moves"]
    assert (move["from"], move["to"], move["why"]) == (0, 1, "drain")
    assert (await stage.pool.statistics())["moves"] == {"drain": 1}
    stage.workers[1].finish(moving)
    await settle()
    assert stage.tasks[moving].result().request_id == moving


async def test_what_cannot_move_ends_where_it_is_and_the_worker_after_it() -> None:
    stage = await ready()
    await stage.submit("a", "b", steps=100)
    [staying] = stage.has()[0]
    stage.workers[0].keeps.add(staying)
    ending = asyncio.create_task(stage.pool.remove_worker(stage.pool.members()[0]))
    await settle()
    assert stage.has()[0] == [staying]
    assert not stage.workers[0].retired
    stage.workers[0].finish(staying)
    async with asyncio.timeout(5):
        await ending


async def test_a_request_moves_only_to_workers_that_loaded_the_same_model_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = of(3)
    await settle()
    for worker, digest in zip(stage.workers, ("old", "new", "old"), strict=True):
        worker.load(digest)
        worker.report(SOLO)
    await stage.submit("a", "b", "c", steps=100)
    [moving], [other], [third] = stage.has()
    assert [one["model_digest"] for one in stage.pool.workers()] == ["old", "new", "old"]
    assert [text for text in caplog.messages if "different models (1, 3 | 2)" in text]

    first, _, last = stage.pool.members()
    async with asyncio.timeout(5):
        await stage.pool.remove_worker(first)
    assert stage.has()[1:] == [[other], sorted([moving, third])]

    ending = asyncio.create_task(stage.pool.remove_worker(last))
    await settle()
    assert stage.has()[1:] == [[other], sorted([moving, third])]  # they would start over
    for name in (moving, third):
        stage.workers[2].finish(name)
    async with asyncio.timeout(5):
        await ending
    assert stage.tasks[moving].result().request_id == moving


async def test_an_urgent_request_pauses_one_of_lower_priority_which_goes_on_later() -> None:
    stage = await ready(1 + 1)
    names = [f"low{n}" for n in range(6)]
    for name in names:
        await stage.submit(name, steps=100, priority=-5)
    assert sum(map(len, stage.has())) == 4  # of six
    await stage.submit("urgent", steps=100, priority=5)
    assert "urgent" not in stage.all()
    stage.workers[0].report(SOLO)
    await settle()
    running = stage.all()
    assert "urgent" in running
    assert len(running) == 4
    [paused] = [name for one in stage.workers for name in one.asked_to_release]
    assert paused not in running
    for worker in stage.workers:
        for name in list(worker.running):
            worker.finish(name)
    await settle()
    assert paused in stage.all()  # it goes on


@pytest.mark.parametrize("seed", range(8))
async def test_whoever_leaves_while_requests_move_pause_or_lose_their_worker_nothing_is_left(
    seed: int,
) -> None:
    """All that can happen to a pool, at random moments, between any two turns of the loop."""

    rng, stage, numbers = random.Random(seed), await ready(3), itertools.count()
    pool, leaving = stage.pool, list[asyncio.Task[None]]()

    def living() -> list[FakeWorker]:
        return [one for one in stage.workers if not one.stopped]

    async def come() -> None:
        options: dict[str, Any] = {"priority": rng.choice((-5, 0, 5))}
        if rng.random() < 0.3:
            options["timeout_s"] = rng.choice((0.0, 60.0))
        await stage.submit(f"r{next(numbers)}", steps=rng.choice((5, 100)), **options)

    async def cancel() -> None:
        rng.choice(list(stage.tasks.values())).cancel()

    async def report() -> None:
        worker = rng.choice(living())
        worker.report(SOLO, **{name: rng.uniform(1, 100) for name in worker.running})

    async def die() -> None:
        worker = rng.choice(living())
        if worker.state == "ready":
            worker.die()
            await asyncio.sleep(0)
        worker.load()

    async def finish() -> None:
        worker = rng.choice(living())
        open_ = [name for name, answer in worker.running.items() if not answer.done()]
        if open_:
            worker.finish(rng.choice(open_))

    async def drain() -> None:
        if len(pool.members()) > 1:
            member = rng.choice(pool.members())
            leaving.append(asyncio.create_task(pool.remove_worker(member)))
            pool.add_worker()
            await asyncio.sleep(0)
            stage.workers[-1].load()

    actions = (come, come, come, cancel, cancel, report, report, die, finish, finish, drain)
    await come()
    for _ in range(150):
        await rng.choice(actions)()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    while any(not task.done() for task in stage.tasks.values()):
        for worker in living():
            for name, answer in list(worker.running.items()):
                if not answer.done():
                    worker.finish(name)
        await settle()
    async with asyncio.timeout(5):
        await asyncio.gather(*leaving)
    for name, task in stage.tasks.items():  # each has its own answer, or was cancelled
        if not task.cancelled() and task.exception() is None:
            assert task.result().request_id == name
    errors = {type(t.exception()) for t in stage.tasks.values() if not t.cancelled()}
    assert errors <= {type(None), DeadlineExceeded, Overloaded}
    queue, router = pool._queue, pool._queue.router
    assert (len(queue), queue.held, len(router.waiting)) == (0, 0, 0)
    assert [one for one in router.workers.values() if one.bound] == []
    assert (queue.requests, pool._dispatcher.moves._pauses) == ({}, {})
    assert not any(name in stage.journals for name in stage.tasks)
    assert len(router.workers) == len(pool.members()) == len(living())
    await pool.stop()
