"""The store of jobs: what it accepted it keeps, and every job ends once."""

import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from carpool import errors
from carpool.jobs.store import JobStore
from support.job_store import Hand, killed, submit, writes

BROKEN = errors.PipelineFailed("it broke")
Opened = Callable[..., JobStore]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens stores; in the end they are closed."""
    stores: list[JobStore] = []

    def open_(*args: Any, **options: Any) -> JobStore:
        stores.append(JobStore(*args, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def content(store: JobStore, job_id: str, name: str = "a.txt") -> bytes | None:
    path = store.file(store.get(job_id), name)
    return None if path is None else path.read_bytes()


# A job's life


def test_a_job_is_queued_taken_and_completed_with_its_files(tmp_path: Path, opened: Opened) -> None:
    clock = Hand()
    store = opened(tmp_path, clock=clock.run())

    job = submit(store)
    assert (job.state, job.created_s, job.started_s) == ("queued", 1000, None)
    assert job.id.startswith("video_")
    clock.pass_by(1.0)
    [taken] = store.take(5)
    assert (taken.id, taken.state, taken.started_s) == (job.id, "in_progress", 1001)
    assert content(store, job.id) is None
    clock.pass_by(1.0)
    assert store.complete(job.id, writes(a_txt=b"one", b_txt=b"three"))

    done = store.get(job.id)
    assert (done.state, done.progress, done.ended_s) == ("completed", 100, 1002)
    assert done.files == {"a.txt": 3, "b.txt": 5}
    assert (done.asked, done.work) == ({"prompt": "a"}, {"seed": 1})
    assert content(store, job.id) == b"one"
    assert content(store, job.id, "c.txt") is None
    assert content(store, job.id, "../../jobs.sqlite") is None
    assert done.warnings == ()


def test_a_job_keeps_what_its_client_is_to_know(tmp_path: Path, opened: Opened) -> None:
    store = opened(tmp_path)
    job = submit(store)
    store.take(1)

    spent = {"total_s": 1.5}
    facts: dict[str, Any] = {"warnings": ["truncated"], "skipped_steps": [3, 0]}
    assert store.complete(job.id, writes(a_txt=b"one"), timings=spent, **facts)

    done = store.get(job.id)
    told = done.warnings, done.timings, done.skipped_steps
    assert told == (("truncated",), spent, (3, 0))


def test_the_oldest_goes_first_and_keeps_its_place_when_it_is_queued_again(opened: Opened) -> None:
    store = opened()
    first, second, third = (submit(store) for _ in range(3))

    assert [job.id for job in store.take(2)] == [first.id, second.id]
    assert store.ahead_of(third) == 0
    store.requeue(first.id)

    assert store.ahead_of(third) == 1
    [again] = store.take(1)
    assert again.id == first.id


@pytest.mark.parametrize("state", ["failed", "cancelled", "expired"])
def test_whoever_ends_a_job_first_has_ended_it(tmp_path: Path, state: Any, opened: Opened) -> None:
    store = opened(tmp_path)
    job = submit(store)
    store.take(1)

    assert store.end(job.id, state, BROKEN)

    assert not store.end(job.id, "failed", errors.Cancelled("too late"))
    assert not store.complete(job.id, writes(a_txt=b"too late"))
    store.requeue(job.id)
    store.note_progress({job.id: 70})
    ended = store.get(job.id)
    assert (ended.state, ended.progress, ended.files) == (state, 0, {})
    assert ended.error == {
        "code": "internal_error", "message": "it broke", "param": None, "type": "server_error",
    }  # fmt: skip
    assert not list((tmp_path / "files").iterdir())


# Keys, owners and pages


def test_the_same_key_and_body_is_the_same_job_and_another_body_is_refused(opened: Opened) -> None:
    store = opened()
    job = submit(store, key="k", digest="d")

    assert store.submit("video", {}, {}, key="k", digest="d") == job
    assert submit(store, key="k", digest="e", owner="other").id != job.id
    with pytest.raises(errors.IdempotencyMismatch, match=f"for job {job.id}"):
        submit(store, key="k", digest="e")
    assert submit(store, digest="e").id != job.id


def test_a_job_is_its_owners_only(opened: Opened) -> None:
    store = opened()
    job = submit(store, owner="me")

    assert store.get(job.id, "me").id == job.id
    for ask in (store.get, store.remove):
        with pytest.raises(errors.JobNotFound, match="there is no job"):
            ask(job.id, "you")
    assert store.page("you") == ([], False)
    with pytest.raises(errors.JobNotFound):
        store.page("you", after=job.id)


@pytest.mark.parametrize("is_newest_first", [True, False])
def test_pages_show_every_job_once(is_newest_first: bool, opened: Opened) -> None:
    store = opened()
    ids = [submit(store).id for _ in range(5)]
    store.submit("image", {}, {})

    seen: list[str] = []
    more = True
    while more:
        after = seen[-1] if seen else None
        page, more = store.page(kind="video", after=after, limit=2, is_newest_first=is_newest_first)
        seen += [job.id for job in page]

    assert seen == (ids[::-1] if is_newest_first else ids)


def test_a_page_costs_the_same_among_ten_and_among_two_thousand_jobs(opened: Opened) -> None:
    def cost(jobs: int) -> int:
        store, steps = opened(max_waiting=jobs), [0]

        def count() -> None:
            steps[0] += 10

        work = {"filler": "x" * 2000}
        with store._db.writing() as db:
            for number in range(jobs):
                db.execute(
                    "INSERT INTO jobs (id, kind, owner, state, asked, work, created_s)"
                    " VALUES (?, 'image', 'me', 'completed', '{}', ?, 1)",
                    [f"image_{number:032x}", json.dumps(work)],
                )
            db.set_progress_handler(count, 10)  # SQLite's own instructions
        store.page("me", limit=5)
        return steps[0]

    assert cost(2000) <= cost(10) + 20


# What is kept


def test_jobs_that_take_too_long_expire_and_ended_ones_are_forgotten(
    tmp_path: Path, opened: Opened
) -> None:
    clock = Hand()
    store = opened(tmp_path, ttl_s=60, clock=clock.run())
    done, late = submit(store), submit(store)
    store.take(1)
    store.complete(done.id, writes(a_txt=b"x"))

    clock.pass_by(61)
    assert [job.id for job in store.tidy()] == [late.id]

    expired = store.get(late.id)
    assert expired.state == "expired"
    assert expired.error is not None
    assert expired.error["message"] == "the job did not end within 60 s (--job-ttl)"
    with pytest.raises(errors.JobNotFound):
        store.get(done.id)
    assert not list((tmp_path / "files").iterdir())
    clock.pass_by(61)
    assert store.tidy() == []
    assert store.page() == ([], False)


def test_older_files_make_room_and_what_can_never_fit_is_refused(
    tmp_path: Path, opened: Opened
) -> None:
    store = opened(tmp_path, max_bytes=10)
    jobs = [submit(store) for _ in range(4)]
    store.take(4)
    for job in jobs[:3]:
        store.complete(job.id, writes(a_txt=b"12345"))

    with pytest.raises(errors.StoreFailed, match="11 bytes: the limit is 10"):
        store.complete(jobs[3].id, writes(a_txt=b"12345678901"))

    assert {job.id for job in store.page()[0]} == {job.id for job in jobs[1:]}
    assert store.get(jobs[3].id).is_open
    assert {path.name for path in (tmp_path / "files").iterdir()} == {jobs[1].id, jobs[2].id}


def test_progress_never_falls(opened: Opened) -> None:
    store = opened()
    job = submit(store)
    store.take(1)

    store.note_progress({job.id: 40})
    store.requeue(job.id)
    store.take(1)
    store.note_progress({job.id: 10})

    assert store.get(job.id).progress == 40


def test_too_many_waiting_jobs_are_refused_and_those_in_progress_do_not_count(
    opened: Opened,
) -> None:
    store = opened(max_waiting=1)
    submit(store)
    store.take(1)
    submit(store)

    with pytest.raises(errors.Overloaded, match="1 jobs wait already") as refused:
        submit(store)

    assert refused.value.retry_after_s == 10


# Opening


def test_what_was_in_progress_is_queued_again_and_half_written_files_are_swept(
    tmp_path: Path, opened: Opened
) -> None:
    store = opened(tmp_path)
    done, running, waiting = (submit(store, key=key) for key in "abc")
    store.take(2)
    store.complete(done.id, writes(a_txt=b"x"))
    store.note_progress({running.id: 30})
    store.close()
    (tmp_path / "files" / f"{running.id}.part").mkdir()
    (tmp_path / "files" / running.id).mkdir()  # renamed, but not completed when it was killed

    store = opened(tmp_path)

    assert [job.state for job in store.page()[0]] == ["queued", "queued", "completed"]
    assert store.get(running.id).progress == 30
    assert content(store, done.id) == b"x"
    files = {path.name for path in (tmp_path / "files").iterdir()}
    assert files == {done.id, running.id}  # a result that the database forgot: till drawn anew
    assert [job.id for job in store.take(9)] == [running.id, waiting.id]
    assert store.submit("video", {}, {}, key="c").id == waiting.id


def test_a_spoiled_row_is_still_a_job_that_can_fail(tmp_path: Path, opened: Opened) -> None:
    store = opened(tmp_path)
    job = submit(store)
    store.close()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as db:
        db.execute("UPDATE jobs SET work = '{\"seed', asked = '[]'")
    db.close()

    store = opened(tmp_path)

    [taken] = store.take(1)
    assert (taken.id, taken.work, taken.asked) == (job.id, {}, {})
    assert store.end(job.id, "failed", BROKEN)


def test_without_a_folder_nothing_stays_behind() -> None:
    store = JobStore()
    job = submit(store)
    store.take(1)
    store.complete(job.id, writes(a_txt=b"x"))
    assert content(store, job.id) == b"x"

    store.close()

    assert not store.folder.exists()


# In any order


class Life(RuleBasedStateMachine):
    """Any sequence of submits, ends, crashes, time and set clocks, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.clock = Hand()
        self.up_s = self.noted_s = 0.0
        self.since_s: dict[str, float] = {}  # uptime since when a job is open, or has ended
        self.states: dict[str, str] = {}
        self.keys: dict[str, str] = {}

    @initialize()
    def open(self) -> None:
        folder, clock = Path(self._folder.name), self.clock.run()
        self.store = JobStore(folder, ttl_s=50, max_waiting=6, clock=clock)

    @rule(key=st.none() | st.sampled_from("abc"))
    def submit(self, key: str | None) -> None:
        is_full = list(self.states.values()).count("queued") >= 6
        try:
            inputs = {"in": b"x"}
            job = self.store.submit("video", {}, {"n": 1}, key=key, inputs=inputs)
        except errors.Overloaded:
            assert is_full
            assert key not in self.keys
            return
        assert (job.id not in self.states) is (key is None or key not in self.keys)
        if key is not None:
            assert self.keys.setdefault(key, job.id) == job.id
        self.states.setdefault(job.id, "queued")
        self.since_s.setdefault(job.id, self.up_s)

    @rule(most=st.integers(0, 3))
    def take(self, most: int) -> None:
        queued = [job for job, state in self.states.items() if state == "queued"]
        assert [job.id for job in self.store.take(most)] == queued[:most]
        self.states |= dict.fromkeys(queued[:most], "in_progress")

    @rule(pick=st.integers(0, 9), state=st.sampled_from(["failed", "cancelled", "expired"]))
    def end(self, pick: int, state: Any) -> None:
        if (job := self._job(pick)) is not None:
            is_open = self.states[job] in ("queued", "in_progress")
            assert self.store.end(job, state, BROKEN) is is_open
            self.states[job] = state if is_open else self.states[job]
            self.since_s[job] = self.up_s if is_open else self.since_s[job]

    @rule(pick=st.integers(0, 9), is_broken=st.booleans())
    def complete(self, pick: int, is_broken: bool) -> None:
        if (job := self._job(pick)) is None or self.states[job] == "completed":
            return  # whoever runs jobs completes each once

        def write(folder: Path) -> None:
            (folder / "a.txt").write_text(job)
            if is_broken:
                raise OSError(28, "No space left on device")

        if is_broken:
            with pytest.raises(errors.StoreFailed):
                self.store.complete(job, write)
            return
        is_running = self.states[job] == "in_progress"
        assert self.store.complete(job, write) is is_running
        self.states[job] = "completed" if is_running else self.states[job]
        self.since_s[job] = self.up_s if is_running else self.since_s[job]

    @rule(pick=st.integers(0, 9))
    def requeue(self, pick: int) -> None:
        if (job := self._job(pick)) is not None:
            self.store.requeue(job)
            if self.states[job] == "in_progress":
                self.states[job] = "queued"

    @rule(pick=st.integers(0, 9))
    def remove(self, pick: int) -> None:
        if (job := self._job(pick)) is not None:
            self.store.remove(job)
            self._forget([job])

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.clock.pass_by(seconds)
        self.up_s += seconds

    @rule(seconds=st.sampled_from([-1e9, -9e4, -20.0, 20.0, 9e4, 1e9]))
    def set_the_wall_clock(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(seconds=st.sampled_from([20, 100_000]))
    def suspend(self, seconds: int) -> None:
        self.clock.suspend(seconds)

    @rule()
    def tidy(self) -> None:
        old = {job for job, since_s in self.since_s.items() if since_s < self.up_s - 50}
        late = {job for job in old if self.states[job] in ("queued", "in_progress")}

        assert {job.id for job in self.store.tidy()} == late

        self.noted_s = self.up_s if self.states else self.noted_s
        self.states |= dict.fromkeys(late, "expired")
        self.since_s |= dict.fromkeys(late, self.up_s)
        self._forget(list(old - late))

    @rule(is_killed=st.booleans(), away_s=st.sampled_from([-9e4, 0.0, 9e4]))
    def crash(self, is_killed: bool, away_s: float) -> None:
        (killed if is_killed else JobStore.close)(self.store)
        self.clock.now_s += away_s
        self.open()
        again = [job for job, state in self.states.items() if state == "in_progress"]
        self.states |= dict.fromkeys(again, "queued")
        if self.states and not is_killed:
            self.noted_s = self.up_s
        # what was not noted before a kill did not happen
        kept_s = max([self.noted_s, *self.since_s.values()])
        assert self.store.clock.uptime_s() == pytest.approx(kept_s if is_killed else self.noted_s)
        self.up_s = self.noted_s = self.store.clock.uptime_s()

    @invariant()
    def every_job_is_there_once_in_its_state_with_its_files(self) -> None:
        if not hasattr(self, "store"):
            return
        jobs, has_more = self.store.page(limit=999, is_newest_first=False)
        assert not has_more
        assert {job.id: job.state for job in jobs} == self.states
        for job in jobs:
            expected = job.id.encode() if job.state == "completed" else None
            assert content(self.store, job.id) == expected
        folders = {path.name for path in (self.store.folder / "files").iterdir()}
        assert folders == {job for job, state in self.states.items() if state == "completed"}
        begun = {path.name for path in (self.store.folder / "inputs").iterdir()}
        assert begun == {job for job, s in self.states.items() if s in ("queued", "in_progress")}

    @invariant()
    def moments_are_in_order_and_none_is_to_come(self) -> None:
        now_s = self.store.clock() if hasattr(self, "store") else 0.0
        for job in self.store.page(limit=999)[0] if now_s else ():
            moments = [job.created_s, job.started_s, job.ended_s, now_s]
            known = [moment for moment in moments if moment is not None]
            assert known == sorted(known)
            if (expires_s := self.store.expires_s(job)) is not None:
                left_s = 50 - (self.up_s - self.since_s[job.id])
                assert expires_s == pytest.approx(now_s + left_s, abs=0.6)

    def _job(self, pick: int) -> str | None:
        return list(self.states)[pick % len(self.states)] if self.states else None

    def _forget(self, jobs: list[str]) -> None:
        for job in jobs:
            del self.states[job], self.since_s[job]
        self.keys = {key: job for key, job in self.keys.items() if job in self.states}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self._folder.cleanup()


Life.TestCase.settings = settings(max_examples=15, stateful_step_count=30)
TestLife = Life.TestCase


def test_what_is_stored_is_plain_json(tmp_path: Path, opened: Opened) -> None:
    store = opened(tmp_path)
    store.submit("image", {"prompt": "h\u00e4\ud800"}, {"jobs": [{"lora": [["a", 1.0]]}]})
    store.close()

    db = sqlite3.connect(tmp_path / "jobs.sqlite")
    [[asked, work]] = db.execute("SELECT asked, work FROM jobs").fetchall()
    db.close()

    assert json.loads(asked) == {"prompt": "h\u00e4\ud800"}
    assert json.loads(work) == {"jobs": [{"lora": [["a", 1.0]]}]}
