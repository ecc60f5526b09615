"""Pictures over HTTP: from a body to jobs, and from what they draw to an answer."""

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from carpool import media
from carpool.errors import (
    InvalidValue,
    ModelNotFound,
    SizeRejected,
    UnknownParameter,
    UnsupportedParameter,
    nearest,
    show,
)
from carpool.media.metadata import told
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import size_of
from carpool.request.parameters import Card, check, check_n, seeds
from carpool.server.bodies import schema
from carpool.server.bodies.schema_jobs import VideoRequest
from carpool.types import CheckedRequest, Request
from carpool.worker import protocol
from carpool.worker.supervisor import Supervisor

QUALITIES = {"auto": 1.0, "low": 0.5, "medium": 1.0, "high": 1.5, "xhigh": 2.0, "max": 3.0}
QUALITIES |= {"standard": 1.0, "hd": 1.5}  # OpenAI's older words
FEW_STEPS = 8  # models that take no more by default are distilled ones

EDITS = ("image", "images", "mask", "mask_image")
"""What says in `POST /v1/images/edits` what to draw anew."""

_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Served:
    """What the front knows of the model behind it."""

    id: str
    card: Card
    max_n: int
    metadata: bool = True  # do files say what made them?
    metadata_prompt: bool = False  # the prompts too?

    def told(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """As much of the settings as files may say; None for nothing at all."""
        return told(settings, metadata=self.metadata, metadata_prompt=self.metadata_prompt)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A checked HTTP request: a job a picture, and what is to be made of the pictures."""

    served: Served
    body: schema.ImageRequest
    jobs: Sequence[CheckedRequest]
    kind: Literal["image_generation", "image_edit"] = "image_generation"

    @property
    def has_pictures(self) -> bool:
        """Does it begin with some?"""
        return not self.jobs[0].arguments.keys().isdisjoint(PICTURES)

    @property
    def format(self) -> media.Format:
        return self.body.output_format or "png"

    @property
    def quality(self) -> str:
        return self.body.quality or "auto"

    @property
    def user(self) -> str | None:
        return self.body.safety_identifier or self.body.user

    def encoded(self, number: int, picture: protocol.Picture, *, is_final: bool = True) -> bytes:
        """A picture as a file. Takes its time: not on the event loop."""
        job = self.jobs[number]
        settings = {"model": self.served.id, "seed": job.seed, **job.arguments}
        settings |= {"lora": job.lora} if job.lora else {}
        settings |= {"width": picture.width, "height": picture.height}
        compression = self.body.output_compression
        return media.encode(
            picture,
            self.format,
            100 if compression is None else compression,
            self.served.told(settings if is_final else {}),
        )

    def usage(self, usages: Sequence[protocol.TokenUsage]) -> schema.Usage:
        """Of some of the pictures. The prompt and the pictures sent are counted once."""
        text, given = usages[0].text_tokens, self._given_tokens()
        made = sum(usage.image_tokens for usage in usages)
        return schema.Usage(
            input_tokens=text + given,
            input_tokens_details=schema.TokenDetails(text_tokens=text, image_tokens=given),
            output_tokens=made,
            output_tokens_details=schema.TokenDetails(text_tokens=0, image_tokens=made),
            total_tokens=text + given + made,
        )

    def _given_tokens(self) -> int:
        given = self.jobs[0].arguments.get("image", ())
        multiple = self.served.card.size_multiple_px
        sizes = [size_of(one) for one in (given if isinstance(given, list) else [given])]
        return sum((size[0] // multiple) * (size[1] // multiple) for size in sizes if size)


def drawing_of(
    served: Served,
    body: schema.ImageRequest,
    *,
    key: str,
    pictures: Mapping[str, Any] | None = None,
    kind: Literal["image_generation", "image_edit"] = "image_generation",
) -> Drawing:
    """Check a request; see `make_jobs`.

    Args:
        key: names the client's API key; "" where there are none.
    """
    return Drawing(served, body, make_jobs(served, body, key=key, pictures=pictures), kind)


def share_of(key: str, body: schema.ImageRequest | VideoRequest) -> dict[str, str]:
    """Whose share of the device a request uses, as arguments of a `Request`.

    That is its API key's; the user that the body names has a part of it. Without keys nothing but
    the body tells clients apart, and every user is a tenant.
    """
    user = body.safety_identifier or body.user or ""
    return {"tenant": key, "user": user} if key else {"tenant": user}


def pack(drawing: Drawing) -> None:
    """Make its pictures ready to be sent. Takes its time: not on the event loop."""
    for name in PICTURES:
        given = drawing.jobs[0].arguments.get(name, [])
        for picture in given if isinstance(given, list) else [given]:
            protocol.pack(picture)


Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work on a thread."""


async def draw(
    supervisor: Supervisor, drawing: Drawing, *, link: Callable[[bytes], str], run: Run
) -> schema.ImagesResponse:
    """Run the jobs of a request side by side. If one fails, the others are given up.

    Args:
        link: puts a file where a client can fetch it; for `response_format` "url". On a thread.
        run: runs the encoding, a picture at a time.
    """
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for job in drawing.jobs:
                tasks.append(group.create_task(supervisor.submit(job)))
                await asyncio.sleep(0)  # pictures that it brings take milliseconds to send
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    done = [task.result() for task in tasks]
    pictures = [one.pictures[0] for one in done]

    def answered(number: int) -> schema.Image:
        file = drawing.encoded(number, pictures[number])
        if drawing.body.response_format == "url":
            return schema.Image(seed=done[number].seed, url=link(file))
        return schema.Image(seed=done[number].seed, b64_json=base64.b64encode(file).decode())

    data = [await run(partial(answered, number)) for number in range(len(done))]
    return schema.ImagesResponse(
        created=int(time.time()),
        data=data,
        model=drawing.served.id,
        size=f"{pictures[0].width}x{pictures[0].height}",
        quality=drawing.quality,
        output_format=drawing.format,
        safety_identifier=drawing.user,
        timings=max((one.timings for one in done), key=lambda timings: timings.total_s),
        usage=drawing.usage([one.usage for one in done]),
    )


def make_jobs(
    served: Served,
    body: schema.ImageRequest,
    *,
    key: str = "",
    pictures: Mapping[str, Any] | None = None,
) -> list[CheckedRequest]:
    """Check a body and turn it into one job an image.

    Args:
        key: names the client's API key; "" where there are none.
        pictures: that came with it, and what follows from them, as the pipeline's arguments.

    Raises:
        Rejected, ModelNotFound: what is wrong, and the nearest thing that works.
    """
    check_model(served, body.model)
    if (makes := served.card.tasks[0].makes) != "pictures":
        ways = {"videos": "POST /v1/videos makes them"}
        way = ways.get(makes, "`carpool generate` and the Python API do that")
        raise UnsupportedParameter(
            f"{served.id} makes {makes}, and this endpoint answers with pictures: {way}",
            param="model",
        )
    said = body.model_dump()
    check_text(said)
    if body.output_compression is not None and body.output_format in (None, "png"):
        raise UnsupportedParameter(
            "output_compression is for jpeg and webp: png loses nothing",
            param="output_compression",
        )
    ours = type(body).model_fields  # unsaid, these are None, also where the model knows no such
    parameters = {
        name: value
        for name, value in said.items()
        if name not in schema.OPENAI_FIELDS and (name not in ours or value is not None)
    }
    if own := parameters.keys() & {"self", "request_id", "tenant"}:  # `Request`'s own arguments
        name = min(own)
        raise UnknownParameter(f"{served.card.pipeline} has no parameter {name!r}", param=name)
    for name in schema.NULL_FIELDS:
        if parameters.pop(name, None) is not None:
            raise UnsupportedParameter(f"{name} is not supported: leave it out", param=name)
    if body.stream and body.response_format == "url":
        rule = "a stream's events carry the pictures themselves: leave it out"
        raise UnsupportedParameter(f"response_format=url: {rule}", param="response_format")
    if pictures is None:
        _refuse_edits(served.card, parameters)
    parameters |= parse_size(served.card, body.size, parameters) | dict(pictures or {})
    n = check_n(1 if body.n is None else body.n, served.max_n)
    parameters |= preset(served.card, body.quality, parameters)
    share = share_of(key, body)
    jobs = [
        check(
            served.card,
            Request(body.prompt, seed=seed, timeout_s=body.timeout_s, **share, **parameters),
            from_json=True,
        )
        for seed in seeds(body.seed, n)
    ]
    previews = body.partial_images or 0 if body.stream else 0
    return [replace(job, previews=previews) for job in jobs]


def _refuse_edits(card: Card, parameters: Mapping[str, Any]) -> None:
    """Say where pictures are taken, if the model takes any: not with a body that has none."""
    if not card.task_for(["image"]).takes("image"):
        return
    plain = card.tasks[0]
    names = {*EDITS, *PICTURES} | ({"strength"} if not plain.takes("strength") else set())
    for name in parameters:
        if name in names and parameters[name] is not None:
            rule = "send it with its picture to POST /v1/images/edits"
            raise UnsupportedParameter(f"{name} is not taken here: {rule}", param=name)


def preset(card: Card, quality: str | None, parameters: Mapping[str, Any]) -> dict[str, int]:
    """The steps that a quality stands for, from those that the model takes by default.

    Nothing where the request says steps itself, and for models distilled to a few steps: they
    were trained for just these.
    """
    given = {name for name, value in parameters.items() if value is not None}
    if given & {"num_inference_steps", "sigmas", "timesteps"}:
        return {}
    own = {p.name: p.default for p in card.task_for(given).parameters}
    steps = card.defaults.get("num_inference_steps", own.get("num_inference_steps"))
    factor = QUALITIES[quality or "auto"]
    if not isinstance(steps, int) or steps <= FEW_STEPS or factor == 1:
        return {}
    return {"num_inference_steps": min(card.max_steps, max(1, round(steps * factor)))}


def check_model(served: Served, model: str | None) -> None:
    if model not in (None, served.id):
        seen = str(model)[:60]
        hint = nearest(seen, [served.id])
        raise ModelNotFound(f"model {seen!r} is not served here, {served.id!r} is{hint}")


def check_text(values: dict[str, Any]) -> None:
    """JSON can write half a character, "\\ud800", which no peer and no answer can carry."""
    for name, value in values.items():
        try:
            (value if isinstance(value, str) else "").encode()
        except UnicodeEncodeError:
            seen = ascii(value[:40])
            rule = "must be text without lone surrogates"
            raise InvalidValue(f"{name}={seen}: {rule}", param=name) from None


def parse_size(card: Card, size: str | None, parameters: dict[str, Any]) -> dict[str, int]:
    if size is None or size == "auto":
        return {}
    if any(parameters.get(side) is not None for side in ("width", "height")):
        raise InvalidValue("give size, or width and height, not both", param="size")
    match = _SIZE.fullmatch(size)
    if match is None:
        width, height = card.usual_size_px or (8 * card.size_multiple_px,) * 2
        raise SizeRejected(
            f"size {show(size)} is not supported: write WIDTHxHEIGHT in pixels, such as "
            f"{width}x{height}, or auto",
            param="size",
        )
    return {"width": int(match[1]), "height": int(match[2])}


def model_entry(served: Served, created: int) -> schema.Model:
    """The served model as `GET /v1/models` shows it."""
    card = served.card
    size = card.usual_size_px
    return schema.Model(
        id=served.id,
        created=created,
        owned_by="carpool",
        pipeline=card.pipeline,
        tasks=[task.name for task in card.tasks],
        default_size=None if size is None else f"{size[0]}x{size[1]}",
        size_multiple_px=card.size_multiple_px,
        parameters=_parameters_of(card),
        lora=list(card.lora),
    )


def _parameters_of(card: Card) -> list[schema.ModelParameter]:
    """What requests may say, each with the default that counts and the tasks that take it."""
    known = set(card.names()) - {"output_type"}  # output_format instead
    found: dict[str, schema.ModelParameter] = {}
    for task in card.tasks:
        sent = {"image": "input_reference"} if task.makes == "videos" else {"mask_image": "mask"}
        for one in task.parameters:
            is_picture = one.name in ("image", "mask_image")
            if one.name not in known or (one.kind == "other" and not is_picture):
                continue
            name = sent.get(one.name, one.name)
            default = card.defaults.get(one.name, one.default)
            kind = "picture" if is_picture else one.kind
            entry = schema.ModelParameter(
                name=name, kind=kind, required=one.required, default=default, tasks=[]
            )
            found.setdefault(name, entry).tasks.append(task.name)
    return list(found.values())
