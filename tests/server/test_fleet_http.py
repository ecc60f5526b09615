"""A server with several workers and models, as real processes: by name, through a death."""

import base64
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.endpoints import ENDPOINT
from support.lora_files import weights, write
from support.pictures import gap, picture
from support.server_process import (
    FAMILY,
    MODEL,
    Server,
    body,
    drawn_by_diffusers,
    eventually,
    serving,
)
from support.tiny import checkpoint

OTHER = str(checkpoint("sd3"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fleet")
    file, broken = folder / "models.yaml", folder / "broken"
    shutil.copytree(OTHER, broken)
    (broken / "model_index.json").write_text("{")
    models: list[dict[str, Any]] = [
        {"model": MODEL, "name": "first", "workers": 2, "device": "cpu"},
        {"model": OTHER, "name": "second", "load": "on_demand", "keep_alive": 600},
        {"model": str(broken), "name": "broken", "load": "on_demand"},
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
    [digest] = {one["model_digest"] for one in health["workers"]}  # they loaded the same
    assert digest
    assert "Serving first, second, broken (first: " in server.stdout
    assert '"model": "first"' in server.stdout  # the command fits the model that is loaded


def test_what_a_killed_worker_ran_is_drawn_by_the_other_one(server: Server) -> None:
    """The same pictures as plain diffusers'; nobody gets an error, and nothing is drawn twice."""
    before = server.workers()
    seeds = range(8)
    with ThreadPoolExecutor(len(seeds)) as threads:
        drawing = [
            threads.submit(server.draw, seed=seed, num_inference_steps=40, model="first")
            for seed in seeds
        ]
        eventually(lambda: server.stats()["running"] >= 4, 30, "they run")
        os.kill(before[0], signal.SIGKILL)
        answers = [one.result() for one in drawing]

    assert [one.status_code for one in answers] == [200] * len(seeds)
    for seed, answer in zip(seeds, answers, strict=True):
        mine = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        plain = drawn_by_diffusers("a red circle", seed, num_inference_steps=40)
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


def test_a_model_on_demand_that_cannot_load_says_so_and_costs_nobody_else_anything(
    server: Server,
) -> None:
    answer = server.draw(model="broken")

    failure = answer.json()["error"]
    assert (answer.status_code, failure["code"]) == (503, "model_load_failed")
    assert answer.headers["x-should-retry"] == "false"
    assert failure["message"].startswith("cannot load <path>: ")
    assert server.draw(model="first", num_inference_steps=2).status_code == 200


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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_adapter_that_is_set_at_run_time_is_on_every_worker_and_on_those_that_come_later(
    tmp_path: Path,
) -> None:
    """`/v1/set_lora`, `/v1/list_loras` and `/v1/unmerge_lora_weights` over two workers."""
    flags = ["--workers", "2", "--lora-dir", str(tmp_path), "--api-key", "a-key"]
    with (
        serving(*flags) as server,
        server.client(headers={"authorization": "Bearer a-key"}) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def drawn(**more: Any) -> Image.Image:
            sent = body(seed=3, num_inference_steps=30, **more)
            answer = client.post(ENDPOINT, json=sent).raise_for_status()
            return picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))

        def served() -> dict[int, int]:
            workers = client.get("/stats").json()["workers"]
            return {one["worker"]: one["requests"] for one in workers}

        def is_whole() -> bool:
            return bool(client.get("/health").json()["status"] == "ready")

        eventually(is_whole, 60, "both are ready")
        bare = drawn()
        write(tmp_path / "ink.safetensors", weights(FAMILY, seed=5))
        asked = {"lora_nickname": "ink", "lora_path": "ink.safetensors"}
        assert client.post("/v1/set_lora", json=asked).raise_for_status().json()["status"] == "ok"
        listed = client.get("/v1/list_loras").json()
        assert listed["loaded_adapters"][0].items() >= {"nickname": "ink", "path": None}.items()
        assert listed["active"]["transformer"][0]["nickname"] == "ink"
        named = drawn(lora=[{"id": "ink"}])
        assert gap(named, bare) > 1

        gone, *_ = before = server.workers()
        os.kill(gone, signal.SIGKILL)
        eventually(lambda: gone not in server.workers(), 60, "it is gone")
        eventually(lambda: len(server.workers()) == len(before) and is_whole(), 60, "one came")
        counts = served()
        pictures = list(threads.map(lambda _: drawn(), range(8)))
        assert all(count > counts[number] for number, count in served().items())  # both drew some
        assert max(gap(one, named) for one in pictures) <= 1

        client.post("/v1/unmerge_lora_weights", json={}).raise_for_status()
        assert client.get("/v1/list_loras").json()["active"] == {}
        assert gap(drawn(), bare) <= 1


def busiest(pids: Sequence[int]) -> int:
    """The process that uses the processor most just now."""

    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = {pid: ticks(pid) for pid in pids}
    for _ in range(100):
        time.sleep(0.05)
        used = {pid: ticks(pid) - before[pid] for pid in pids}
        if max(used.values()) >= 5:
            break
    return max(used, key=lambda pid: used[pid])


def test_previews_and_progress_of_a_request_go_on_after_a_death_and_nothing_is_told_twice(
    server: Server,
) -> None:
    asked = body(model="first", num_inference_steps=200, partial_images=3)
    events, is_killed = list[tuple[str, Any]](), False
    with server.client() as client, client.stream("GET", "/v1/events") as stream:
        lines = stream.iter_lines()
        assert "status" in next(lines)
        job = client.post(ENDPOINT, json=asked | {"background_job": True}).json()["id"]
        kind = ""
        for line in lines:
            name, _, text = line.partition(": ")
            if name == "event":
                kind = text
            if name != "data" or kind not in ("job", "preview"):
                continue
            told = json.loads(text)
            if told["id"] == job:
                events.append((kind, told))
            if kind == "preview" and not is_killed:
                is_killed = True
                os.kill(busiest(server.workers()), signal.SIGKILL)
            if told.get("status") == "completed":
                break
        again = server.stats()["steps_again"]
        url = client.get(f"/v1/jobs/{job}").json()["files"][0]["url"]
        file = client.get(url).content
    assert is_killed
    previews = [told["step"] for kind, told in events if kind == "preview"]
    steps = [told["step"] for kind, told in events if kind == "job" and "step" in told]
    assert len(previews) == 3
    assert previews == sorted(set(previews))
    assert steps == sorted(steps)
    assert steps[-1] >= previews[-1]
    assert again <= 40  # not from its start: the step under way, and those of 50 ms
    plain = drawn_by_diffusers("a red circle", 1, num_inference_steps=200)
    assert gap(picture(file), plain) <= 1
