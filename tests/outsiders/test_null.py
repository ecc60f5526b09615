"""A field that is null is a field that is absent: for every field of every door."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import pytest

from carpool.request.card import OWN_KEYS, Card, Parameter, Task
from carpool.request.images import NAMES as PICTURES
from carpool.server.bodies import schema
from carpool.server.compat.peers import fields as peers
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, AppClient, Grey, ask, open_app, refusal, shared_app
from support.artifacts_app import BELL, MESHES, OF_PICTURES, OF_WORDS, SOUND, Making
from support.endpoints import EDITS, ENDPOINT, VARIATIONS, VIDEOS
from support.pictures import png
from support.video_app import Filming, url_of

SIDE = 32  # of the server's default, and of the largest picture; the pipeline's own draws 1024
OWN = (
    *(one for one in CARD.parameters if one.name not in ("width", "height", "num_frames")),
    Parameter("width", "int"),
    Parameter("height", "int"),
    Parameter("ip_adapter_image", "other"),
    Parameter("control_image", "other"),
    Parameter("last_image", "other"),
    Parameter("extra", "dict"),
    Parameter("layers", "list"),
    Parameter("use_binning", "bool", default=True),
    Parameter("instruction", "list", default_is_none=False),
)
DEFAULTS = {
    "width": SIDE, "height": SIDE, "num_inference_steps": 2, "guidance_scale": 2.0,
    "negative_prompt": "blurry", "sigmas": [1.0, 0.5], "extra": {"a": 1}, "use_binning": False,
}  # fmt: skip
LIMITS: dict[str, Any] = {
    "size_multiple_px": 16, "default_size_px": (1024, 1024), "max_pixels": SIDE * SIDE,
}  # fmt: skip
IMAGE = Parameter("image", "other")
PICTURE_CARD = replace(
    CARD,
    tasks=(
        Task("text-to-image", "GreyPipeline", OWN),
        Task("image-to-image", "GreyImg2Img", (*OWN, IMAGE)),
        Task("inpaint", "GreyInpaint", (*OWN, IMAGE, Parameter("mask_image", "other"))),
    ),
    defaults=DEFAULTS,
    **LIMITS,
)
VIDEO_OWN = (*OWN, Parameter("num_frames", "int", default=81), Parameter("frame_rate", "float"))
VIDEO_CARD = replace(
    CARD,
    tasks=(
        Task("text-to-video", "GreyVideo", VIDEO_OWN),
        Task("image-to-video", "GreyImageToVideo", (*VIDEO_OWN, IMAGE)),
    ),
    defaults=DEFAULTS | {"num_frames": 5, "frame_rate": 8.0},
    **LIMITS,
)
PNG = png()
DATA = url_of(PNG)
TEXTS = {"prompt", "negative_prompt"}  # in a form, the text null may be what is to be drawn


class Answering(Filming):
    """Draws pictures or videos, and answers what routes ask beside."""

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        if self.ready is not None and self.ready.card.tasks[0].makes == "videos":
            return await super().submit(request)
        return await Grey.submit(self, request)

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        self.jobs.append(request)
        return protocol.Estimated(1.0, 0.0, 1.0)

    async def statistics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 1e6}}


@dataclass(frozen=True)
class Door:
    """An endpoint and the smallest body that it takes."""

    path: str
    body: Mapping[str, Any]
    inner: str = ""  # the object in the body that holds the fields
    files: Mapping[str, Any] = field(default_factory=dict)  # of a form
    is_form: bool = False
    makes_videos: bool = False
    task: Task | None = None  # of meshes or sound

    def worker(self) -> Grey:
        if self.task is not None:
            return Making(self.task)
        return Answering(self.card)

    @property
    def card(self) -> Card:
        if self.task is not None:
            return replace(CARD, tasks=(self.task,), lora=())
        return VIDEO_CARD if self.makes_videos else PICTURE_CARD

    @property
    def name(self) -> str:
        kind = " form" if self.is_form else ""
        return self.path.strip("/") + kind + (f" {self.inner}" if self.inner else "")

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.body.get(self.inner, {}) if self.inner else self.body

    def having(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.body, self.inner: dict(fields)} if self.inner else dict(fields)


CONTENT = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": DATA}}]
USER = {"role": "user", "content": "a"}
EDIT = {"prompt": "a", "images": [{"image_url": DATA}]}
DOORS = [
    Door(ENDPOINT, {"prompt": "a"}),
    Door(ENDPOINT, {"prompt": "a", "background_job": True}),
    *(Door(ENDPOINT, {"prompt": "a"}, inner=one) for one in peers.NESTED),
    Door(EDITS, EDIT),
    Door(EDITS, {"prompt": "a"}, files={"image": PNG}, is_form=True),
    Door(VARIATIONS, {"images": [{"image_url": DATA}]}),
    Door(VARIATIONS, {}, files={"image": PNG}, is_form=True),
    Door("/v1/estimates", {"prompt": "a"}),
    Door("/v1/chat/completions", {"messages": [USER]}),
    Door("/v1/chat/completions", {"messages": [{"role": "user", "content": CONTENT}]}),
    Door("/v1/chat/completions", {"messages": [USER]}, inner="extra_body"),
    Door("/v1/chat/completions", {"messages": [USER]}, inner="image_config"),
    Door("/", {"inputs": "a"}),
    Door("/", {"inputs": "a"}, inner="parameters"),
    Door("/", {"inputs": DATA}, inner="parameters"),
    Door("/sdapi/v1/txt2img", {"prompt": "a"}),
    Door("/sdapi/v1/txt2img", {"prompt": "a"}, inner="override_settings"),
    Door("/sdapi/v1/img2img", {"prompt": "a", "init_images": [DATA]}),
    Door(VIDEOS, {"prompt": "a"}, makes_videos=True),
    Door(VIDEOS, {"prompt": "a"}, makes_videos=True, is_form=True),
    Door(VIDEOS, {"prompt": "a", "input_reference": {"image_url": DATA}}, makes_videos=True),
    Door("/v1/videos/sync", {"prompt": "a"}, makes_videos=True),
    Door("/v1/estimates", {"prompt": "a"}, makes_videos=True),
    Door(MESHES, {"prompt": "a"}, task=OF_WORDS),
    Door(MESHES, {"input_reference": {"image_url": DATA}}, task=OF_PICTURES),
    Door(MESHES, {}, files={"input_reference": PNG}, is_form=True, task=OF_PICTURES),
    Door(SOUND, {"prompt": "a"}, task=BELL),
    Door(SOUND, {"prompt": "a", "background_job": True}, task=BELL),
    Door("/v1/set_lora", {"lora_nickname": "outlined"}),
    Door("/v1/unmerge_lora_weights", {}),
    Door("/sdapi/v1/options", {}),
]
GROUPS = 8
NOT_HERE = {"/v1/videos/{video_id}/remix"}  # takes a prompt and nothing else


def documented(path: str, *, is_form: bool = False) -> set[str]:
    """The names of a body's fields, by the OpenAPI document."""
    document = shared_app().openapi()
    contents = document["paths"][path]["post"]["requestBody"]["content"]
    content = contents["multipart/form-data" if is_form else "application/json"]["schema"]
    if reference := content.get("$ref"):
        content = document["components"]["schemas"][reference.rpartition("/")[2]]
    return set(content.get("properties", {}))


