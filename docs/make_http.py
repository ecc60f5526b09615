"""Write `docs/http.md` from the OpenAPI document: every path, its fields, and those of its answers.

usage: make docs    (a test fails when the page is behind the code)
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from carpool.config import ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.server.curl_example import curl

PAGE = Path(__file__).parent / "http.md"
HEAD = """# The HTTP API

Made from the code by `make docs`; do not edit. The same as a document for programs:
`GET /openapi.json` of a running server (`GET /docs` shows it). Errors are listed in
[the reference](reference.md#errors); every answer has the header `x-request-id`, and keys go into
`authorization: Bearer KEY`.

A field that is null is absent, in every body, at every depth, also where the pipeline's own default
is something else (`[]` or `""` switch off what None does in Python); in a form so is the text
`null`, unless the field is a text of the model's, such as a prompt.

Bodies that ask for pictures or videos take every other parameter of the model's own pipeline too,
at the top level: `GET /v1/models` lists them with their types and defaults. In bodies for pictures,
those that are pictures are `data:` URLs, alone, in lists or in lists of lists, as the pipeline
takes them; `/v1/images/edits` takes them beyond 1 MiB, too.
"""
Schema = Mapping[str, Any]


def page() -> str:
    """The whole page."""
    document = _document()
    schemas = document["components"]["schemas"]
    lines = [HEAD]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path}", "", _prose(operation), ""]
            lines += _section("parameter", _parameters(operation, schemas))
            lines += _section("field of the body", _body(operation, schemas))
            lines += ["```sh", curl(method, path, operation, schemas), "```", ""]
            lines += [f"Answer: {_answer(operation)}", ""]
    lines += ["## What answers hold", ""]
    for name, schema in sorted(schemas.items()):
        if name.endswith("Request") or "properties" not in schema:
            continue
        lines += [f"### {name}", "", _sentence(schema), ""]
        lines += ["| field | type | what |", "| --- | --- | --- |"]
        rows = _fields(schema, schemas)
        lines += [*(f"| `{field}` | {kind} | {what} |" for field, kind, _, what in rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _document() -> dict[str, Any]:
    """Of the application with all its routes; nothing of it runs."""
    store = JobStore(None, ttl_s=1000, max_bytes=1 << 20, max_waiting=1)
    try:
        worker: Any = None
        runner = Runner(store, worker, {}, model=lambda: "model", max_running=1)
        return create_app(worker, ServeSettings(), runner).openapi()
    finally:
        store.close()


def _section(title: str, rows: Iterator[tuple[str, str, str, str]]) -> list[str]:
    table = [f"| `{name}` | {kind} | {default} | {what} |" for name, kind, default, what in rows]
    if not table:
        return []
    return [f"| {title} | type | default | what |", "| --- | --- | --- | --- |", *table, ""]


def _parameters(operation: Schema, schemas: Schema) -> Iterator[tuple[str, str, str, str]]:
    for one in operation.get("parameters", []):
        schema = one["schema"]
        what = one.get("description") or schema.get("description") or f"in the {one['in']}"
        yield one["name"], _type(schema), _default(schema, bool(one.get("required"))), what


def _body(operation: Schema, schemas: Schema) -> Iterator[tuple[str, str, str, str]]:
    """Fields of the JSON body, or of the form where it has more."""
    content = operation.get("requestBody", {}).get("content", {})
    found: dict[str, tuple[str, str, str, str]] = {}
    for kind in content.values():
        for row in _fields(_resolved(kind["schema"], schemas), schemas):
            found.setdefault(row[0], row)
    yield from found.values()


def _fields(schema: Schema, schemas: Schema) -> Iterator[tuple[str, str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        text = field.get("description") or _resolved(field, schemas).get("description", "")
        yield name, _type(field), _default(field, name in required), " ".join(text.split())


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    if "$ref" in schema:
        found: Schema = schemas[schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [_type(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("contentMediaType") or schema.get("format") == "binary":
        return "file"
    if {"minimum", "maximum"} <= schema.keys():
        return f"{kind}, {schema['minimum']:g} to {schema['maximum']:g}"
    return kind


def _default(schema: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    return "" if schema.get("default") is None else f"`{schema['default']}`"


def _prose(operation: Schema) -> str:
    text = operation.get("description") or operation.get("summary", "")
    return f"{' '.join(text.split()).rstrip('.')}."


def _sentence(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())


def _answer(operation: Schema) -> str:
    """What success gives, and the codes of failures."""
    good, bad = [], []
    for status, answer in operation.get("responses", {}).items():
        if not status.startswith("2"):
            bad.append(status)
            continue
        kinds = [
            _type(one["schema"]) if one.get("schema") else f"`{media}`"
            for media, one in answer.get("content", {}).items()
        ]
        good.append(f"{status} {' or '.join(kinds)}".strip())
    failures = f"; {', '.join(sorted(bad))} with an [Error](#error)" if bad else ""
    return f"{', '.join(good)}{failures}."


if __name__ == "__main__":
    PAGE.write_text(page())
