"""`carpool generate --server URL`: the same on a running server, as jobs over HTTP."""

import base64
import mimetypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from carpool.cli.bars import Previews, bars
from carpool.cli.jobs import JobsClient
from carpool.errors import CarpoolError, Overloaded

POLL_S = 0.2
PREVIEWS = 3  # of a picture: the most that a request may ask for
OPEN = ("queued", "in_progress")
THUMBNAIL = "thumbnail.webp"


@dataclass(frozen=True, slots=True)
class Made:
    """One file that a server made."""

    place: int  # among all, from 0
    prompt: str
    seed: int
    content: bytes
    thumbnail: bytes | None  # of a video
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
    are_shown: bool = False,
) -> Iterator[Made]:
    """Have a server draw, with a bar for each prompt; yields what it made, in their order.

    Args:
        body: common to all requests.
        images, mask: `data:` URLs.
        are_shown: show previews of pictures below the bars.

    Raises:
        CarpoolError: a request was refused, and those before it are cancelled; or a job failed,
            and what the others made has been yielded.
    """
    path, pictures = ("v1/videos" if videos else "v1/images/generations"), dict[str, Any]()
    if videos and images:
        pictures["input_reference"] = {"image_url": images[0]}
    elif images:
        path, pictures["images"] = "v1/images/edits", [{"image_url": one} for one in images]
        if mask is not None:
            pictures["mask"] = {"image_url": mask}
    more, n = dict[str, Any](), int(body.get("n", 1))
    if not videos:
        more["background_job"] = True
    previews = Previews() if are_shown and not videos else None
    if previews is not None:
        more["partial_images"] = PREVIEWS
    done: dict[str, dict[str, Any]] = {}
    ids: list[str] = []
    is_over = threading.Event()
    if previews is not None:
        follow = threading.Thread(
            target=_follow, args=[server, ids, previews, is_over], daemon=True
        )
        follow.start()
    try:
        names = [f"{prompt} ({n} pictures)" if n > 1 else prompt for prompt in prompts]
        with bars(names, previews) as move:
            while len(done) < len(prompts):
                try:
                    for prompt in prompts[len(ids) :]:
                        asked = {"prompt": prompt, **body, **pictures, **more}
                        ids.append(server.ask_at("POST", path, json=asked)["id"])
                except Overloaded:  # a long list is no overload: the rest comes when some are done
                    if len(done) == len(ids):
                        raise
                for place, one in enumerate(ids):
                    if one in done:
                        continue
                    job = server.ask("GET", one)
                    is_open = job["status"] in OPEN
                    if job["status"] != "queued":
                        move(place, min(job["progress"] / 100, 0.99) if is_open else 1)
                    if not is_open:
                        done[one] = job
                if len(done) < len(prompts):
                    time.sleep(POLL_S)
        for place, (prompt, one) in enumerate(zip(prompts, ids, strict=True)):
            if done[one]["status"] != "completed":
                continue
            names = [file["name"] for file in done[one]["files"]]
            wanted = [name for name in names if name.endswith(".mp4") or not videos]
            small = server.content(one, THUMBNAIL) if videos and THUMBNAIL in names else None
            for part, (name, seed) in enumerate(zip(wanted, done[one]["seeds"], strict=True)):
                content = server.content(one, name)
                yield Made(place * n + part, prompt, seed, content, small, done[one])
        for one in ids:
            _check(done[one])
    finally:
        is_over.set()
        for one in ids:  # it was refused or interrupted: nobody waits for the rest
            if one not in done:
                try:
                    server.ask("POST", one, "cancel")
                except CarpoolError:
                    break


def _follow(
    server: JobsClient, ids: Sequence[str], previews: Previews, is_over: threading.Event
) -> None:
    """Keep the previews of these jobs; where several pictures belong to one, the newest."""
    from carpool.media import read_picture

    for kind, data in server.events():
        if is_over.is_set():
            return
        if kind == "preview" and data["id"] in ids:
            picture = read_picture(BytesIO(base64.b64decode(data["webp"])))
            previews.put(ids.index(data["id"]), picture)


def _check(job: Mapping[str, Any]) -> None:
    if job["status"] != "completed":
        error = job["error"] or {}
        raise CarpoolError(f"job {job['id']} {job['status']}: {error.get('message', '')}")


def connect(url: str, api_key: str | None) -> "closing[JobsClient]":
    """A client of the server, to be closed."""
    return closing(JobsClient(url, api_key, flag="--server"))


def read(path: Path) -> bytes:
    """A file; an error says which."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CarpoolError(f"{path} cannot be read: {error.strerror}") from None
