"""Workers that come, go and are replaced while requests run; none of which fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from carpool.config import EngineSettings
from carpool.fleet import resizing
from carpool.fleet.autoscaler import Autoscaler, Scale
from carpool.fleet.pool import Pool
from support.fake_hosts import settle
from support.fake_workers import Stage


def of(workers: int = 2, **options: Any) -> Stage:
    """A pool of four devices, whose requests have no journals."""
    options = {"is_fixed": False, "workers": workers, **options}
    return Stage(["a", "b", "c", "d"], journals=False, **options)


def devices(stage: Stage) -> list[str]:
    return [one["device"] for one in stage.pool.workers()]


@asynccontextmanager
async def of_two() -> AsyncIterator[Stage]:
    """A pool of two workers that have loaded."""
    stage = of()
    await stage.load(0, 1)
    yield stage
    await stage.pool.stop()


async def test_a_worker_that_comes_goes_to_the_device_with_the_fewest_and_gets_what_waits() -> None:
    async with of_two() as stage:
        await stage.submit(*map(str, range(20)))
        new = stage.pool.add_worker()
        assert (new.number, new.device) == (2, "c")
        await stage.load(2)
        assert stage.workers[2].running
        assert devices(stage) == ["a", "b", "c"]
        await stage.finish()


async def test_a_worker_that_goes_ends_what_it_has_first_and_gets_nothing_more() -> None:
    async with of_two() as stage:
        await stage.submit("1", "2", "3")
        had = set(stage.workers[0].running)
        leaving = stage.pool.members()[0]
        removal = asyncio.create_task(stage.pool.remove_worker(leaving))
        await stage.submit("4", "5")
        assert set(stage.workers[0].running) == had
        assert not removal.done()
        await stage.finish()
        await removal
        assert stage.workers[0].retired
        assert devices(stage) == ["b"]
        assert [task.exception() for task in stage.tasks.values()] == [None] * 5
        await stage.submit("6")
        assert "6" in stage.workers[1].running
        await stage.finish()


async def test_a_worker_that_still_ends_what_it_has_keeps_its_device_from_the_next_one() -> None:
    """Both would be loaded there at the same time."""
    async with of_two() as stage:
        await stage.submit("0")
        [busy] = [one for one in stage.pool.members() if stage.workers[one.number].running]
        leaving = asyncio.create_task(stage.pool.remove_worker(busy))
        await settle()
        added = [stage.pool.add_worker().device for _ in range(2)]
        assert (busy.device in added, added) == (False, ["c", "d"])
        await stage.finish()
        await leaving
        assert stage.pool.add_worker().device == busy.device


async def test_a_worker_that_dies_while_it_goes_leaves_its_requests_to_others() -> None:
    async with of_two() as stage:
        await stage.submit("1", "2")
        removal = asyncio.create_task(stage.pool.remove_worker(stage.pool.members()[0]))
        await settle()
        stage.workers[0].die()
        await settle()
        await removal
        assert devices(stage) == ["b"]
        await stage.finish()
        assert [task.exception() for task in stage.tasks.values()] == [None] * 2


async def test_a_rolling_update_starts_each_new_worker_before_it_ends_an_old_one() -> None:
    async with of_two() as stage:
        await stage.submit("1", "2", "3", "4")
        stage.pool.roll()
        await settle()
        assert len(stage.workers) == 3
        assert not any(one.retired for one in stage.workers)
        stage.pool.roll()  # is refused: one is under way
        await stage.load(2)
        assert not stage.workers[0].retired  # it has requests
        await stage.finish()
        await settle()
        assert [one.retired for one in stage.workers] == [True, False, False, False]
        await stage.load(3)
        await settle()
        assert [one.retired for one in stage.workers] == [True, True, False, False]
        assert devices(stage) == ["a", "b"]
        assert [task.exception() for task in stage.tasks.values()] == [None] * 4


async def test_a_rolling_update_ends_at_the_first_new_worker_that_cannot_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with of_two() as stage:
        stage.pool.roll()
        await settle()
        stage.workers[2].fail("the file is broken")
        await settle()
        assert [one.retired for one in stage.workers] == [False, False, True]
        assert stage.pool.state == "ready"
        assert devices(stage) == ["a", "b"]
    assert "the file is broken" in caplog.text
    assert "ends after 0 of 2 workers" in caplog.text


async def test_where_there_is_no_place_for_a_new_worker_an_old_one_makes_room_if_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resizing, "PLACE_S", 0.0)
    async with of_two() as stage:
        stage.pool.roll()
        await settle()
        assert [one.retired for one in stage.workers] == [True, False, False]
        await stage.load(2)
        await settle()
        assert len(stage.workers) == 4
        await stage.load(3)
        assert [one.retired for one in stage.workers] == [True, True, False, False]


async def test_the_last_worker_never_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "PLACE_S", 0.0)

    stage = of(workers=1)
    await stage.load(0)
    stage.pool.roll()
    await settle()
    assert not stage.workers[0].retired
    assert stage.pool.state == "ready"
    await stage.pool.stop()


async def test_a_lone_worker_of_this_machine_is_not_rolled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = of()
    alone = Pool(stage.make, ["a"], EngineSettings())
    alone.start()
    alone.roll()
    await alone.stop()
    await stage.pool.stop()
    assert "start with --workers" in caplog.text


async def test_the_number_of_workers_follows_the_load_between_its_bounds() -> None:
    scale = Scale(1, 3, wait_s=5.0, idle_s=30.0)
    stage = of(workers=1, scale=scale)
    await stage.load(0)
    await stage.submit(*map(str, range(12)))
    autoscaler, now_s = Autoscaler(scale), [0.0]

    async def look(seconds: int) -> None:
        for _ in range(seconds):
            now_s[0] += 1.0
            stage.pool._resizer.look(autoscaler, now_s[0])
            await stage.load(*(n for n, w in enumerate(stage.workers) if w.state == "starting"))

    await look(10)
    assert len(stage.pool.members()) == 3
    await stage.finish()
    await look(29)
    assert len(stage.pool.members()) == 3
    await look(10)
    assert len(stage.pool.members()) == 1
    assert stage.pool.state == "ready"
    assert [task.exception() for task in stage.tasks.values()] == [None] * 12
    await stage.pool.stop()
