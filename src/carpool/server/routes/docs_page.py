"""`GET /docs`: the OpenAPI document as one HTML page, without scripts and without other hosts.

FastAPI's own page loads Swagger UI from a CDN: without a network it shows nothing, and the CDN's
script would run with this server's origin.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em;
margin: 2em auto; padding: 0 1em } h3 { margin-top: 2em } code, pre { font-size: 14px }
table { border-collapse: collapse; width: 100% } pre { overflow-x: auto }
td, th { text-align: left; vertical-align: top; padding: .25em .75em .25em 0;
border-bottom: 1px solid #8884 } th { font-weight: normal; opacity: .6 }
"""
_BOUNDS = {"minimum": "from", "maximum": "to", "maxLength": "length up to"}

Schema = Mapping[str, Any]


def add_docs(app: FastAPI) -> None:
    """Add the page to an application."""
    show = cache(lambda: page(app.openapi()))  # once all routes are there

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(show(), headers=_HEADERS)


def page(document: Schema) -> str:
    """An OpenAPI document as HTML."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{_STYLE}</style><h1>{title}</h1>",
            '<p>From <a href="openapi.json">openapi.json</a>. Where the server has API keys, paths '
            "with &#128273; want one: <code>authorization: Bearer KEY</code>.",
            *_operations(document),
            "<h2>Schemas</h2>",
            *_schemas(document.get("components", {}).get("schemas", {})),
        ]
    )


def _operations(document: Schema) -> Iterator[str]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            key = " &#128273;" if operation.get("security") else ""
            yield f"<h3><code>{method.upper()} {escape(path)}</code>{key}</h3>"
            yield _text(operation.get("description") or operation.get("summary", ""))
            if parameters := operation.get("parameters"):
                fields = {field["name"]: field["schema"] | field for field in parameters}
                names = [field["name"] for field in parameters if field["required"]]
                yield from _table(fields, names)
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body: <code>{escape(kind)}</code> {_kind(body['schema'])}"
                yield from _fields(body["schema"])
            answers: dict[str, list[str]] = {}
            for status, answer in operation["responses"].items():
                answers.setdefault(_content(answer), []).append(escape(status))
            rows = (f"{', '.join(statuses)} {kind}" for kind, statuses in answers.items())
            yield f"<p>Answers: {'; '.join(rows)}"


def _content(answer: Schema) -> str:
    return " ".join(
        _kind(content["schema"]) if content.get("schema") else f"<code>{escape(kind)}</code>"
        for kind, content in answer.get("content", {}).items()
    )


def _schemas(schemas: Schema) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3>'
        yield _text(schema.get("description", ""))
        yield from _fields(schema)
        for example in schema.get("examples", []):
            yield f"<pre>{escape(json.dumps(example, indent=2))}</pre>"


def _fields(schema: Schema) -> Iterator[str]:
    if properties := schema.get("properties"):
        yield from _table(properties, schema.get("required", []))


def _table(fields: Schema, required: list[str]) -> Iterator[str]:
    yield "<table><tr><th>name<th>type<th>default<th>what"
    for name, schema in fields.items():
        default = escape(json.dumps(schema["default"])) if "default" in schema else ""
        default = "required" if name in required else default
        text = _inline(schema.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code><td>{_kind(schema)}<td>{default}<td>{text}"
    yield "</table>"


def _kind(schema: Schema) -> str:
    """A type in words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(_kind(choice) for choice in choices if choice.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(map(escape, map(json.dumps, schema.get("enum", [schema.get("const")]))))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{word} {schema[name]:g}" for name, word in _BOUNDS.items() if name in schema]
    kind = "file" if schema.get("format") == "binary" else str(schema.get("type", "anything"))
    return escape(" ".join([kind, *bounds]))


def _text(markdown: str) -> str:
    return "".join(f"<p>{_inline(part)}" for part in markdown.split("\n\n") if part)


def _inline(markdown: str) -> str:
    """Text with `code`."""
    parts = [escape(part) for part in markdown.split("`")]
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
