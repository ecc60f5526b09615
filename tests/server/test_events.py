"""`GET /v1/events`: who sees what, when the worker reports, and how streams end."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from carpool.config import ServeSettings
from carpool.errors import Overloaded
from carpool.fleet.fleet import Fleet
from carpool.media.executors import FairExecutor
from carpool.server.access.keys import owner_of
from carpool.server.events import BUFFERED, MOST_VIEWERS, Events
from carpool.server.observer import Observer
from carpool.telemetry.activity import RunningRequest, SeenForward, SeenMove, Snapshot
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import Grey, ask, fleet_of, idle_jobs
from support.endpoints import ENDPOINT
from support.server_process import Server, body, serving

KEYS = ("first-key", "second-key")
STATISTICS: dict[str, Any] = {"waiting": 0, "running": 1, "steps": 5, "memory": {"device": "cpu"}}


class Reporter(Grey):
    """Reports only what a test has it report, and keeps whether it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_watched = False

    def watch_activity(self, listener: Any) -> None:
        super().watch_activity(listener)
        self.is_watched = listener is not None

    async def statistics(self) -> dict[str, Any]:
        return STATISTICS | {"secret": "of another"}

    def report(self, *ids: str) -> None:
        running = tuple(
            RunningRequest(number, one, "denoise", 1, 4, 0.5)
            for number, one in enumerate(ids, start=1)
        )
        seen = SeenForward("transformer.forward", "denoise", 1.0, 0.25, 2, (1, 2), "differs:size")
        assert self._on_activity is not None
        moves = [SeenMove(one, 100.0, 0, 1, "drain") for one in ids]
        self._on_activity(protocol.Activity(Snapshot(2.0, running, (), 0), [seen], 0, moves=moves))


def events_of(worker: Grey | Fleet, observer: Observer | None = None, **options: Any) -> Events:
    fleet, jobs = worker if isinstance(worker, Fleet) else fleet_of(worker), idle_jobs()
    return Events(
        fleet,
        observer or Observer(fleet, ServeSettings(), jobs),
        jobs,
        **{
            "knows": lambda owner: True,
            "encoder": FairExecutor("test", 1, per_tenant=1),
            **options,
        },
    )


@asynccontextmanager
async def watching(events: Events, owner: str = "") -> AsyncIterator[AsyncIterator[bytes]]:
    viewer = events.follow(owner)
    try:
        yield viewer
    finally:
        await viewer.aclose()  # type: ignore[attr-defined]


def parsed(event: bytes) -> tuple[str, Any]:
    name, data, *_ = event.decode().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def until(viewer: AsyncIterator[bytes], kind: str) -> Any:
    async with asyncio.timeout(10):
        while (event := parsed(await anext(viewer)))[0] != kind:
            pass
    return event[1]


async def test_the_worker_reports_only_while_somebody_watches() -> None:
    worker = Reporter()
    events, seen = events_of(worker), [worker.is_watched]
    async with watching(events) as one, watching(events) as other:
        await anext(one)
        await anext(other)
        seen.append(worker.is_watched)
    assert [*seen, worker.is_watched] == [False, True, False]


async def test_each_key_sees_its_own_ids_and_of_others_numbers_only() -> None:
    worker = Reporter()
    observer = Observer(fleet_of(worker), ServeSettings(), idle_jobs())
    events, seen = events_of(worker, observer), {}
    for owner in KEYS:
        made = CheckedRequest(request_id=f"of-{owner}", seed=1, arguments={"prompt": owner})
        observer._note(("request", owner, f"asked-by-{owner}"), [made])
    async with watching(events, KEYS[0]) as one, watching(events, KEYS[1]) as other:
        viewers = dict(zip(KEYS, (one, other), strict=True))
        for viewer in viewers.values():
            await anext(viewer)
        worker.report(*(f"of-{owner}" for owner in KEYS))
        for owner, viewer in viewers.items():
            seen[owner] = await until(viewer, "activity")

    first = seen[KEYS[0]]
    assert first["running"] == [
        {
            "number": 1, "phase": "denoise", "step": 1, "steps": 4, "left_s": 0.5, "tokens": 0,
            "id": "asked-by-first-key", "part": 0,
        },
        {"number": 2, "phase": "denoise", "step": 1, "steps": 4, "left_s": 0.5, "tokens": 0},
    ]  # fmt: skip
    moved = {"at": 100.0, "from": 0, "to": 1, "why": "drain"}
    assert first["moves"] == [{**moved, "id": "asked-by-first-key", "part": 0}, moved]
    assert first["forwards"][0]["requests"] == [1, 2]
    assert first["forwards"][0]["why"] == "differs:size"
    assert "second-key" not in json.dumps(first)
    assert "first-key" not in json.dumps(seen[KEYS[1]])


