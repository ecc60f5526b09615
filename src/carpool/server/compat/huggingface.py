"""`POST /`: requests of `huggingface_hub.InferenceClient(base_url=...)`, as to its own endpoints.

`text_to_image` sends a prompt. `image_to_image` sends a picture: the file as the body, or base64 in
JSON if there are parameters. The answer is the file of the new picture.
"""

import base64
import re
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from carpool.errors import InvalidValue, MissingParameter, UnsupportedParameter
from carpool.media.reader import ImageData
from carpool.media.uploads import MOST_BYTES
from carpool.server.bodies import schema
from carpool.server.bodies.forms import Form, validated
from carpool.server.bodies.json_bodies import received
from carpool.server.bodies.json_pictures import as_url, read_json, without_pictures
from carpool.server.dependencies import Context, WorkRoute, router_of
from carpool.server.requests import parse_image_request
from carpool.server.responses.downloads import warnings_header
from carpool.server.responses.respond import respond

_FILE = {"schema": {"type": "string", "format": "binary"}}
_KINDS = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")
_BASE64 = re.compile(r"data:|iVBORw0KGgo|[/_]9j[/_]|UklGR")  # the start of PNG, JPEG and WebP files
_FORMATS = {"image/jpeg": "jpeg", "image/webp": "webp"}  # key: `accept`; default: PNG


class InferenceRequest(BaseModel):
    """`POST /`, as `huggingface_hub.InferenceClient` sends it."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"inputs": "a red circle"}]}
    )

    inputs: Any = Field(
        description="the prompt; or a picture in base64, with the prompt in the parameters",
        json_schema_extra={"type": "string"},
    )
    parameters: dict[str, Any] | None = Field(
        None,
        description="parameters as in POST /v1/images/generations; `target_size` "
        '{"width": 64, "height": 64}',
    )


_CONTENT = {
    "application/json": {"schema": InferenceRequest.model_json_schema()},
    **dict.fromkeys(_KINDS, _FILE),
}

router = router_of(WorkRoute)


@router.post(
    "/",
    response_class=Response,
    responses={200: {"content": {"image/png": {}, "image/jpeg": {}, "image/webp": {}}}},
    openapi_extra={"requestBody": {"required": True, "content": _CONTENT}},
)
async def infer(context: Context) -> Response:
    """Draw and answer with the picture's file.

    Headers: `x-seed`, and `x-warnings` as a JSON list.
    """
    request = context.request
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    images = list[ImageData]()
    values: dict[str, Any] = {}
    if kind in _KINDS or not kind:  # the client sends no content type for bytes
        if not (body := await received(request, MOST_BYTES)):
            raise MissingParameter("the body is empty: send a picture's file, or JSON")
        images.append(bytes(body))
    else:
        inference = validated(InferenceRequest, await read_json(request, takes_base64=True))
        values = without_pictures(dict(inference.parameters or {}))
        if isinstance(inference.inputs, memoryview) or _BASE64.match(str(inference.inputs)):
            images.append(as_url(inference.inputs, "inputs"))
        elif not isinstance(inference.inputs, str):
            raise InvalidValue.of("inputs", inference.inputs, "must be a text")
        elif "prompt" in values:
            rule = "inputs is the prompt, or else a picture: leave one out"
            raise InvalidValue(f"prompt is given with a text in inputs: {rule}", param="prompt")
        else:
            values["prompt"] = inference.inputs
    if values.get("prompt") is None and images:
        values["prompt"] = ""
    form = Form(images=images, name="inputs")
    image_request = await parse_image_request(context, _body(values, request), form)
    answer = await respond(context, image_request)
    assert isinstance(answer, schema.ImagesResponse)  # `stream` is refused
    [picture] = answer.data
    content = base64.b64decode(picture.b64_json or "")
    headers = {"x-seed": str(picture.seed)} | warnings_header(answer.warnings)
    return Response(content, media_type=f"image/{answer.output_format}", headers=headers)


def _body(values: dict[str, Any], request: Any) -> schema.ImageRequest:
    """Convert the parameters to a body."""
    for name in ("n", "stream", "partial_images", "response_format", "background_job",
                 "return_stage_metrics"):  # fmt: skip
        value = values.pop(name, None)
        if value is not None and value is not False and (name, value) != ("n", 1):
            raise UnsupportedParameter.of(name, value, "the answer is one picture: leave it out")
    if (size := values.pop("target_size", None)) is not None:
        if not isinstance(size, dict) or size.keys() != {"width", "height"}:
            raise InvalidValue.of("target_size", size, 'must be {"width": ..., "height": ...}')
        values |= size
    accepted = request.headers.get("accept", "").partition(",")[0].strip().lower()
    values.setdefault("output_format", _FORMATS.get(accepted, "png"))
    return validated(schema.ImageRequest, values)
