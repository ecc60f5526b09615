"""`POST /v1/images/generations`: from a body to jobs, and from their pictures to an answer."""

import asyncio
import base64
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from carpool import frames, media
from carpool.errors import (
    InvalidValue,
    ModelNotFound,
    SizeRejected,
    UnknownParameter,
    UnsupportedParameter,
    nearest,
)
from carpool.parameters import Card, check, check_n, seeds
from carpool.server import schema
from carpool.supervise import Supervisor
from carpool.types import Job, Request

_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Served:
    """What the front knows of the model behind it."""

    id: str
    card: Card
    max_n: int


async def generate(
    supervisor: Supervisor, served: Served, body: schema.ImageRequest, *, key: str = ""
) -> schema.ImagesResponse:
    """Run one HTTP request: n jobs side by side. If one fails, the others are given up.

    Args:
        key: names the client's API key; a tenant where the body names no user.
    """
    jobs = make_jobs(served, body, tenant=body.safety_identifier or body.user or key)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(supervisor.submit(job)) for job in jobs]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    done = [task.result() for task in tasks]
    return await asyncio.to_thread(_answer, served, body, jobs, done)


def make_jobs(served: Served, body: schema.ImageRequest, *, tenant: str = "") -> list[Job]:
    """Check a body and turn it into one job an image.

    Raises:
        Rejected, ModelNotFound: what is wrong, and the nearest thing that works.
    """
    if body.model not in (None, served.id):
        hint = nearest(str(body.model), [served.id])
        raise ModelNotFound(f"model {body.model!r} is not served here, {served.id!r} is{hint}")
    _check_text(body.model_dump())
    if body.output_compression is not None and body.output_format in (None, "png"):
        raise UnsupportedParameter(
            "output_compression is for jpeg and webp: png loses nothing",
            param="output_compression",
        )
    parameters = body.model_dump(exclude=set(schema.OPENAI_FIELDS))
    if own := parameters.keys() & {"self", "request_id", "tenant"}:  # `Request`'s own arguments
        name = min(own)
        raise UnknownParameter(f"{served.card.pipeline} has no parameter {name!r}", param=name)
    for name in schema.NULL_FIELDS:
        if parameters.pop(name, None) is not None:
            raise UnsupportedParameter(f"{name} is not supported: leave it out", param=name)
    parameters |= _size(body.size, parameters)
    if (makes := served.card.tasks[0].makes) != "pictures":
        raise UnsupportedParameter(
            f"{served.id} makes {makes}, and this endpoint answers with pictures: use "
            "`carpool generate` or the Python API",
            param="model",
        )
    n = check_n(1 if body.n is None else body.n, served.max_n)
    return [
        check(
            served.card,
            Request(body.prompt, seed=seed, timeout_s=body.timeout_s, tenant=tenant, **parameters),
            from_json=True,
        )
        for seed in seeds(body.seed, n)
    ]


def _check_text(values: dict[str, Any]) -> None:
    """JSON can write half a character, "\\ud800", which no peer and no answer can carry."""
    for name, value in values.items():
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            seen = ascii(value[:40])
            raise InvalidValue(f"{name}={seen}: must be text without lone surrogates", param=name)


def _size(size: str | None, parameters: dict[str, Any]) -> dict[str, int]:
    if size is None or size == "auto":
        return {}
    if any(parameters.get(side) is not None for side in ("width", "height")):
        raise InvalidValue("give size, or width and height, not both", param="size")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise SizeRejected(
            f"size {size[:40]!r} is not supported: write WIDTHxHEIGHT in pixels, such as "
            "'1024x1024', or 'auto'",
            param="size",
        )
    return {"width": int(match[1]), "height": int(match[2])}


def _answer(
    served: Served, body: schema.ImageRequest, jobs: Sequence[Job], done: Sequence[frames.Done]
) -> schema.ImagesResponse:
    output_format = body.output_format or "png"
    images = []
    for job, one in zip(jobs, done, strict=True):
        picture = one.pictures[0]
        settings = {"model": served.id, "seed": job.seed, **job.arguments}
        settings |= {"lora": job.lora} if job.lora else {}
        settings |= {"width": picture.width, "height": picture.height}
        encoded = media.encode(
            picture.rgb,
            picture.width,
            picture.height,
            format=output_format,
            compression=100 if body.output_compression is None else body.output_compression,
            settings=settings,
        )
        images.append(schema.Image(b64_json=base64.b64encode(encoded).decode(), seed=one.seed))
    picture = done[0].pictures[0]
    return schema.ImagesResponse(
        created=int(time.time()),
        data=images,
        model=served.id,
        size=f"{picture.width}x{picture.height}",
        output_format=output_format,
        safety_identifier=body.safety_identifier or body.user,
        timings=max((one.timings for one in done), key=lambda timings: timings.total_s),
        usage=_usage([one.usage for one in done]),
    )


def _usage(usages: Sequence[frames.Usage]) -> schema.Usage:
    text, image = usages[0].text_tokens, sum(usage.image_tokens for usage in usages)
    return schema.Usage(
        input_tokens=text,
        input_tokens_details=schema.TokenDetails(text_tokens=text, image_tokens=0),
        output_tokens=image,
        output_tokens_details=schema.TokenDetails(text_tokens=0, image_tokens=image),
        total_tokens=text + image,
    )


def model_entry(served: Served, created: int) -> schema.Model:
    """The served model as `GET /v1/models` shows it."""
    size = served.card.default_size_px
    return schema.Model(
        id=served.id,
        created=created,
        owned_by="carpool",
        pipeline=served.card.pipeline,
        default_size=None if size is None else f"{size[0]}x{size[1]}",
        size_multiple_px=served.card.size_multiple_px,
        parameters=[
            asdict(parameter)
            for parameter in served.card.parameters
            if parameter.kind != "other"
            and parameter.name in served.card.names()
            and parameter.name != "output_type"  # output_format instead
        ],
        lora=list(served.card.lora),
    )
