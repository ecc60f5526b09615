"""Every route of the OpenAPI document, on one worker, and on two models of two workers each.

With API keys and a folder of adapters, as most servers have them.
"""

import asyncio
import base64
import contextlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import carpool.models
from carpool.config import EngineSettings, ServeSettings
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.pool import Pool
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.request.card import Task
from carpool.server.app import create_app
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import Grey, open_app
from support.artifacts_app import BELL, MESHES, OF_PICTURES, OF_WORDS, SOUND, Making
from support.endpoints import EDITS, ENDPOINT, VARIATIONS, VIDEOS
from support.fake_workers import FakeWorker
from support.pictures import saved
from support.server_process import Server, eventually, serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long

KEY = {"authorization": "Bearer alice-secret"}
PICTURE = saved(Image.new("RGB", (64, 64), "red"), "PNG")
BASE64 = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{BASE64}"
CHAT, SYNC = "/v1/chat/completions", "/v1/videos/sync"
SHAPES, FILMS = "shapes", "shapes-video"
ADAPTER = Path(str(carpool.models.__file__)).parent / "shapes_lora" / "outlined.safetensors"
SETUPS: Mapping[str, tuple[Sequence[str], str]] = {  # flags, and the model
    "one worker": ((), SHAPES),
    "two models": ((f"pictures={SHAPES}", f"films={FILMS}", "--workers", "2"), ""),
}

DRAW: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 1}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "num_inference_steps": 1}
BODIES: dict[str, list[dict[str, Any]]] = {
    ENDPOINT: [
        DRAW, DRAW | {"return_stage_metrics": True}, DRAW | {"stream": True, "partial_images": 1},
        DRAW | {"response_format": "url"}, DRAW | {"background_job": True},
        DRAW | {"lora": [{"id": "none"}]},
    ],
    EDITS: [DRAW | {"images": [{"image_url": URL}]}],
    VARIATIONS: [{"images": [{"image_url": URL}], "num_inference_steps": 1}],
    CHAT: [
        TALK,
        TALK | {"modalities": ["image", "text"]},
        TALK | {"return_stage_metrics": True},
        TALK | {"stream": True, "stream_options": {"include_usage": True}},
    ],
    VIDEOS: [DRAW | {"num_frames": 5}],
    SYNC: [DRAW | {"num_frames": 5}],
    "/v1/estimates": [DRAW],
    "/v1/set_lora": [
        {"lora_nickname": "outlined"},
        {"lora_nickname": "ink", "lora_path": "ink.safetensors"},
        {"lora_nickname": "none", "lora_path": "none.safetensors"},
    ],
    "/v1/unmerge_lora_weights": [{}],
    "/": [{"inputs": "a", "parameters": {"num_inference_steps": 1}}],
    "/sdapi/v1/txt2img": [{"prompt": "a", "steps": 1}],
    "/sdapi/v1/img2img": [{"prompt": "a", "steps": 1, "init_images": [BASE64]}],
    "/v1/videos/{video_id}/remix": [{"prompt": "b"}],
    MESHES: [{"input_reference": {"image_url": URL}}, {"prompt": "a"}],
    SOUND: [DRAW, DRAW | {"background_job": True}],
}  # fmt: skip
"""Of POSTs; each is sent without `model` and for each model."""
ABOUT_NO_MODEL = {"/v1/jobs/{job_id}/cancel"} | {
    f"/sdapi/v1/{name}" for name in ("interrupt", "skip", "refresh-loras", "refresh-checkpoints")
}