async def test_statistics_have_the_known_fields_only_and_a_new_state_is_told_at_once() -> None:
    worker = Reporter()
    async with watching(events_of(worker)) as viewer:
        statistics = await until(viewer, "stats")
        worker._state = "worker_lost"
        status = await until(viewer, "status")

    assert statistics == {"model": "grey", "worker": 0, **STATISTICS}
    assert status["status"] == "worker_lost"


async def test_of_several_models_and_workers_each_has_its_own_statistics_and_activity() -> None:
    class Several(Reporter):
        async def statistics(self) -> dict[str, Any]:
            workers = [STATISTICS | {"worker": number} for number in (0, 1)]
            held = {"requests": 3, "work_s": 1.0, "stage": 0}
            return {"waiting": 3, "running": 2, "workers": workers, "held": held}

    two = Reporter()
    fleet = fleet_of(Several(), two, None, names=("one", "two", "three"))
    async with watching(events_of(fleet)) as viewer:
        statistics = [await until(viewer, "stats") for _ in range(3)]
        assert two._on_activity is not None
        two._on_activity(protocol.Activity(Snapshot(2.0, (), (), 0), [], 0, worker=1))
        activity = await until(viewer, "activity")

    about = [(one["model"], one["worker"], one.get("held")) for one in statistics]
    assert about == [("one", 0, 3), ("one", 1, 3), ("two", 0, None)]
    assert (activity["model"], activity["worker"]) == ("two", 1)


async def test_a_viewer_that_does_not_read_is_let_go_and_others_lose_nothing() -> None:
    worker = Reporter()
    events, read = events_of(worker), 0
    async with watching(events) as slow, watching(events) as quick:
        await anext(slow)
        await anext(quick)
        for _ in range(BUFFERED + 1):
            worker.report()
            if (await until(quick, "activity"))["now_s"] == 2.0:
                read += 1
        assert (read, len([event async for event in slow])) == (BUFFERED + 1, 0)


async def test_a_key_has_so_many_streams_and_no_more_and_other_keys_have_theirs() -> None:
    events = events_of(Reporter())
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MOST_VIEWERS):
            await anext(await stack.enter_async_context(watching(events, "one")))
        with pytest.raises(Overloaded, match="64 streams of events"):
            await anext(events.follow("one"))
        await anext(await stack.enter_async_context(watching(events, "other")))


async def test_a_stream_ends_with_its_key_and_with_the_server() -> None:
    worker, known = Reporter(), {"kept", "lost"}
    events = events_of(worker, knows=known.__contains__)
    async with watching(events, "kept") as kept, watching(events, "lost") as lost:
        await anext(kept)
        await anext(lost)
        known.remove("lost")
        worker.report()
        after_key = [event async for event in lost]
        events.close()
        assert [after_key, [event async for event in kept][1:]] == [[], []]


def test_what_a_request_would_take_is_told_and_what_is_wrong_with_it_as_for_a_drawing() -> None:
    refused = ask(b'{"prompt": "a", "size": "50x64"}', "/v1/estimates")

    assert refused.status_code == 400
    assert "nearest size is 48x64" in refused.json()["error"]["message"]


