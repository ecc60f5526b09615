"""Prints the address of a ready `carpool serve`, and an example command.

The command fits the model's card: a clip is a job, an edit sends a picture.
"""

import importlib.util
import json
import logging
from typing import Any

import click

from carpool.config import ServeSettings
from carpool.fleet.fleet import Fleet
from carpool.request.card import Card, Task
from carpool.server.draining import DrainingServer, url_host
from carpool.worker import protocol

log = logging.getLogger("carpool")

PROMPT = "a red circle on a blue background"
_PLAIN: dict[str, Any] = {"int": 1, "float": 1.0, "bool": True, "str": PROMPT}
_JOBS = {"videos": ".mp4", "meshes": ".glb"}
_JSON = "-H 'content-type: application/json'"
_READ = "python3 -c 'import json, sys; print(json.load(sys.stdin)[\"id\"])'"
_DECODE = (
    "python3 -c 'import base64, json, sys; "
    'sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))\''
)


def _where(ready: protocol.WorkerReady | None) -> str:
    """A line with the model's device and its free memory, or an empty text."""
    if ready is None or not ready.device:
        return ""
    memory = "" if ready.free_bytes is None else f"; {_gib(ready.free_bytes)} of memory left"
    return f"On {ready.device}: {_gib(ready.weights_bytes)} of weights{memory}\n"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2g} GiB" if size_bytes >= 2**30 else f"{size_bytes >> 20} MiB"


def missing_library(card: Card) -> str | None:
    """A message about a missing library that the model's answers need; None: none missing."""
    makes_videos = any(task.makes == "videos" for task in card.tasks)
    if makes_videos and importlib.util.find_spec("av") is None:
        return f"{card.id}: videos need PyAV, so requests for one are refused: pip install av"
    return None


def example(card: Card | None, url: str, curl: str, model: str | None = None) -> str:
    """A command to paste that draws with a model.

    Args:
        card: card of the model; None: not loaded yet.
        curl: the curl command with its connection options.
        model: name of the model, if the server has several.
    """
    task = card.tasks[0] if card is not None else None
    makes = task.makes if task is not None else "pictures"
    body = _body(task) | ({} if model is None else {"model": model})
    has_picture = _needs(task, "image")

    def sent(path: str, fields: dict[str, Any]) -> str:
        return f"{curl} {url}/v1/{path} {_JSON} \\\n  -d '{json.dumps(fields)}'"

    if makes == "sound":
        return f"{sent('audio/generations', body)} > out.wav\n"
    if makes == "text":
        talk = {**body, "messages": [{"role": "user", "content": "What is drawn here?"}]}
        talk.pop("prompt")
        return f"{sent('chat/completions', talk)}\n"
    if makes in _JOBS:
        form = f"{curl} {url}/v1/{makes} {_form('input_reference', body)}"
        at = f"{url}/v1/{makes}/$id"
        return (
            f"id=$({form if has_picture else sent(makes, body)} \\\n  | {_READ})\n"
            f"while {curl} {at} | grep -qE '\"(queued|in_progress)\"'; do sleep 1; done\n"
            f"{curl} {at}/content > out{_JOBS[makes]}\n"
        )
    command = sent("images/generations", body)
    if has_picture:
        mask = " -F mask=@mask.png" if _needs(task, "mask_image") else ""
        command = f"{curl} {url}/v1/images/edits {_form('image', body)}{mask}"
    return f"{command} \\\n  | {_DECODE} > out.png\n"


def _form(picture: str, body: dict[str, Any]) -> str:
    fields = " ".join(f"-F '{name}={value}'" for name, value in body.items())
    return f"-F {picture}=@picture.png {fields}".rstrip()


def _body(task: Task | None) -> dict[str, Any]:
    """The shortest body that a task takes."""
    required = {} if task is None else {p.name: p.kind for p in task.parameters if p.required}
    plain = {name: _PLAIN[kind] for name, kind in required.items() if kind in _PLAIN}
    takes_words = (
        task is None or task.makes != "meshes" or "prompt" in {p.name for p in task.parameters}
    )
    return ({"prompt": PROMPT} if takes_words else {}) | plain


def _needs(task: Task | None, picture: str) -> bool:
    return task is not None and any(
        parameter.name == picture and parameter.required for parameter in task.parameters
    )


async def greet(fleet: Fleet, server: DrainingServer, settings: ServeSettings) -> None:
    """Print the address of the model, with a command that works when pasted."""
    ready = await fleet.wait_ready() if fleet.loads_at_start else None
    await server.is_up.wait()
    model = None  # the model of the command: the first one that is loaded
    if len(fleet.deployments) > 1:
        model = min(fleet.deployments, key=lambda name: fleet.deployments[name].ready is None)
        ready = fleet.deployments[model].ready
    url, where = "http://localhost", f"unix:{settings.uds}"
    if settings.uds is None:
        where = url = f"http://{url_host(settings.host)}:{server.port()}"
    uds = "" if settings.uds is None else f"--unix-socket {settings.uds} "
    key = "-H 'authorization: Bearer KEY'" if settings.has_keys else ""
    name = ", ".join(fleet.names)
    pipeline = f"{f'{model}: ' if model else ''}{ready.card.pipeline}" if ready else ""
    loaded = f" ({pipeline}, loaded in {ready.load_s:.1f} s)" if ready else ""
    serving = f"Serving {name}{loaded} at {where}"
    if ready is not None and (warning := missing_library(ready.card)) is not None:
        log.warning("%s", warning)
    if settings.log_format == "json":
        log.info("%s", serving)
        return
    command = example(ready.card if ready else None, url, f"curl -s {uds}{key}".strip(), model)
    click.echo(
        f"{serving}\n{_where(ready)}"
        + (f"Playground: {url}/\n" if settings.playground and settings.uds is None else "")
        + f"\n{command}"
    )
