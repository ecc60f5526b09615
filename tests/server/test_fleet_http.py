"""A server with several workers and models, as real processes: by name, through a death."""

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.endpoints import ENDPOINT
from support.pictures import gap, picture
from support.server_process import MODEL, Server, body, drawn_by_diffusers, eventually, serving
from support.tiny import checkpoint

OTHER = str(checkpoint("sd3"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("fleet") / "models.yaml"
    models: list[dict[str, Any]] = [
        {"model": MODEL, "name": "first", "workers": 2, "device": "cpu"},
        {"model": OTHER, "name": "second", "load": "on_demand", "keep_alive": 600},
    ]
    file.write_text(json.dumps({"models": models}))
    with serving("--config", str(file), model="") as one:
        eventually(lambda: one.get("/health").json()["status"] == "ready", 60, "both are ready")
        yield one


def test_the_models_are_listed_with_their_states_and_one_on_demand_is_not_loaded(
    server: Server,
) -> None:
    listed = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    health = server.get("/health").json()

    assert listed["first"]["state"] == "ready"
    assert listed["first"]["tasks"][0] == "text-to-image"
    assert (listed["second"]["state"], listed["second"]["tasks"]) == ("unloaded", [])
    assert listed["second"]["ready_in_s"] > 0
    assert [(one["model"], one["worker"]) for one in health["workers"]] == [
        ("first", 0),
        ("first", 1),
    ]


def test_what_a_killed_worker_ran_is_drawn_by_the_other_one(server: Server) -> None:
    """The same pictures as plain diffusers'; nobody gets an error, and nothing is drawn twice."""
    before = server.workers()
    seeds = range(8)
    with ThreadPoolExecutor(len(seeds)) as threads:
        drawing = [
            threads.submit(server.draw, seed=seed, num_inference_steps=60, model="first")
            for seed in seeds
        ]
        eventually(lambda: server.stats()["running"] >= 4, 30, "they run")
        os.kill(before[0], signal.SIGKILL)
        answers = [one.result() for one in drawing]

    assert [one.status_code for one in answers] == [200] * len(seeds)
    for seed, answer in zip(seeds, answers, strict=True):
        mine = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        plain = drawn_by_diffusers("a red circle", seed, num_inference_steps=60)
        assert gap(mine, plain) <= 1
    eventually(lambda: server.get("/health").json()["status"] == "ready", 60, "both are again")
    assert before[1] in server.workers()
    assert "carpool_worker_up" in server.get("/metrics").text


def test_a_model_on_demand_is_loaded_for_the_request_that_names_it(server: Server) -> None:
    answer = server.draw(model="second", max_sequence_length=8, num_inference_steps=2)

    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "second"
    listed = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert listed["second"]["state"] == "ready"
    wrong = server.draw(model="third")
    assert wrong.status_code == 404
    assert "'first', 'second'" in wrong.json()["error"]["message"]


def test_jobs_and_streams_and_adapters_are_those_of_the_model_that_is_named(server: Server) -> None:
    with server.client() as client:
        job = client.post(ENDPOINT, json=body(model="first", background_job=True)).json()
        events = client.post(ENDPOINT, json=body(model="first", stream=True, partial_images=1))
        eventually(
            lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "completed",
            60,
            "it ends",
        )
        timeline = client.get(f"/v1/requests/{job['id']}").json()

    assert job["model"] == "first"
    assert "image_generation.completed" in events.text
    assert timeline["outputs"][0]["status"] == "ok"
