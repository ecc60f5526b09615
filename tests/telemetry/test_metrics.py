"""What Prometheus reads: names, labels and buckets, from counts that a test makes itself."""

import asyncio
from bisect import bisect_left
from contextlib import closing
from functools import cache, reduce
from operator import add
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from carpool.config import ServeSettings
from carpool.errors import PipelineFailed
from carpool.jobs.clock import StoreClock
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.jobs.work import work_of
from carpool.server.app import create_app
from carpool.telemetry.histograms import histogram, statistics_of
from carpool.telemetry.metric_list import METRICS
from carpool.telemetry.metrics import Metrics
from carpool.types import BUCKETS_S, CheckedRequest
from carpool.worker import protocol
from support.app import CARD, Grey, Lone, client_of, fleet_of, idle_jobs
from support.engine_driver import VirtualClock, driving

BUILD = {"version": "1", "torch": "2", "diffusers": "3", "revision": ""}
ENDPOINT = "/v1/images/generations"


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    """Every value by its name and the values of its labels, in the order of the labels' names."""
    return {
        (one.name, *(text for _, text in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


def families(page: bytes) -> dict[str, str]:
    """The type of each metric."""
    found = {one.name: one.type for one in text_string_to_metric_families(page.decode())}
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


async def page_of(app: FastAPI, worker: Grey) -> bytes:
    """What Prometheus reads of an application whose worker is none, and so is not asked."""
    worker._state = "worker_lost"
    async with client_of(app) as client:
        return (await client.get("/metrics")).content


@cache
def ridden() -> dict[str, Any]:
    """Statistics of an engine that drew two pictures together, one of them too late."""
    clock = VirtualClock()
    with driving("flux", clock=clock) as drive:
        drive.submit(num_inference_steps=2)
        drive.submit(num_inference_steps=2, deadline_s=1.0)
        clock.pass_by(0.3)
        drive.turn()
        clock.pass_by(5.0)
        drive.finish()
        return drive.engine.statistics()


def test_every_metric_has_its_name_type_and_labels() -> None:
    metrics = Metrics()
    metrics.answered("flux", ENDPOINT, 200, 0.2)
    metrics.drew("flux", 1)
    metrics.filmed("flux", 2.5)
    metrics.previewed("flux", 0.3)
    metrics.ended("flux", "image", "ok", 8.0)

    worker = {"model": "flux", "worker": 0, "device": "cpu", "state": "ready", "requests": 2}
    statistics = {**ridden(), "held": {"requests": 1}}
    page = metrics.page("flux", BUILD, statistics, {"queued": 3, "in_progress": 1}, [worker])

    assert families(page) == {
        name.removesuffix("_total"): about.type for name, about in METRICS.items()
    }
    for family in text_string_to_metric_families(page.decode()):
        for one in family.samples:
            name = one.name if one.name in METRICS else family.name
            if not name.endswith("_created"):
                assert one.labels.keys() - {"le"} == set(METRICS[name].labels)


def test_the_metrics_of_several_workers_say_which_one() -> None:
    several = [{"worker": number, **ridden()} for number in range(2)]
    statistics = {"held": {"requests": 3}, "workers": several}
    workers = [
        {"model": "flux", "worker": 0, "device": "cuda:0", "state": "ready", "requests": 2},
        {"model": "flux", "worker": 1, "device": "cuda:1", "state": "worker_lost", "requests": 0},
    ]

    seen = samples(Metrics().page("flux", BUILD, statistics, {}, workers))

    assert seen["carpool_steps_total", "flux", "0"] == seen["carpool_steps_total", "flux", "1"] == 4
    assert seen["carpool_worker_up", "cuda:0", "flux", "0"] == 1
    assert seen["carpool_worker_up", "cuda:1", "flux", "1"] == 0
    assert seen["carpool_worker_requests", "flux", "0"] == 2
    assert seen["carpool_requests_held", "flux"] == 3


def test_the_engines_counts_are_told_as_they_are() -> None:
    seen = samples(Metrics().page("flux", BUILD, ridden()))

    assert seen["carpool_steps_total", "flux"] == 4
    assert seen["carpool_requests_running", "flux"] == 0
    assert seen["carpool_deadlines_missed_total", "flux"] == 1
    assert seen["carpool_forward_requests_sum", "transformer.forward"] == 4
    assert seen["carpool_forward_requests_count", "transformer.forward"] == 2
    assert seen["carpool_forward_rows_bucket", "transformer.forward", "1.0"] == 0
    assert seen["carpool_forward_rows_bucket", "transformer.forward", "2.0"] == 2
    assert seen["carpool_forward_duration_seconds_count", "transformer.forward", "flux"] == 2
    assert seen["carpool_forwards_not_wider_total", "transformer.forward", "nobody"] == 2
    assert seen["carpool_device_memory_bytes", "cpu", "weights"] > 100_000
    assert 0 < seen["carpool_machine_speed_factor", "flux"] < 10
    assert seen["carpool_build_info", "3", "", "2", "1"] == 1


def test_waits_in_the_line_are_counted_up_to_each_bound() -> None:
    seen = samples(Metrics().page("flux", BUILD, ridden()))

    name = "carpool_request_queue_seconds"
    bounds = ("0.25", "0.5", "1200.0", "+Inf")
    assert [seen[f"{name}_bucket", bound, "flux"] for bound in bounds] == [0, 2, 2, 2]
    assert seen[f"{name}_sum", "flux"] == pytest.approx(0.6)
    assert seen[f"{name}_count", "flux"] == 2


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "ok"), (400, "rejected"), (429, "rejected"), (499, "cancelled"), (503, "failed")],
)
def test_an_answer_counts_by_its_status(status: int, outcome: str) -> None:
    metrics = Metrics()

    metrics.answered("flux", ENDPOINT, status, 3.0)

    seen = samples(metrics.page("flux", BUILD, None))
    assert seen["carpool_requests_total", ENDPOINT, "flux", outcome] == 1
    name = "carpool_request_duration_seconds_bucket"
    assert seen[name, ENDPOINT, "2.0", "flux", outcome] == 0
    assert seen[name, ENDPOINT, "4.0", "flux", outcome] == 1


