"""`GET /docs`: the OpenAPI document as one HTML page with runnable examples, from this host only.

FastAPI's own page loads Swagger UI from a CDN: without a network it shows nothing, and the CDN's
script would run with this server's origin. The only script here is `docs.js`, allowed by digest.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment

Schema = Mapping[str, Any]
URL = "http://127.0.0.1:8000"
_SAMPLES: dict[str, Any] = {"string": "a red circle", "integer": 1, "number": 1.0, "boolean": True}
_NAMED = {"image_url": "data:image/png;base64,iVBORw0KGgo...", "lora_nickname": "outlined"}
_SCRIPT = (files("carpool.server.routes") / "docs.js").read_text()
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src 'sha256-{_DIGEST}'; "
    "style-src 'unsafe-inline'; img-src blob: data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_PAGE = Environment(autoescape=True).from_string(
    (files("carpool.server.routes") / "docs.html").read_text()
)


def add_docs(app: FastAPI) -> None:
    """Add the page to an application."""
    show = cache(lambda: page(app.openapi()))  # built after all routes are added

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(show(), headers=_HEADERS)


def page(document: Schema) -> str:
    """An OpenAPI document as HTML."""
    return _PAGE.render(
        info=document["info"],
        operations=[
            (method, path, operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
        ],
        schemas=document.get("components", {}).get("schemas", {}),
        json=json.dumps,
        curl=curl,
        sample=sample,
        path_example=path_example,
        script=_SCRIPT,
    )


# Examples: a body, and a curl command that sends it


def curl(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    """A command that calls a path; the user replaces the words in capitals."""
    body = sample(operation, schemas)
    words = ["curl", *([] if method in ("get", "post") else [f"-X {method.upper()}"])]
    answers = operation["responses"].get("200", {}).get("content", {})
    words += ["-N"] * (set(answers) == {"text/event-stream"})  # show events as they arrive
    words.append(f"{URL}{path_example(path)}")
    if operation.get("security"):
        words.append("-H 'authorization: Bearer KEY'")
    if body is None:
        words += ["-X POST"] * (method == "post")
    elif "images" in body and "multipart/form-data" in operation["requestBody"]["content"]:
        fields = {name: value for name, value in body.items() if name != "images"}
        words += ["-F image=@picture.png", *(f"-F '{name}={fields[name]}'" for name in fields)]
    else:
        words.append(f"--json '{json.dumps(body)}'")
    return " ".join(words)


def path_example(path: str) -> str:
    """A path with its parameters as words in capitals."""
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), path)


def sample(operation: Schema, schemas: Schema) -> Any:
    """An example JSON body of an operation; None if it takes no body."""
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in content:
        return None
    return _example(content["application/json"]["schema"], schemas)


def _example(schema: Schema, schemas: Schema) -> Any:
    """The example of a body's schema, otherwise its required fields."""
    schema = _resolved(schema, schemas)
    if examples := schema.get("examples"):
        return examples[0]
    fields, required = schema.get("properties", {}), schema.get("required", ())
    return {
        name: _NAMED.get(name) or _sample(_resolved(fields[name], schemas), schemas)
        for name in required
    }


def _sample(schema: Schema, schemas: Schema) -> Any:
    if choices := schema.get("anyOf"):
        return _sample(_resolved(choices[0], schemas), schemas)
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    if schema.get("type") == "array":
        return [_sample(_resolved(schema.get("items", {}), schemas), schemas)]
    if "properties" in schema:
        return _example(schema, schemas)
    return _SAMPLES.get(str(schema.get("type", "")), {})


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    if "$ref" in schema:
        resolved: Schema = schemas[schema["$ref"].rpartition("/")[2]]
        return resolved
    return schema