def names_of(door: Door) -> list[str]:
    """The fields that a door takes, documented or not: whatever anybody may send as null."""
    names = {
        *door.card.names(), *OWN_KEYS, *PICTURES, *schema.NULL_FIELDS, *peers.NESTED, "mask", "url",
    }  # fmt: skip
    names |= {*peers.NEUTRAL, *peers.SWITCHES, "num_outputs_per_prompt", "generator_device"}
    names |= {"generator", "return_dict", "num_images_per_prompt", "target_size"}
    if not door.inner:
        names |= documented(door.path, is_form=door.is_form)
    return sorted(names - (TEXTS if door.is_form else set()))


Post = Callable[[Door, Mapping[str, Any]], Awaitable[httpx2.Response]]


def poster(opened: AppClient) -> Post:
    async def post(door: Door, fields: Mapping[str, Any]) -> httpx2.Response:
        body = door.having(fields)
        if not door.is_form:
            content = json.dumps(body)
            return await opened.http.post(
                door.path, content=content, headers={"content-type": "application/json"}
            )
        texts = {name: (None, text_of(value)) for name, value in body.items()}
        files = {name: ("a.png", content) for name, content in door.files.items()}
        return await opened.http.post(door.path, files={**texts, **files})

    return post


def text_of(value: Any) -> str:
    """A value as JavaScript writes it into a form."""
    return value if isinstance(value, str) else json.dumps(value)


