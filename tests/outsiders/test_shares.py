"""With API keys, none takes all places: of the queue, of jobs, of the device."""

import asyncio
from collections import Counter
from itertools import islice
from typing import Any

import httpx2
import pytest

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import Overloaded
from carpool.fleet.models import listed_models, models_of
from carpool.fleet.pool import Pool
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.types import CheckedRequest
from support.app import client_of, fleet_of, idle_jobs
from support.endpoints import ENDPOINT
from support.fake_workers import FakeWorker

SHARED: dict[str, Any] = {"fair_share": ("*=1",), "max_running": 4, "max_queue": 60}


@pytest.mark.parametrize(
    ("settings", "shares"),
    [({}, ()), ({"fair_share": ("*=2",)}, ("*=2",)), ({"api_key": ("a=1",)}, ("*=1",)),
     ({"api_key_file": "keys"}, ("*=1",)),
     ({"api_key": ("a=1",), "fair_share": ("a=3",)}, ("a=3",))],
)  # fmt: skip
def test_keys_have_equal_shares_unless_weights_are_set(
    settings: dict[str, Any], shares: tuple[str, ...]
) -> None:
    chosen = ServeSettings(**settings)
    entries = [{"model": "shapes", "name": "a"}]

    assert chosen.engine().fair_share == shares
    assert models_of(["shapes"], chosen)[0].settings.fair_share == shares
    assert listed_models(entries, chosen, "models.yaml")[0].settings.fair_share == shares


def request(name: str, tenant: str) -> CheckedRequest:
    return CheckedRequest(name, 1, {"prompt": "a"}, tenant=tenant)


def filled(tenants: list[str], pool: Pool) -> Counter[str]:
    """How many requests of each tenant are in flight, when all send as many as they may."""
    counts: Counter[str] = Counter()

    async def story() -> None:
        pool.start()
        for handle in pool.handles:
            assert isinstance(handle, FakeWorker)
            handle.load()
        refused, sending = set[str](), []
        while refused != set(tenants):
            for tenant in tenants:
                try:
                    pool.check_room(tenant)
                except Overloaded:
                    refused.add(tenant)
                    continue
                counts[tenant] += 1
                name = f"{tenant}{counts[tenant]}"
                sending.append(asyncio.create_task(pool.submit(request(name, tenant))))
                await asyncio.sleep(0)
        if "new" not in tenants:
            pool.check_room("new")  # there is room for whoever comes next
        await pool.stop()
        await asyncio.gather(*sending, return_exceptions=True)

    asyncio.run(story())
    return counts


def pool_of(**settings: Any) -> Pool:
    return Pool(FakeWorker, ["cpu"] * 2, EngineSettings(**settings))


def test_one_key_fills_seven_eighths_and_two_fill_as_much_each() -> None:
    places = 2 * SHARED["max_running"] + SHARED["max_queue"]

    alone = filled(["a"], pool_of(**SHARED))
    both = filled(["a", "b"], pool_of(**SHARED))

    assert alone["a"] == pytest.approx(places * 7 / 8, abs=1)
    assert both["a"] == both["b"] == pytest.approx(places * 7 / 15, abs=1)


def test_without_keys_or_shares_every_place_is_taken() -> None:
    places = 2 * SHARED["max_running"] + SHARED["max_queue"]

    assert filled(["", "new"], pool_of(**SHARED)).total() == places
    without = pool_of(**{**SHARED, "fair_share": ()})
    assert filled(["a", "new"], without).total() == places


def test_what_may_run_is_never_kept_from_a_lone_key() -> None:
    small = {**SHARED, "max_queue": 0}

    assert filled(["a", "new"], pool_of(**small)).total() == 2 * SHARED["max_running"]


async def test_a_lone_worker_keeps_places_too() -> None:
    pool = Pool(FakeWorker, ["cpu"], EngineSettings(**SHARED))
    [worker] = pool.handles
    assert isinstance(worker, FakeWorker)
    worker.load()
    held = [asyncio.create_task(pool.submit(request(f"{n}", "a"))) for n in range(56)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="kept for other keys"):
        pool.check_room("a")
    pool.check_room("b")
    pool.check_room()
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_a_key_that_floods_the_server_leaves_others_room() -> None:
    """Over HTTP: whoever floods is told so, and the neighbour's request is taken."""
    keys = "hostile=h", "neighbour=n"
    settings = ServeSettings(port=0, api_key=keys, max_running=1, max_queue=20)

    pool = Pool(FakeWorker, ["cpu"] * 2, settings.engine())
    pool.start()
    for handle in pool.handles:
        assert isinstance(handle, FakeWorker)
        handle.load()
    async with client_of(create_app(fleet_of(pool), settings, idle_jobs())) as http:

        def draw(key: str) -> "asyncio.Task[httpx2.Response]":
            headers = {"authorization": f"Bearer {key}"}
            sent = http.post(ENDPOINT, json={"prompt": "a"}, headers=headers)
            return asyncio.create_task(sent)

        flood = [draw("h") for _ in range(100)]
        refused = islice(asyncio.as_completed(flood), 80)
        codes = {(await answer).status_code for answer in refused}
        assert codes == {429}
        mine = draw("n")
        for _ in range(100):
            await asyncio.sleep(0)
        assert not mine.done()  # it waits
        for task in [*flood, mine]:
            task.cancel()
        await asyncio.gather(*flood, mine, return_exceptions=True)
    await pool.stop()


def submit(store: JobStore, owner: str) -> str:
    return store.submit("image", {}, {}, owner=owner).id


def test_a_key_fills_no_more_than_its_part_of_the_jobs_and_keys_take_turns() -> None:
    store = JobStore(None, max_waiting=16)
    try:
        hostile = [submit(store, "hostile") for _ in range(14)]
        with pytest.raises(Overloaded, match="kept for other keys"):
            submit(store, "hostile")
        mine = submit(store, "neighbour")
        assert store.ahead_of(store.get(mine, "neighbour")) == 1
        assert store.ahead_of(store.get(hostile[2], "hostile")) == 3

        assert [one.id for one in store.take(2)] == [hostile[0], mine]
        late = submit(store, "late")
        assert [one.id for one in store.take(1)] == [late]
    finally:
        store.close()


def test_without_keys_jobs_run_in_the_order_in_which_they_came() -> None:
    store = JobStore(None, max_waiting=8)
    try:
        ids = [submit(store, "") for _ in range(8)]
        with pytest.raises(Overloaded, match="the limit is 8"):
            submit(store, "")
        assert [one.id for number in (3, 5) for one in store.take(number)] == ids
    finally:
        store.close()
