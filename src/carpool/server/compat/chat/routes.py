"""`POST /v1/chat/completions`: pictures as answers of a chat."""

from functools import partial
from typing import Any

from fastapi.responses import JSONResponse

from carpool.server.bodies import schema
from carpool.server.bodies.forms import Form, validated
from carpool.server.bodies.nested_pictures import read_json, without_pictures
from carpool.server.compat.chat.answers import ChunkWriter, completion
from carpool.server.compat.chat.bodies import ChatCompletion, ChatRequest, conversation
from carpool.server.dependencies import Context, WorkRoute, router_of
from carpool.server.requests import parse_image_request
from carpool.server.responses.respond import respond
from carpool.server.responses.stage_metrics import stage_metrics
from carpool.server.responses.stream import STREAMED

_BODY = {"application/json": {"schema": ChatRequest.model_json_schema()}}

router = router_of(WorkRoute, "/v1")


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
    model = await context.load(chat.model, "ready")
    talk = conversation(model.card, chat)
    body = validated(schema.ImageRequest, talk.values)
    request_id = request.scope["request_id"]
    options = chat.stream_options or {}
    has_metrics = bool(chat.return_stage_metrics) or talk.has_parts
    has_usage = options.get("include_usage") is True
    chunks = ChunkWriter(request_id, talk.has_parts, has_usage, has_metrics)

    form = Form(images=talk.images, name="image_url")
    image_request = await parse_image_request(context, body, form, model=model)
    image_request.write_event = chunks
    answer = await respond(
        context, image_request, modalities=chat.modalities, stream_options=options
    )
    if not isinstance(answer, schema.ImagesResponse):
        return answer
    metrics = await stage_metrics(state, model.id, answer.timings) if has_metrics else None
    complete = partial(completion, request_id, answer, has_parts=talk.has_parts)
    return JSONResponse(
        complete(warnings=talk.warnings, metrics=metrics).model_dump(exclude_none=True)
    )