def test_without_a_worker_the_fronts_own_counts_remain() -> None:
    metrics = Metrics()
    metrics.page("flux", BUILD, ridden())

    metrics.drew("flux", 4)

    assert samples(metrics.page("flux", BUILD, None))["carpool_images_total", "flux"] == 4
    assert "carpool_steps" not in families(metrics.page("flux", BUILD, None))


class Filming(Grey):
    """Makes videos of half a second where a job asks for one, at the seed 13 nothing."""

    async def submit(self, request: CheckedRequest, *_: Any, **options: Any) -> protocol.Done:
        if request.seed == 13:
            raise PipelineFailed("it broke")
        done = await super().submit(request)
        if "num_frames" in request.arguments:
            done.pictures, done.clip = [], protocol.RawVideo(8, 8, 12, b"")  # in place of them
        return done


async def test_jobs_count_by_their_ends_with_what_they_made() -> None:
    worker, wall = Filming(), VirtualClock()
    worker.is_open.set()

    with closing(JobStore(clock=StoreClock(wall, wall, wall))) as store:
        writers = dict.fromkeys(("image", "video"), lambda *_: None)
        runner = Runner(store, worker, writers, model=lambda: CARD.id, max_running=1)
        app = create_app(fleet_of(worker), ServeSettings(), runner)
        film = work_of(CARD.id, [CheckedRequest("a", 1, {"num_frames": 12})], fps=24.0)
        broken = work_of(CARD.id, [CheckedRequest("a", 13, {})])
        pictures = work_of(CARD.id, [CheckedRequest("a", 1, {}), CheckedRequest("b", 2, {})])
        sent = [("video", film), ("image", broken), ("image", pictures)]
        jobs = [(await runner.submit(kind, {}, work)) for kind, work in sent]
        cancelled, removed = [(await runner.submit("video", {}, film)) for _ in range(2)]
        wall.pass_by(3.0)
        await runner.cancel(cancelled.id)
        await runner.cancel(cancelled.id)
        await runner.remove(removed.id)
        running = asyncio.create_task(runner.run())
        for job in jobs:
            await runner.ended(job.id)
        running.cancel()
        await runner.stop()
        seen = samples(await page_of(app, worker))

    ends = {key[1:]: n for key, n in seen.items() if key[0] == "carpool_jobs_total"}
    assert ends == {
        ("video", "grey", "ok"): 1,
        ("image", "grey", "ok"): 1, ("image", "grey", "failed"): 1,
        ("video", "grey", "cancelled"): 2,
    }  # fmt: skip
    assert seen["carpool_images_total", "grey"] == 2
    assert seen["carpool_video_seconds_total", "grey"] == 0.5
    name = "carpool_job_duration_seconds_bucket"
    assert [seen[name, "image", bound, "grey", "ok"] for bound in ("2.0", "4.0")] == [0, 1]
    assert [seen["carpool_jobs", "grey", state] for state in ("queued", "in_progress")] == [0, 0]


