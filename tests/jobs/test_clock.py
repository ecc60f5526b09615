"""No clock that is set makes a job older: within a run, and between two of them."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import ServeSettings
from carpool.errors import DeadlineExceeded, FileNotFound
from carpool.jobs.clock import StoreClock
from carpool.jobs.database import _TABLES, VERSION
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.jobs.work import requests_of, work_of
from carpool.server.access.signed_links import TTL_S, SignedFiles
from carpool.server.app import create_app
from carpool.types import CheckedRequest
from support.app import CARD, Grey, client_of, fleet_of, parts
from support.endpoints import ENDPOINT
from support.job_store import Hand, submit, writes

DAY_S = 86400.0
JUMPS = [-400 * DAY_S, -DAY_S, DAY_S, 400 * DAY_S]


@given(st.lists(st.tuples(st.sampled_from(["pass", "suspend", "set"]), st.integers(0, 10**6))))
def test_within_a_run_time_passes_and_never_jumps(events: list[tuple[str, int]]) -> None:
    hand = Hand()
    clock = hand.run()
    passed = awake = 0
    for what, seconds in events:
        if what == "set":
            hand.now_s += seconds - 5 * 10**5
        else:
            (hand.pass_by if what == "pass" else hand.suspend)(seconds)
            passed += seconds
            awake += seconds if what == "pass" else 0

        assert clock() == 1000 + passed
        assert clock.uptime_s() == awake


def test_the_clocks_of_the_system_agree() -> None:
    clock = StoreClock()

    assert clock() == pytest.approx(time.time(), abs=1.0)
    assert 0 <= clock.uptime_s() < 1.0
    clock.resume(100.0)
    assert 100 <= clock.uptime_s() < 101


@pytest.mark.parametrize("when", ["within a run", "between two"])
@pytest.mark.parametrize("jump_s", JUMPS)
def test_a_wall_clock_that_is_set_neither_expires_nor_deletes_a_job(
    tmp_path: Path, jump_s: float, when: str
) -> None:
    hand = Hand()
    store = JobStore(tmp_path, ttl_s=DAY_S, clock=hand.run())
    done, waiting = submit(store, "a"), submit(store, "b")
    store.take(1)
    store.complete(done.id, writes(a_txt=b"x"))

    hand.pass_by(DAY_S / 2)
    hand.now_s += jump_s
    if when == "between two":
        store.close()
        store = JobStore(tmp_path, ttl_s=DAY_S, clock=hand.run())
    with closing(store):
        assert store.tidy() == []
        hand.pass_by(DAY_S / 2)
        assert store.tidy() == []
        assert {job.state for job in store.page()[0]} == {"completed", "queued"}
        hand.pass_by(1.0)
        assert [job.id for job in store.tidy()] == [waiting.id]
        assert [job.id for job in store.page()[0]] == [waiting.id]


@pytest.mark.parametrize("jump_s", JUMPS)
def test_the_timeout_of_a_stored_job_is_what_it_waited_for_a_server_that_runs(
    tmp_path: Path, jump_s: float
) -> None:
    hand = Hand()
    with closing(JobStore(tmp_path, clock=hand.run())) as store:
        work = work_of("m", [CheckedRequest("a", 1, {}, timeout_s=60.0)])
        store.submit("image", {}, work)
        hand.pass_by(20)
    hand.now_s += jump_s

    with closing(JobStore(tmp_path, clock=hand.run())) as store:
        [job] = store.take(1)
        [part] = requests_of(job, "m", lambda name: None, None, store.clock.uptime_s())
        assert part.timeout_s == 40.0
        hand.pass_by(40)
        with pytest.raises(DeadlineExceeded):
            requests_of(job, "m", lambda name: None, None, store.clock.uptime_s())


def test_a_store_of_before_there_was_an_uptime_begins_with_jobs_of_no_age(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as db:
        db.executescript(f"{_TABLES} PRAGMA user_version = {VERSION};")
        db.execute("CREATE INDEX by_end ON jobs (ended_s)")
        row = "INSERT INTO jobs (id, kind, owner, state, asked, work, created_s, ended_s)"
        for name, state, ended_s in (("image_a", "queued", None), ("image_b", "failed", 20.0)):
            values = [name, "image", "", state, "{}", "{}", 10.0, ended_s]
            db.execute(f"{row} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        db.commit()
    hand = Hand()

    for _ in range(2):  # and again
        with closing(JobStore(tmp_path, ttl_s=60, clock=hand.run())) as store:
            hand.pass_by(30)
            assert store.tidy() == []
            assert [job.created_s for job in store.page()[0]] == [10.0, 10.0]
            known = [store.expires_s(job) for job in store.page(is_newest_first=False)[0]]
    assert known[0] is None
    assert known[1] == pytest.approx(hand.now_s, abs=1)
    with closing(JobStore(tmp_path, ttl_s=60, clock=hand.run())) as store:
        hand.pass_by(1)
        assert [job.id for job in store.tidy()] == ["image_a"]


# What clients see


def shown(folder: Path, hand: Hand, job_id: str = "") -> dict[str, Any]:
    """A completed job, after a minute of a server's run."""

    async def talk() -> dict[str, Any]:
        with closing(JobStore(folder, ttl_s=DAY_S, clock=hand.run())) as store:
            runner = Runner(store, Grey(), {}, model=lambda: CARD.id, max_running=1)
            app = create_app(fleet_of(Grey()), ServeSettings(port=0), runner)
            nonlocal job_id
            if not job_id:
                job_id = submit(store).id
                store.take(1)
                hand.pass_by(10)
                store.complete(job_id, writes(a_txt=b"x"))
            hand.pass_by(60)
            async with client_of(app) as client:
                job: dict[str, Any] = (await client.get(f"/v1/jobs/{job_id}")).json()
            await runner.stop()
            return job

    return asyncio.run(talk())


