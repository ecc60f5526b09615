"""`POST /v1/chat/completions`: pictures as answers of a chat."""

import asyncio
import contextlib
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from carpool.errors import CarpoolError, UnsupportedParameter
from carpool.request.parameters import check_n
from carpool.server.answers.chat import Chunks, completion
from carpool.server.answers.generation import ImageGeneration
from carpool.server.answers.respond import respond, unless_disconnected
from carpool.server.answers.stream import STREAMED
from carpool.server.bodies import schema
from carpool.server.bodies.chat import ChatCompletion, ChatRequest, StageMetrics, conversation
from carpool.server.bodies.forms import Form, validated
from carpool.server.bodies.input_images import edit_images, edit_task
from carpool.server.bodies.nested_pictures import read_json, without_pictures
from carpool.server.bodies.peers import stage_durations
from carpool.server.dependencies import ERRORS, Context, WorkRoute, traced
from carpool.server.requests import image_requests
from carpool.server.state import AppState
from carpool.types import Timings

PATIENCE_S = 1.0  # for the worker's word on memory
_BODY = {"application/json": {"schema": ChatRequest.model_json_schema()}}

router = APIRouter(
    prefix="/v1", route_class=WorkRoute, responses=ERRORS, dependencies=[Depends(traced)]
)


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    response_model_exclude_none=True,
    responses=STREAMED,
    openapi_extra={"requestBody": {"required": True, "content": _BODY}},
)
async def create_chat_completion(context: Context) -> Any:
    """Draw what the last message says; the answer's message has the pictures."""
    state, request = context.state, context.request
    values = await read_json(request)
    without_pictures({name: value for name, value in values.items() if name != "messages"})
    chat = validated(ChatRequest, values)
    model = state.model()
    asked = conversation(model.card, chat)
    body = validated(schema.ImageRequest, asked.values)
    if body.stream and chat.return_stage_metrics:
        rule = "a stream has none: leave it out, or stream"
        raise UnsupportedParameter(f"return_stage_metrics: {rule}", param="return_stage_metrics")
    pictures, digests, kind = None, list[str](), "image_generation"
    if asked.images:
        form = Form(images=asked.images, name="image_url")
        task = edit_task(model.card, form)
        intake = context.intake(check_n(1 if body.n is None else body.n, model.max_n))
        digests = await unless_disconnected(request, intake.run(form.digests))
        reading = edit_images(model.card, task, form, body, intake)
        pictures, kind = await unless_disconnected(request, reading), "image_edit"
    request_id = request.scope["request_id"]
    options = chat.stream_options or {}
    chunks = Chunks(request_id, asked.has_parts, options.get("include_usage") is True)

    def sent() -> dict[str, Any]:
        told = chat.model_dump(exclude_unset=True, exclude={"messages"})
        return told | {"prompt": body.prompt, "pictures": digests}

    def generation() -> ImageGeneration:
        made = image_requests(model, body, key=context.client.key, pictures=pictures)
        return ImageGeneration(model, body, made, kind, event=chunks)  # type: ignore[arg-type]

    answer = await respond(context, sent, generation, is_streamed=body.stream)
    if not isinstance(answer, schema.ImagesResponse):
        return answer
    metrics = None
    if chat.return_stage_metrics or asked.has_parts:
        metrics = await stage_metrics(state, answer.timings)
    told = partial(completion, request_id, answer, has_parts=asked.has_parts)
    return JSONResponse(
        told(warnings=asked.warnings, metrics=metrics).model_dump(exclude_none=True)
    )


async def stage_metrics(state: AppState, timings: Timings) -> StageMetrics:
    """What vLLM-Omni's load clients read of an answer; null for what the worker does not say."""
    peak_mb = None
    with contextlib.suppress(CarpoolError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            statistics = await state.supervisor.statistics()
            peak_mb = round(statistics["memory"]["peak_bytes"] / 1e6, 3)
    return StageMetrics(stage_durations=stage_durations(timings), peak_memory_mb=peak_mb)
