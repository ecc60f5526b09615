"""What Prometheus reads: names, labels and buckets, from counts that a test makes itself."""

import asyncio
from functools import cache
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.config import EngineSettings, ServeSettings
from carpool.metrics import ALL, Metrics
from carpool.server.app import create_app
from carpool.supervise import Supervisor
from support import VirtualClock, driving

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

    page = metrics.page("flux", BUILD, ridden())

    assert families(page) == {
        name.removesuffix("_total"): about.type for name, about in ALL.items()
    }
    for family in text_string_to_metric_families(page.decode()):
        for one in family.samples:
            name = one.name if one.name in ALL else family.name
            if not name.endswith("_created"):
                assert one.labels.keys() - {"le"} == set(ALL[name].labels)


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


def test_two_fronts_of_a_process_count_for_themselves() -> None:
    first, second = Metrics(), Metrics()

    first.drew("flux", 1)

    assert ("carpool_images_total", "flux") not in samples(second.page("flux", BUILD, None))


def test_refusals_before_the_model_is_loaded_are_counted_by_route() -> None:
    app = create_app(Supervisor("none", EngineSettings()), ServeSettings())

    async def talk() -> bytes:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post(ENDPOINT, json={"prompt": "a"})
            await client.post(ENDPOINT, json={})
            await client.post("/nowhere/secret", json={})
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            return answer.content

    page = asyncio.run(talk())

    seen = {key: value for key, value in samples(page).items() if "requests_total" in key[0]}
    name = "carpool_requests_total"
    assert seen == {(name, ENDPOINT, "", "failed"): 1, (name, ENDPOINT, "", "rejected"): 1}
    assert b"secret" not in page
