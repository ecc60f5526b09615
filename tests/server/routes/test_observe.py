"""What a server tells of itself over HTTP: the lives of requests, and metrics."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.config import ServeSettings
from carpool.server.observer import Observer
from carpool.types import CheckedRequest
from support.app import Grey, fleet_of, idle_jobs, open_app
from support.endpoints import ENDPOINT
from support.server_process import Server, body, eventually, serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that asks for keys."""
    with serving("--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        yield server


def client(server: Server, key: str = KEYS[0]) -> httpx2.Client:
    return server.client(headers={"authorization": f"Bearer {key}"})


def draw(server: Server, **others: Any) -> str:
    """Draw pictures; gives the id of the request."""
    with client(server) as http:
        answer = http.post(ENDPOINT, json=body(**others))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def ask(server: Server, path: str, key: str = KEYS[0]) -> httpx2.Response:
    with client(server, key) as http:
        return http.get(path)


def value(server: Server, name: str, **labels: str) -> float | None:
    families = text_string_to_metric_families(ask(server, "/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    found = [one.value for one in samples if labels.items() <= one.labels.items()]
    return sum(found) if found else None


def test_the_life_of_a_request_is_told_by_the_id_of_its_answer(server: Server) -> None:
    request_id = draw(server, n=2)

    told = ask(server, f"/v1/requests/{request_id}").json()

    assert told["id"] == request_id
    assert [one["status"] for one in told["outputs"]] == ["ok", "ok"]
    for one in told["outputs"]:
        assert [chapter["phase"] for chapter in one["phases"]] == ["encode", "denoise", "decode"]
        assert one["phases"][1]["forwards"] == one["steps"] == one["step"] == 3
        assert 0 <= one["queued_s"] <= one["phases"][0]["start_s"] < one["total_s"]


def finish(server: Server, **others: Any) -> str:
    """Have pictures drawn in the background; gives the id of the job."""
    with client(server) as http:
        job_id: str = http.post(ENDPOINT, json=body(background_job=True, **others)).json()["id"]
    url = f"/v1/jobs/{job_id}"
    eventually(lambda: ask(server, url).json()["status"] == "completed", 30, "it is drawn")
    return job_id


def test_the_life_of_a_job_is_that_of_its_parts_and_its_owners_only(server: Server) -> None:
    images = value(server, "carpool_images_total") or 0
    job_id = finish(server, n=2)

    told = ask(server, f"/v1/requests/{job_id}").json()

    assert told["id"] == job_id
    assert [one["status"] for one in told["outputs"]] == ["ok", "ok"]
    assert [len(one["phases"]) for one in told["outputs"]] == [3, 3]
    assert value(server, "carpool_images_total") == images + 2
    assert value(server, "carpool_jobs_total", kind="image", outcome="ok") == 1
    foreign = ask(server, f"/v1/requests/{job_id}", KEYS[1])
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "not_found")


async def test_a_job_that_waits_has_a_life_without_outputs_and_one_that_never_ran_none() -> None:
    async with open_app(Grey(), runs=False) as opened:
        sent = {"prompt": "a", "background_job": True}
        job = (await opened.http.post(ENDPOINT, json=sent)).json()
        waiting = await opened.http.get(f"/v1/requests/{job['id']}")
        await opened.runner.cancel(job["id"])
        cancelled = await opened.http.get(f"/v1/requests/{job['id']}")

    assert waiting.json() == {"id": job["id"], "outputs": []}
    assert cancelled.status_code == 404


def test_others_are_named_to_their_own_key_and_only_counted_to_another() -> None:
    def phases(*others: str) -> dict[str, Any]:
        phase: dict[str, Any] = {
            "phase": "denoise", "start_s": 0, "duration_s": 1, "forwards": 1, "forward_s": 1,
        }  # fmt: skip
        phase |= {"waited_s": 0, "waited_for_s": {}, "others_mean": 1, "others_most": 3}
        one: dict[str, Any] = {
            "id": "a", "status": "ok", "error": None, "step": 1, "steps": 1, "queued_s": 0,
        }  # fmt: skip
        one |= {"total_s": 1, "submitted_at": 1.8e9, "started_at": 1.8e9, "ended_at": 1.8e9}
        return {**one, "phases": [{**phase, "others": list(others)}]}

    class Together(Grey):
        async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
            return [phases("b", "c", "d", "e")]

    observer = Observer(fleet_of(Together()), ServeSettings(), idle_jobs())
    asked = [("mine", "key", "a", "b"), ("other", "key", "c"), ("theirs", "stranger", "d")]
    for request_id, owner, *ids in asked:
        observer._note(("request", owner, request_id), [CheckedRequest(one, 1, {}) for one in ids])

    told = asyncio.run(observer.report("key", "mine"))

    assert told.outputs[0].phases[0].others == ["mine", "other", "another"]
    assert told.outputs[0].ended_at == 1.8e9