async def test_jobs_that_are_too_old_count_as_expired_once() -> None:
    wall, clock = VirtualClock(), VirtualClock()
    worker = Grey(is_slow=True)
    worker.is_open.set()

    with closing(JobStore(clock=StoreClock(wall, wall, wall), ttl_s=10.0)) as store:
        runner = Runner(store, worker, {}, model=lambda: CARD.id, max_running=1, clock=clock)
        app = create_app(fleet_of(worker), ServeSettings(), runner)
        work = work_of(CARD.id, [CheckedRequest("a", 1, {})])
        running = asyncio.create_task(runner.run())
        old = [(await runner.submit("image", {}, work)) for _ in range(2)]
        await worker.until(lambda: worker.running == 1)
        before = samples(await page_of(app, worker))
        assert before["carpool_jobs", "grey", "queued"] == 1
        assert before["carpool_jobs", "grey", "in_progress"] == 1
        wall.pass_by(11.0)
        clock.pass_by(11.0)
        await runner.submit("image", {}, work)  # something happens
        for job in old:
            await runner.ended(job.id)
        await worker.until(lambda: len(worker.jobs) == 2)
        running.cancel()
        await runner.stop()
        seen = samples(await page_of(app, worker))

    assert seen["carpool_jobs_total", "image", "grey", "expired"] == 2


async def test_the_first_preview_of_a_stream_is_timed_and_no_other() -> None:
    class Showing(Grey):
        async def submit(
            self, request: CheckedRequest, *_: Any, on_preview: Any = None, **__: Any
        ) -> Any:
            for step in range(1, request.previews + 1):
                small = protocol.Picture(8, 8, bytes(3 * 8 * 8))
                on_preview(protocol.Preview(request.request_id, step, 4, small))
            return await super().submit(request)

    worker = Showing()
    app = create_app(fleet_of(worker), ServeSettings(), idle_jobs())

    async with client_of(app) as client:
        for previews in (3, 0):
            sent = {"prompt": "a", "n": 2, "stream": True, "partial_images": previews}
            await client.post(ENDPOINT, json=sent)
    seen = samples(await page_of(app, worker))

    assert seen["carpool_first_preview_seconds_count", "grey"] == 1
    assert seen["carpool_images_total", "grey"] == 4


def test_two_fronts_of_a_process_count_for_themselves() -> None:
    first, second = Metrics(), Metrics()

    first.drew("flux", 1)

    assert ("carpool_images_total", "flux") not in samples(second.page("flux", BUILD, None))


async def test_refusals_before_the_model_is_loaded_are_counted_by_route() -> None:
    app = create_app(fleet_of(Lone()), ServeSettings(), idle_jobs())

    async with client_of(app) as client:
        await client.post(ENDPOINT, json={"prompt": "a"})
        await client.post(ENDPOINT, json={})
        await client.post("/nowhere/secret", json={})
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        page = answer.content

    seen = {key: value for key, value in samples(page).items() if "requests_total" in key[0]}
    name = "carpool_requests_total"
    assert seen == {(name, ENDPOINT, "", "failed"): 1, (name, ENDPOINT, "", "rejected"): 1}
    assert b"secret" not in page


# Histograms of an engine, as `/stats` has them


@given(st.lists(st.floats(0.0, 1e4) | st.sampled_from(BUCKETS_S)))
def test_each_value_counts_once_at_the_first_bound_that_is_not_below_it(
    values: list[float],
) -> None:
    one = histogram(BUCKETS_S)

    for value in values:
        one.observe(value)

    counts = [0] * (len(BUCKETS_S) + 1)
    for value in values:
        counts[bisect_left(BUCKETS_S, value)] += 1
    total_s = reduce(add, values, 0.0)  # from Python 3.12 on, `sum` rounds otherwise
    assert statistics_of(one) == {"bounds": [*BUCKETS_S], "counts": counts, "sum": total_s}
