"""`GET /docs`: the OpenAPI document as one HTML page with runnable examples, from this host only.

FastAPI's own page loads Swagger UI from a CDN: without a network it shows nothing, and the CDN's
script would run with this server's origin. The only script here is `docs.js`, allowed by digest.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

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
_STYLE = """
:root { color-scheme: light dark; background: Canvas; color: CanvasText }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em;
margin: 2em auto; padding: 0 1em } h3 { margin-top: 2em } code, pre { font-size: 14px }
table { border-collapse: collapse; width: 100% } pre { overflow-x: auto }
td, th { text-align: left; vertical-align: top; padding: .25em .75em .25em 0;
border-bottom: 1px solid #8884 } th { font-weight: normal; opacity: .7 }
input, textarea { font: 16px monospace; width: 100%; box-sizing: border-box; margin: .25em 0 }
button, summary { font: inherit; min-height: 40px; padding: .4em 1em; cursor: pointer }
nav ul { columns: 22em; padding-left: 1.2em } img { max-width: 100% } .try pre { max-height: 24em }
#key { max-width: 24em } a { color: #3552d8 }
@media (prefers-color-scheme: dark) { a { color: #8ea2ff } }
"""
_BOUNDS = {"minimum": "from", "maximum": "to", "maxLength": "length up to"}


def add_docs(app: FastAPI) -> None:
    """Add the page to an application."""
    show = cache(lambda: page(app.openapi()))  # built after all routes are added

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
            f"<style>{_STYLE}</style><main><h1>{title}</h1>",
            '<p>From <a href="openapi.json">openapi.json</a>. If the server has API keys, paths '
            "with &#128273; need one: <code>authorization: Bearer KEY</code>.",
            '<p><label>API key for the examples <input id="key" type="password" '
            'autocomplete="off"></label>',
            *_contents(document),
            *_operations(document),
            '<h2 id="schemas">Schemas</h2>',
            *_schemas(document.get("components", {}).get("schemas", {})),
            f"</main><script>{_SCRIPT}</script>",
        ]
    )


def _contents(document: Schema) -> Iterator[str]:
    """A list of all paths, each a link."""
    yield '<nav aria-label="Paths"><h2>Paths</h2><ul>'
    for path, item in document["paths"].items():
        for method in item:
            name = f"{method.upper()} {path}"
            yield f'<li><a href="#{escape(_anchor(method, path))}"><code>{escape(name)}</code></a>'
    yield '<li><a href="#schemas">Schemas</a></ul></nav>'


def _anchor(method: str, path: str) -> str:
    return f"{method}-{path}"


def _operations(document: Schema) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    for path, item in document["paths"].items():
        for method, operation in item.items():
            key = " &#128273;" if operation.get("security") else ""
            anchor = escape(_anchor(method, path))
            yield f'<h3 id="{anchor}"><code>{method.upper()} {escape(path)}</code>{key}</h3>'
            yield _text(operation.get("description") or operation.get("summary", ""))
            if parameters := operation.get("parameters"):
                fields = {field["name"]: field["schema"] | field for field in parameters}
                names = [field["name"] for field in parameters if field["required"]]
                yield from _table(fields, names)
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body: <code>{escape(kind)}</code> {_type_name(body['schema'])}"
                yield from _fields(body["schema"])
            command = escape(curl(method, path, operation, schemas))
            yield f'<pre class="curl" tabindex="0">{command}</pre>'
            yield _trial(method, path, operation, schemas)
            answers: dict[str, list[str]] = {}
            for status, answer in operation["responses"].items():
                answers.setdefault(_content(answer), []).append(escape(status))
            rows = (f"{', '.join(statuses)} {kind}" for kind, statuses in answers.items())
            yield f"<p>Answers: {'; '.join(rows)}"


def _trial(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    """A placeholder for the script's fields and button; empty without scripts."""
    body = sample(operation, schemas)
    data = {"method": method.upper(), "path": path_example(path)}
    if body is not None:
        data["body"] = json.dumps(body, indent=2)
    values = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
    return f'<details class="try" {values}><summary>Try it</summary></details>'


def _content(answer: Schema) -> str:
    return " ".join(
        _type_name(content["schema"]) if content.get("schema") else f"<code>{escape(kind)}</code>"
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
        yield f"<tr><td><code>{escape(name)}</code><td>{_type_name(schema)}<td>{default}<td>{text}"
    yield "</table>"


def _type_name(schema: Schema) -> str:
    """A type in words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("anyOf"):
        return " or ".join(_type_name(choice) for choice in choices if choice.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(map(escape, map(json.dumps, schema.get("enum", [schema.get("const")]))))
    if schema.get("type") == "array":
        return f"list of {_type_name(schema.get('items', {}))}"
    bounds = [f"{word} {schema[name]:g}" for name, word in _BOUNDS.items() if name in schema]
    kind = "file" if schema.get("format") == "binary" else str(schema.get("type", "anything"))
    return escape(" ".join([kind, *bounds]))


def _text(markdown: str) -> str:
    return "".join(f"<p>{_inline(part)}" for part in markdown.split("\n\n") if part)


def _inline(markdown: str) -> str:
    """Text with `code`."""
    parts = [escape(part) for part in markdown.split("`")]
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))


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