def as_run(jobs: list[CheckedRequest]) -> list[Any]:
    """Requests as a worker got them, without what is drawn anew for each."""
    return [
        (dict(one.arguments) | {"image": None}, replace(one, arguments={}, request_id="", seed=0))
        for one in jobs
    ]


async def outcome(
    opened: AppClient, worker: Grey, door: Door, fields: Mapping[str, Any]
) -> tuple[Any, ...]:
    """An answer's status, the error in it, and the requests that it made."""
    worker.jobs.clear()
    answer = await poster(opened)(door, fields)
    told = answer.json() if "json" in answer.headers["content-type"] else {}
    if answer.status_code == 202 or (door.path in (VIDEOS, MESHES) and answer.status_code == 200):
        await opened.runner.ended(told["id"])
    error = told.get("error") or {}
    return answer.status_code, error.get("code"), error.get("param"), as_run(worker.jobs)


async def differences(door: Door) -> tuple[list[str], int]:
    """The fields whose null is not their absence, and the requests that were drawn.

    Fields that the body lacks are null in groups; those of a group that differs, one by one.
    """
    worker, names = door.worker(), names_of(door)
    lacking = [name for name in names if name not in door.fields]
    groups = [[name] for name in names if name in door.fields]
    groups += [lacking, *(lacking[first::GROUPS] for first in range(GROUPS))]
    wrong, drawn = list[str](), 0
    async with open_app(worker) as opened:
        while groups:
            group = groups.pop()
            without = {key: value for key, value in door.fields.items() if key not in group}
            absent = await outcome(opened, worker, door, without)
            drawn += len(absent[3])
            nulls = without | dict.fromkeys(group)
            if await outcome(opened, worker, door, nulls) != absent:
                groups += [[name] for name in group] if len(group) > 1 else []
                wrong.append(" ".join(group))
    return wrong, drawn


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_null_is_absence_for_every_field_of_every_door(door: Door) -> None:
    wrong, drawn = asyncio.run(differences(door))

    assert wrong == []
    assert drawn or door.path in ("/v1/set_lora", "/v1/unmerge_lora_weights", "/sdapi/v1/options")


def test_every_body_of_the_document_is_among_the_doors() -> None:
    bodies = {
        path
        for path, methods in shared_app().openapi()["paths"].items()
        if "requestBody" in methods.get("post", {})
    }

    assert bodies - NOT_HERE == {door.path for door in DOORS}


@pytest.mark.parametrize(
    "door",
    [
        one
        for one in DOORS
        if one.path in (ENDPOINT, EDITS, VIDEOS, MESHES, SOUND) and not one.inner
    ],
    ids=lambda door: door.name,
)
async def test_an_object_whose_members_are_null_is_empty(door: Door) -> None:
    worker = door.worker()
    async with open_app(worker) as opened:
        absent = await outcome(opened, worker, door, door.body)
        for name in peers.NESTED:
            nulls = {**door.body, name: {"width": None, "unheard_of": None, "extra": None}}
            assert await outcome(opened, worker, door, nulls) == absent, name
    assert absent[3]


async def test_in_a_form_a_prompt_may_be_the_word_null() -> None:
    worker = Answering(PICTURE_CARD)
    door = Door(EDITS, {}, files={"image": PNG}, is_form=True)
    async with open_app(worker) as opened:
        await poster(opened)(door, {"prompt": "null", "negative_prompt": "null", "seed": None})
    assert [worker.jobs[0].arguments[name] for name in ("prompt", "negative_prompt")] == [
        "null",
        "null",
    ]


@pytest.mark.parametrize("spelling", ['"width":null,"width":16', '"width":16,"width":null'])
def test_null_twice_is_still_said_twice(spelling: str) -> None:
    refused = refusal(ask('{"prompt":"a",' + spelling + "}"))

    assert "twice" in refused["message"]
