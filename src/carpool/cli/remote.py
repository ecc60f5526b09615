"""`carpool generate --server URL`: the same on a running server, as jobs over HTTP."""

import base64
import mimetypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.cli.jobs import JobsClient
from carpool.errors import CarpoolError

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Made:
    """One file that a server made."""

    prompt: str
    seed: int
    content: bytes
    job: dict[str, Any]


def data_url(content: bytes, name: str) -> str:
    """A file as a `data:` URL."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def makes(server: JobsClient, model: str | None) -> str:
    """What the served model makes: pictures or videos.

    Raises:
        CarpoolError: it is not served there.
    """
    served = server.ask_at("GET", "v1/models")["data"]
    entry = served[0] if model is None else next((m for m in served if m["id"] == model), None)
    if entry is None:
        names = ", ".join(one["id"] for one in served)
        raise CarpoolError(f"the server has no model {model!r}: it serves {names}")
    return "videos" if entry["tasks"][0].endswith("-video") else "pictures"


def draw(
    server: JobsClient,
    prompts: Sequence[str],
    body: Mapping[str, Any],
    *,
    videos: bool,
    images: Sequence[str] = (),
    mask: str | None = None,
    with_bars: bool,
) -> Iterator[Made]:
    """Have a server draw; yields what it made, in the order of the prompts.

    Args:
        body: common to all requests.
        images, mask: `data:` URLs.
        with_bars: show a bar for each prompt on standard error.

    Raises:
        CarpoolError: a request was refused, or a job failed. The other jobs are cancelled.
    """
    path, pictures = ("v1/videos" if videos else "v1/images/generations"), dict[str, Any]()
    if videos and images:
        pictures["input_reference"] = {"image_url": images[0]}
    elif images:
        path, pictures["images"] = "v1/images/edits", [{"image_url": one} for one in images]
        if mask is not None:
            pictures["mask"] = {"image_url": mask}
    more = {} if videos else {"background_job": True}
    ids: list[str] = []
    try:
        with _bars(prompts, with_bars) as moved:
            for prompt in prompts:
                asked = {"prompt": prompt, **body, **pictures, **more}
                ids.append(server.ask_at("POST", path, json=asked)["id"])
            done: dict[str, dict[str, Any]] = {}
            while len(done) < len(ids):
                for place, one in enumerate(ids):
                    if one in done:
                        continue
                    job = server.ask("GET", one)
                    moved(place, job["progress"])
                    if job["status"] not in ("queued", "in_progress"):
                        done[one] = job
                        _check(job)
                time.sleep(POLL_S)
        for prompt, one in zip(prompts, ids, strict=True):
            names = [file["name"] for file in done[one]["files"]]
            wanted = [name for name in names if name.endswith(".mp4") or not videos]
            for name, seed in zip(wanted, done[one]["seeds"], strict=True):
                yield Made(prompt, seed, server.content(one, name), done[one])
        ids.clear()
    finally:
        for one in ids:  # it failed, or was interrupted: nobody waits for the rest
            try:
                server.ask("POST", one, "cancel")
            except CarpoolError:
                break


def _check(job: Mapping[str, Any]) -> None:
    if job["status"] != "completed":
        error = job["error"] or {}
        raise CarpoolError(f"job {job['id']} {job['status']}: {error.get('message', '')}")


@contextmanager
def _bars(prompts: Sequence[str], are_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar for each prompt; yields what moves one, in percent."""
    if not are_shown:
        yield lambda place, percent: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = [progress.add_task(prompt[:48], total=100) for prompt in prompts]
        yield lambda place, percent: progress.update(tasks[place], completed=percent)


def connect(url: str, api_key: str | None) -> "closing[JobsClient]":
    """A client of the server, to be closed."""
    return closing(JobsClient(url, api_key, flag="--server"))


def read(path: Path) -> bytes:
    """A file; an error says which."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CarpoolError(f"{path} cannot be read: {error.strerror}") from None