@dataclass(slots=True)
class Caller:
    """Calls routes, and keeps their answers."""

    http: httpx2.Client
    models: Sequence[str]
    document: Mapping[str, Any]
    answers: dict[str, list[httpx2.Response]] = field(
        default_factory=lambda: defaultdict[str, list[httpx2.Response]](list)
    )

    def call(self, method: str, route: str, path: str = "", **options: Any) -> httpx2.Response:
        answer = self.http.request(method, path or route, **options)
        self.answers[f"{method} {route}"].append(answer)
        return answer

    def post_all(self, route: str, path: str = "") -> list[httpx2.Response]:
        """Send every body of a route, of no model and of each."""
        named = [{}, *({"model": model} for model in self.models)]
        bodies = BODIES.get(route, [{}])
        return [
            self.call("POST", route, path, json=body | model) for body in bodies for model in named
        ]

    def call_all(self) -> None:
        """Call every operation of the document, on jobs and videos that have ended."""
        job, video, link = self._make()
        known = {
            "job_id": job, "request_id": job, "video_id": video, "mesh_id": job,
            "model": self.models[-1], "file_id": link, "name": "0.png",
        }  # fmt: skip
        operations = [
            (method.upper(), route)
            for route, methods in self.document["paths"].items()
            for method in methods
        ]
        for method, route in sorted(operations, key=lambda one: one[0] == "DELETE"):
            path = route
            for name, value in known.items():
                path = path.replace(f"{{{name}}}", value)
            if method == "POST":
                self.post_all(route, path)
                continue
            for query in ({}, *({"model": model} for model in self.models)):
                if route == "/v1/events":
                    query["seconds"] = "0.2"
                params = None if route.startswith("/v1/files/") else query
                self.call(method, route, path, params=params)

    def _make(self) -> tuple[str, str, str]:
        """Ids of a job and of a video that have ended, and the rest of a link to a picture."""
        ids, links = [""], [""]
        for answer in self.post_all(ENDPOINT):
            if answer.headers["content-type"] == "application/json" and answer.is_success:
                told = answer.json()
                ids += [told["id"]] if "id" in told else []
                links += [one["url"] for one in told.get("data", []) if one.get("url")]
        videos = ["", *(one.json()["id"] for one in self.post_all(VIDEOS) if one.is_success)]
        for job_id in filter(None, (ids[-1], videos[-1])):
            eventually(partial(self._has_ended, job_id), 60, "the job ends")
        return ids[-1] or "job", videos[-1] or "video", links[-1].rpartition("/")[2] or "file"

    def _has_ended(self, job_id: str) -> bool:
        job = self.http.get(f"/v1/jobs/{job_id}").json()
        assert job["status"] != "failed", job
        return bool(job["status"] == "completed")


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(setup: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, (flags, model) = tmp_path_factory.mktemp("adapters"), SETUPS[setup]
    shutil.copy(ADAPTER, folder / "ink.safetensors")
    keys = "--api-key", "alice=alice-secret", "--api-key", "bob=bob-secret"
    with serving(*flags, *keys, "--lora-dir", str(folder), model=model) as server:
        with server.client(headers=KEY) as http:
            eventually(lambda: _is_whole(http), 60, "all are ready")
        yield server


def _is_whole(http: httpx2.Client) -> bool:
    """Whether every worker is ready."""
    health: dict[str, Any] = http.get("/health").json()
    return health["status"] == "ready" and all(
        one["state"] == "ready" for one in health.get("workers", [])
    )


def test_no_route_fails(server: Server, setup: str) -> None:
    with server.client(headers=KEY) as http:
        models = [one["id"] for one in http.get("/v1/models").json()["data"]]
        caller = Caller(http, models, http.get("/openapi.json").json())
        caller.call_all()

    failed = {
        operation: answer.text[:200]
        for operation, answers in caller.answers.items()
        for answer in answers
        if answer.status_code >= 500
    }
    assert failed == {}
    assert len(caller.answers) > 50
    if setup == "two models":  # of pictures and of videos: every route is some model's
        missed = {
            operation: json.dumps(answers[-1].text[:200])
            for operation, answers in caller.answers.items()
            if not any(answer.is_success for answer in answers)
            and operation != "GET /v1/files/{job_id}/{name}"  # its links: test_artifacts_http.py
            and not operation.split()[1].startswith((MESHES, SOUND))  # of the makers below
        }
        assert missed == {}


def test_metrics_name_the_model_that_a_request_is_about(server: Server, setup: str) -> None:
    stream = DRAW | {"num_inference_steps": 3, "stream": True, "partial_images": 1}
    with server.client(headers=KEY) as http:
        models = [one["id"] for one in http.get("/v1/models").json()["data"]]
        for model in (*models, "none"):
            http.post(CHAT, json=TALK | {"model": model})
            http.post(ENDPOINT, json=stream | {"model": model})

        def has_preview() -> bool:  # there is none while jobs of the tests before overload it
            return "partial_image" in http.post(ENDPOINT, json=stream | {"model": models[0]}).text

        eventually(has_preview, 60.0, "a stream with a preview")
        page = http.get("/metrics").text

    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    of_front = [
        (one.name, one.labels)
        for one in samples
        if "model" in one.labels and not one.name.startswith("carpool_jobs")  # of all together
    ]
    unnamed = [(name, labels) for name, labels in of_front if labels["model"] not in models]
    assert bool(unnamed) == (setup == "two models")
    assert {name for name, labels in unnamed if "outcome" not in labels} == set()
    assert {
        labels["endpoint"] for _, labels in unnamed if labels["outcome"] == "ok"
    } <= ABOUT_NO_MODEL
    named = {name for name, labels in of_front if labels["model"] == models[0]}
    assert named >= {
        "carpool_requests_total", "carpool_images_total", "carpool_first_preview_seconds_count",
    }  # fmt: skip


PARAMS = {"/v1/events": {"seconds": 0}}  # else it would not end
OF_WORKERS = {
    "/metrics",
    "/stats",
    "/v1/requests/{request_id}",
}  # those without a process have none


@pytest.mark.parametrize("task", [OF_PICTURES, OF_WORDS, BELL], ids=lambda task: task.name)
async def test_no_route_fails_where_meshes_or_sound_are_made(task: Task) -> None:
    answers = defaultdict[str, list[httpx2.Response]](list)

    async with open_app(Making(task)) as opened:
        document = (await opened.http.get("/openapi.json")).json()
        job = "job"
        for body in BODIES[MESHES] + BODIES[SOUND]:
            route = SOUND if task is BELL else MESHES
            content = (await opened.http.post(route, json=body)).content
            job = json.loads(content).get("id", job) if content.startswith(b"{") else job
        await opened.ended(job)
        operations = [
            (method, route)
            for route, methods in document["paths"].items()
            for method in methods
            if route not in OF_WORKERS
        ]
        for method, route in sorted(
            operations, key=lambda one: (one[0] == "delete", "jobs" in one[1])
        ):
            path = route.replace("{model}", "grey").replace("{name}", "sound.wav")
            path = re.sub(r"\{\w+\}", job, path)
            for body in BODIES.get(route, [{}]):
                sent = {"json": body} if method == "post" else {"params": PARAMS.get(route)}
                answer = await opened.http.request(method, path, **sent)
                answers[f"{method} {route}"].append(answer)

    failed = {
        operation: answer.text[:200]
        for operation, answered in answers.items()
        for answer in answered
        if answer.status_code >= 500
    }
    assert failed == {}
    own = [
        name for name in answers if name.split()[1].startswith(SOUND if task is BELL else MESHES)
    ]
    assert [name for name in own if not any(one.is_success for one in answers[name])] == []
    assert own


class Prompt(FakeWorker):
    """Loads and draws at once."""

    def start(self) -> "asyncio.Task[None]":
        self.load()
        return super().start()

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        return await Grey().submit(request)


def test_no_route_fails_before_a_model_was_ever_loaded() -> None:
    """Models on demand: what wants a model loads it, and the rest answers without."""
    models = [Deployment(name, lambda: Pool(Prompt, ["cpu"], EngineSettings()), is_on_demand=True)
              for name in ("first", "second")]  # fmt: skip
    with contextlib.closing(JobStore(None)) as store:
        fleet = Fleet(models)
        names = [one.name for one in models]
        runner = Runner(store, fleet, {}, model=lambda: names, max_running=1)
        app = create_app(fleet, ServeSettings(port=0, api_key=("alice=alice-secret",)), runner)

        async def scene() -> dict[str, int]:
            transport, failed = httpx2.ASGITransport(app), dict[str, int]()
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost", headers=KEY
            ) as http:
                for route, methods in app.openapi()["paths"].items():
                    for method in methods:
                        for name in (None, "second"):
                            for one in models:  # as if the server had just started
                                one.pool = one.last_ready = None
                            body = BODIES.get(route, [{}])[0] | ({"model": name} if name else {})
                            sent = (
                                {"json": body}
                                if method == "post"
                                else {"params": PARAMS.get(route)}
                            )
                            answer = await http.request(method, route, **sent)
                            if answer.status_code >= 500:
                                failed[f"{method} {route} {name}"] = answer.status_code
            await fleet.stop()
            return failed

        assert asyncio.run(scene()) == {}
