"""Write `docs/http.md` from the OpenAPI document: all paths, with fields of bodies and answers.

usage: make docs    (a test fails if the page is outdated)
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from carpool.config import ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.server.routes.docs_page import curl

PAGE = Path(__file__).parent / "http.md"
HEAD = """# The HTTP API

`make docs` writes this page from the code; do not edit it. A running server offers the same as
`GET /openapi.json`, and shows it at `GET /docs`. Keys go into the header
`authorization: Bearer KEY`. Every answer has the header `x-request-id`; errors have one
[shape](#error) and are listed in [the reference](reference.md#errors).

Bodies that ask for pictures, videos, meshes or sound also take every other parameter of the model's
pipeline at the top level; `GET /v1/models` lists them with types and defaults. In JSON, send
pictures as `data:` URLs. A body has at most 1 MiB (`--max-body-bytes`), or 64 MiB
(`--max-upload-bytes`) on paths whose usual input is a picture.

`null` means that a field is absent, at any depth; to switch a feature off, send `[]` or `""`. In a
form the text `null` means the same, except in texts such as a prompt.

Some routes take a form or JSON. Files are sent in the form, as `image`; JSON has `images`.
"""
ERRORS = "501 if a library is missing on the server, 502 if the server of `--language-url` fails."
LEFT_OUT = "The tables of bodies below have these fields only if a route changes their meaning."
COMMON = 4  # bodies that must share a field before it is listed once, above all routes
Schema = Mapping[str, Any]
Row = tuple[str, str, str, str]  # name, type, default, description


def page() -> str:
    """The whole page."""
    document = _document()
    schemas = document["components"]["schemas"]
    routes = [
        (method, path, operation, list(_body(operation, schemas)))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    counts = Counter(row for *_, rows in routes for row in rows)
    common = [row for row in counts if counts[row] >= COMMON]
    [(usual, _)] = Counter(_errors(operation) for _, _, operation, _ in routes).most_common(1)
    lines = [HEAD, f"Statuses of errors, unless a route names others: {usual};", ERRORS, ""]
    lines += ["## Common fields", "", LEFT_OUT, ""]
    lines += _section("field", common)
    groups: dict[str, list[str]] = {}
    bodies: dict[str, list[Row]] = {}
    for method, path, operation, rows in routes:
        name, own = f"{method.upper()} {path}", [row for row in rows if row not in common]
        preamble = "[common fields](#common-fields)" if len(own) < len(rows) else ""
        for earlier, fields in bodies.items():
            if len(shared := [row for row in own if row in fields]) > max(4, len(fields) - 2):
                preamble = f"the fields of [{earlier}](#{_anchor(earlier)})"
                own = [row for row in own if row not in shared]
        bodies[name] = [row for row in rows if row not in common]
        parts = [_prose(operation), "", *_section("parameter", _parameters(operation))]
        parts += [f"Body: {preamble}{', and:' if own else '.'}", ""] if preamble else []
        errors = _errors(operation)
        failures = "" if errors == usual else f" Errors: {errors}."
        parts += [*_section("field", own), f"Answer: {_answer(operation)}.{failures}", ""]
        text = "\n".join(parts)
        example = "" if text in groups else curl(method, path, operation, schemas)
        groups.setdefault(text, [example]).append(name)
    for text, (example, name, *synonyms) in groups.items():
        lines += [f"## {name}", ""]
        lines += [f"Likewise `{'`, `'.join(synonyms)}`.", ""] if synonyms else []
        lines += [text, "```sh", example, "```", ""]
    return "\n".join([*lines, *_answers(schemas)]).rstrip() + "\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def _answers(schemas: Schema) -> Iterator[str]:
    """The types of answers; those of jobs name only what they have beside `JobStatus`."""
    job = set(_fields(schemas["JobStatus"], schemas))
    yield from ("## Types of answers", "")
    for name, schema in sorted(schemas.items()):
        if name.endswith("Request") or "properties" not in schema:
            continue
        yield from (f"### {name}", "")
        if sentence := _sentence(schema):
            yield from (sentence, "")
        rows = list(_fields(schema, schemas))
        if name != "JobStatus" and len(job.intersection(rows)) > len(rows) // 3:
            yield from ("The fields of [JobStatus](#jobstatus) above its `object`, and:", "")
            rows = [row for row in rows if row not in job]
        if any(row[3] for row in rows):
            yield from ("| field | type | meaning |", "| --- | --- | --- |")
            yield from (f"| `{field}` | {kind} | {text} |" for field, kind, _, text in rows)
        else:
            yield ", ".join(f"`{field}` ({kind})" for field, kind, *_ in rows) + "."
        yield ""


def _document() -> dict[str, Any]:
    """The OpenAPI document of the application with all routes, which does not run."""
    store = JobStore(None, ttl_s=1000, max_bytes=1 << 20, max_waiting=1)
    try:
        worker: Any = None
        runner = Runner(store, worker, {}, model=lambda: "model", max_running=1)
        return create_app(worker, ServeSettings(), runner).openapi()
    finally:
        store.close()


def _section(title: str, rows: Iterable[Row]) -> list[str]:
    table = [f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in rows]
    if not table:
        return []
    return [f"| {title} | type | default | meaning |", "| --- | --- | --- | --- |", *table, ""]


def _parameters(operation: Schema) -> Iterator[Row]:
    """Parameters of the query and of headers; those of the path are in the heading."""
    for parameter in operation.get("parameters", []):
        schema = parameter["schema"]
        if parameter["in"] == "path":
            continue
        text = parameter.get("description") or schema.get("description") or parameter["in"]
        yield (
            parameter["name"],
            _type(schema),
            _default(schema, bool(parameter.get("required"))),
            text,
        )


def _body(operation: Schema, schemas: Schema) -> Iterator[Row]:
    """Fields of the JSON body, or of the form if it has more."""
    content = operation.get("requestBody", {}).get("content", {})
    rows: dict[str, Row] = {}
    for kind in content.values():
        for row in _fields(_resolved(kind["schema"], schemas), schemas):
            rows.setdefault(row[0], row)
    yield from rows.values()


def _fields(schema: Schema, schemas: Schema) -> Iterator[Row]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        text = field.get("description") or _resolved(field, schemas).get("description", "")
        yield name, _type(field), _default(field, name in required), " ".join(text.split())


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    if "$ref" in schema:
        resolved: Schema = schemas[schema["$ref"].rpartition("/")[2]]
        return resolved
    return schema


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [_type(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
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
    return "" if schema.get("default") in (None, "") else f"`{schema['default']}`"


def _prose(operation: Schema) -> str:
    text = operation.get("description") or operation.get("summary", "")
    return f"{' '.join(text.split()).rstrip('.')}."


def _sentence(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())


def _answer(operation: Schema) -> str:
    """The statuses and types of success."""
    good = []
    for status, answer in operation.get("responses", {}).items():
        if status < "4":
            kinds = [
                _type(content["schema"]) if content.get("schema") else f"`{media}`"
                for media, content in answer.get("content", {}).items()
            ]
            good.append(f"{status} {' or '.join(kinds)}".strip())
    return ", ".join(sorted(good))


def _errors(operation: Schema) -> str:
    return ", ".join(sorted(s for s in operation.get("responses", {}) if s >= "4"))


if __name__ == "__main__":
    PAGE.write_text(page())