def test_no_playground_means_no_page_and_the_rest_as_before() -> None:
    with_it, without = (ask(b"", "/", method="GET", playground=on) for on in (True, False))

    assert with_it.status_code == 200
    assert (without.status_code, without.headers["allow"]) == (405, "POST")  # for Hugging Face's
    assert without.json()["error"]["code"]
    assert ask(b"", "/v1/models", method="GET", playground=False).status_code == 200


def test_behind_a_proxy_the_page_names_its_files_below_the_proxys_path() -> None:
    page = ask(b"", "/", method="GET", root_path="/draw").text

    assert '<base href="/draw/">' in page


def test_a_page_that_is_known_already_is_not_sent_again() -> None:
    page = ask(b"", "/", method="GET")

    again = ask(b"", "/", method="GET", headers={"if-none-match": page.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEYS[0], "--api-key", KEYS[1], "--drain-timeout", "1") as server:
        yield server


@pytest.mark.timeout(150)
def test_a_job_is_followed_live_by_its_own_key_and_the_stream_does_not_hold_up_the_end(
    server: Server,
) -> None:
    mine, others = ({"authorization": f"Bearer {key}"} for key in KEYS)
    told: dict[str, list[Any]] = {}
    with (
        server.client(headers=mine) as client,
        server.client(headers=others) as stranger,
        client.stream("GET", "/v1/events") as own,
        stranger.stream("GET", "/v1/events") as foreign,
    ):
        streams = own.iter_lines(), foreign.iter_lines()
        asked = body("a secret drawing", num_inference_steps=100, n=2)
        asked |= {"background_job": True, "partial_images": 2}
        job = client.post(ENDPOINT, json=asked).json()["id"]

        for name, lines in zip(KEYS, streams, strict=True):
            told[name] = list(_events(lines, until_job=job if name == KEYS[0] else None))
        estimate = client.post("/v1/estimates", json=body(num_inference_steps=8)).json()
        report = client.get(f"/v1/jobs/{job}").json()
        server.signal(signal.SIGTERM)
        assert server.process.wait(15) == 0  # though two still watch

    own_kinds = {kind for kind, _ in told[KEYS[0]]}
    assert own_kinds == {"status", "stats", "activity", "job", "preview"}
    previews = [data for kind, data in told[KEYS[0]] if kind == "preview"]
    assert {(one["id"], one["part"]) for one in previews} == {(job, 0), (job, 1)}
    shared = [
        forward
        for kind, data in told[KEYS[0]]
        if kind == "activity"
        for forward in data["forwards"]
        if forward["phase"] == "denoise" and len(forward["requests"]) == 2
    ]
    assert shared
    assert {kind for kind, _ in told[KEYS[1]]} <= {"status", "stats", "activity"}
    assert job not in json.dumps(told[KEYS[1]])
    assert "secret" not in json.dumps(told)
    assert estimate["seconds"] > 0
    assert report["settings"] | {"prompt": "a secret drawing", "n": 2} == report["settings"]
    assert report["task"] == "text-to-image"


def _events(lines: Iterator[str], until_job: str | None) -> Iterator[tuple[str, Any]]:
    """Events until a job is completed; or, without one, until something was reported and ended."""
    kind, was_busy = "", False
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        if not line.startswith("data: "):
            continue
        data = json.loads(line.removeprefix("data: "))
        yield kind, data
        if kind == "job" and data["id"] == until_job and data["status"] == "completed":
            return
        if kind == "activity":
            was_busy = was_busy or bool(data["running"])
            if until_job is None and was_busy and not data["running"]:
                return


def test_an_owner_is_known_for_as_long_as_its_key_is_one_of_the_servers() -> None:
    from carpool.server.access.keys import Keyring

    keys = Keyring(["first-key"])

    assert keys.knows(owner_of(b"first-key"))
    assert not keys.knows(owner_of(b"second-key"))
    assert not keys.knows("")
    assert Keyring([]).knows("")
