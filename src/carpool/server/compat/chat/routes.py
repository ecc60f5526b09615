"""`POST /v1/chat/completions`: answers with texts or pictures, depending on the model."""

from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse

from carpool.errors import Rejected
from carpool.server.bodies import schema
from carpool.server.bodies.forms import json_document, validated
from carpool.server.bodies.json_pictures import read_json, without_pictures
from carpool.server.compat.chat import bodies
from carpool.server.compat.chat.answers import ImageChunks
from carpool.server.compat.chat.texts import as_sent, parse_text_request
from carpool.server.dependencies import Context, WorkRoute, router_of
from carpool.server.openai_fields import check_characters
from carpool.server.requests import parse_image_request
from carpool.server.responses.respond import respond
from carpool.server.responses.stage_metrics import stage_metrics
from carpool.server.responses.stream import STREAMED, EventStream
from carpool.server.state import AuthenticatedRequest, ServedModel

router = router_of(WorkRoute, "/v1")


@router.post(
    "/chat/completions", response_model=bodies.ChatCompletion, response_model_exclude_none=True,
    responses=STREAMED, openapi_extra=json_document(bodies.ChatRequest),
)  # fmt: skip
async def create_chat_completion(context: Context) -> Any:
    """Answer a conversation: language models write, other models draw the last message."""
    state, request = context.state, context.request
    values = await read_json(request)
    without_pictures({name: value for name, value in values.items() if name != "messages"})
    check_characters({"messages": values.get("messages")})
    chat = validated(bodies.ChatRequest, values)
    has_usage = bodies.includes_usage(chat)
    if (writer := await _language_model(context, chat.model)) is not None:
        parsed = await parse_text_request(context, *writer, chat, has_usage=has_usage)
        try:
            text = await respond(context, parsed, stream=chat.stream, has_usage=has_usage)
        except Rejected as error:
            raise as_sent(error, values) from error
        return text if isinstance(text, EventStream) else _json(text)
    model = await context.load(chat.model, "ready")
    talk = bodies.conversation(model.card, chat)
    body = validated(schema.ImageRequest, talk.values)
    has_parts = chat.modalities is None
    has_metrics = bool(chat.return_stage_metrics) or has_parts
    image_request = await parse_image_request(context, body, talk, model=model)
    chunks = ImageChunks(
        request_id=request.scope["request_id"], model=model.id, has_usage=has_usage,
        image_request=image_request, has_parts=has_parts, has_metrics=has_metrics,
    )  # fmt: skip
    image_request.chunks = chunks
    answer = await respond(context, image_request, modalities=chat.modalities, has_usage=has_usage)
    if isinstance(answer, EventStream):
        return answer
    metrics = await stage_metrics(state, model.id, answer.timings) if has_metrics else None
    return _json(chunks.completion(answer, metrics))


def _json(answer: bodies.ChatCompletion) -> JSONResponse:
    return JSONResponse(answer.model_dump(exclude_none=True))


async def _language_model(
    context: AuthenticatedRequest, name: str | None
) -> tuple[ServedModel, str] | None:
    """Find the language model that a body names: MODEL, COMPONENT or MODEL/COMPONENT.

    Returns:
        The model with the card of just the language model, and its name; None: no such model.
    """
    served, of_model = context.state.model_names, name or ""
    component = ""
    if name is not None and name not in served:
        of_model, _, component = name.rpartition("/")
        if of_model not in served:
            of_model, component = served[0], name
    model = await context.load(of_model or None, "ready")
    if component == model.card.id:
        component = ""  # its own name, if it is served under another name
    if (card := model.card.writer(component)) is None:
        if context.state.fleet.is_single:
            model.check_name(name)
        return None
    model = replace(model, card=card, default_lora={})
    return model, f"{model.id}/{component}" if component else model.id