@pytest.mark.parametrize("jump_s", JUMPS)
def test_the_moments_of_a_job_agree_with_when_it_goes(tmp_path: Path, jump_s: float) -> None:
    hand = Hand()
    hand.now_s = 500 * DAY_S
    job = shown(tmp_path, hand)
    assert job["completed_at"] == job["created_at"] + 10
    assert job["expires_at"] == job["completed_at"] + DAY_S

    hand.now_s += jump_s
    again = shown(tmp_path, hand, job["id"])

    assert again["created_at"] <= again["started_at"] <= again["completed_at"]
    assert again["completed_at"] == min(job["completed_at"], int(hand.now_s - 60))
    assert again["expires_at"] == pytest.approx(hand.now_s + DAY_S - 120, abs=1)


# Links


def test_a_link_lasts_an_hour_whatever_the_wall_clock_is_set_to(tmp_path: Path) -> None:
    hand = Hand()
    files = SignedFiles(tmp_path, clock=hand.run())
    link = files.keep(b"picture", "png")

    hand.now_s += 2 * DAY_S
    hand.pass_by(TTL_S - 1)
    assert files.get(*parts(link)).read_bytes() == b"picture"
    hand.now_s -= 4 * DAY_S
    hand.pass_by(1)
    with pytest.raises(FileNotFound):
        files.get(*parts(link))


def test_a_link_from_before_the_wall_clock_was_set_back_ends_after_an_hour_too(
    tmp_path: Path,
) -> None:
    hand = Hand()
    hand.now_s = 500 * DAY_S
    link = SignedFiles(tmp_path, clock=hand.run()).keep(b"picture", "png")

    hand.now_s -= 400 * DAY_S
    files = SignedFiles(tmp_path, clock=hand.run())

    assert files.get(*parts(link)).read_bytes() == b"picture"
    hand.pass_by(TTL_S)
    with pytest.raises(FileNotFound):
        files.get(*parts(link))


async def test_the_links_of_a_server_go_by_the_clock_of_its_store(tmp_path: Path) -> None:
    hand = Hand()
    with closing(JobStore(tmp_path, clock=hand.run())) as store:
        runner = Runner(store, Grey(), {}, model=lambda: CARD.id, max_running=1)
        async with client_of(create_app(fleet_of(Grey()), ServeSettings(port=0), runner)) as client:
            wish = {"prompt": "a", "response_format": "url"}
            url = (await client.post(ENDPOINT, json=wish)).json()["data"][0]["url"]
            statuses = [(await client.get(url)).status_code]
            hand.pass_by(TTL_S)
            statuses.append((await client.get(url)).status_code)
        await runner.stop()
        assert statuses == [200, 404]
