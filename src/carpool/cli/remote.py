"""`carpool generate --url URL`: draw on a running server, by jobs over HTTP."""

import base64
import mimetypes
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

from carpool.cli.bars import AdvanceBar, Previews, bars
from carpool.cli.jobs import ServerClient
from carpool.errors import CarpoolError, Overloaded

POLL_S = 0.2
PREVIEWS = 3  # previews of a picture; the limit of a request
OPEN = ("queued", "in_progress")
PATHS = {
    "pictures": "v1/images/generations",
    "videos": "v1/videos",
    "meshes": "v1/meshes",
    "sound": "v1/audio/generations",
}
THUMBNAIL = "thumbnail.webp"


@dataclass(frozen=True, slots=True)
class ServerFile:
    """One file that a server made."""

    place: int  # index among all files, from 0
    prompt: str
    seed: int
    content: bytes
    thumbnail: bytes | None  # videos only
    job: dict[str, Any]


def data_url(content: bytes, name: str) -> str:
    """A file as a `data:` URL."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def makes(server: ServerClient, model: str | None) -> str:
    """Return "pictures", "videos", "meshes" or "sound": the served model's kind of output.

    Raises:
        CarpoolError: the server does not have the model.
    """
    served = server.ask_at("GET", "v1/models")["data"]
    entry = served[0] if model is None else next((m for m in served if m["id"] == model), None)
    if entry is None:
        names = ", ".join(model["id"] for model in served)
        raise CarpoolError(f"the server has no model {model!r}: it serves {names}")
    kinds = {"video": "videos", "mesh": "meshes", "audio": "sound"}
    return kinds.get(entry["tasks"][0].rpartition("-")[2], "pictures")


def draw(
    server: ServerClient,
    prompts: Sequence[str],
    body: Mapping[str, Any],
    *,
    kind: str,
    images: Sequence[str] = (),
    mask: str | None = None,
    are_shown: bool = False,
) -> Iterator[ServerFile]:
    """Draw on a server, with a bar for each prompt; yields the files in the order of prompts.

    Args:
        body: fields of all requests.
        kind: the result of `makes`.
        images, mask: `data:` URLs.
        are_shown: show previews of pictures below the bars.

    Raises:
        CarpoolError: a request was refused (earlier requests are cancelled), or a job failed (the
            files of all other jobs have been yielded).
    """
    path, fields = PATHS[kind], dict[str, Any]()
    if kind in ("pictures", "sound"):
        fields["background_job"] = True
    if kind != "pictures" and images:
        fields["input_reference"] = {"image_url": images[0]}
    elif images:
        path, fields["images"] = "v1/images/edits", [{"image_url": image} for image in images]
        if mask is not None:
            fields["mask"] = {"image_url": mask}
    n, is_over = int(body.get("n", 1)), Event()
    jobs = _Jobs(server, prompts, path, {**body, **fields})
    previews = Previews() if are_shown and kind == "pictures" else None
    if previews is not None:
        jobs.body["partial_images"] = PREVIEWS
        following = server, jobs.ids, previews, is_over
        Thread(target=_follow, args=following, daemon=True).start()
    try:
        names = [f"{prompt} ({n} pictures)" if n > 1 else prompt for prompt in prompts]
        with bars(names, previews) as move:
            jobs.run(move)
        yield from jobs.made(n, videos=kind == "videos")
        for job in map(jobs.ended.__getitem__, jobs.ids):
            if job["status"] != "completed":
                message = (job["error"] or {}).get("message", "")
                raise CarpoolError(f"job {job['id']} {job['status']}: {message}")
    finally:
        is_over.set()
        jobs.cancel()


class _Jobs:
    """The jobs of one command: one for each prompt, in their order."""

    def __init__(
        self, server: ServerClient, prompts: Sequence[str], path: str, body: dict[str, Any]
    ) -> None:
        self._server, self._prompts, self._path, self.body = server, prompts, path, body
        self.ids: list[str] = []  # ids of accepted jobs
        self.ended: dict[str, dict[str, Any]] = {}  # last state of ended jobs

    def run(self, move: AdvanceBar) -> None:
        """Submit all jobs and wait for their end; `move` shows the progress."""
        while len(self.ended) < len(self._prompts):
            self._submit()
            for place, job_id in enumerate(self.ids):
                if job_id not in self.ended:
                    self._look(place, job_id, move)
            if len(self.ended) < len(self._prompts):
                time.sleep(POLL_S)

    def _submit(self) -> None:
        try:
            for prompt in self._prompts[len(self.ids) :]:
                body = self.body | ({"prompt": prompt} if prompt else {})
                job = self._server.ask_at("POST", self._path, json=body)
                self.ids.append(job["id"])
        except Overloaded:  # a long list is not an overload: the rest follows later
            if len(self.ended) == len(self.ids):
                raise

    def _look(self, place: int, job_id: str, move: AdvanceBar) -> None:
        job = self._server.ask("GET", job_id)
        is_open = job["status"] in OPEN
        if job["status"] != "queued":
            move(place, min(job["progress"] / 100, 0.99) if is_open else 1)
        if not is_open:
            self.ended[job_id] = job

    def made(self, n: int, *, videos: bool) -> Iterator[ServerFile]:
        """The files of the completed jobs, n of each."""
        for place, (prompt, job_id) in enumerate(zip(self._prompts, self.ids, strict=True)):
            job = self.ended[job_id]
            if job["status"] != "completed":
                continue
            names = [file["name"] for file in job["files"]]
            contents = [name for name in names if name.endswith(".mp4") or not videos]
            has_thumbnail = videos and THUMBNAIL in names
            small = self._server.content(job_id, THUMBNAIL) if has_thumbnail else None
            for part, (name, seed) in enumerate(zip(contents, job["seeds"], strict=True)):
                content = self._server.content(job_id, name)
                yield ServerFile(place * n + part, prompt, seed, content, small, job)

    def cancel(self) -> None:
        """Cancel unfinished jobs: their results are not needed."""
        with suppress(CarpoolError):
            for job_id in self.ids:
                if job_id not in self.ended:
                    self._server.ask("POST", job_id, "cancel")


def _follow(server: ServerClient, ids: Sequence[str], previews: Previews, is_over: Event) -> None:
    """Update the previews of these jobs; a job with several pictures shows the newest."""
    from carpool.media import read_picture

    with suppress(CarpoolError):  # previews are not worth an error
        for kind, data in server.events():
            if is_over.is_set():
                return
            if kind == "preview" and data["id"] in ids:
                picture = read_picture(BytesIO(base64.b64decode(data["webp"])))
                previews[ids.index(data["id"])] = picture


def read(path: Path) -> bytes:
    """Read a file; an error names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CarpoolError(f"{path} cannot be read: {error.strerror}") from None
