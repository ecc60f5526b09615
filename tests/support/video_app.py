"""The application before a fake worker whose model makes videos."""

import base64
from dataclasses import replace
from typing import Any

import httpx2

from carpool.errors import PipelineFailed
from carpool.request.card import Card, Parameter, Task
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.protocol import Done, RawVideo
from support.app import CARD, AppClient, Grey
from support.endpoints import VIDEOS

OWN = (
    *(one for one in CARD.parameters if one.name not in ("width", "height", "num_frames")),
    Parameter("width", "int", default=64),
    Parameter("height", "int", default=64),
    Parameter("num_frames", "int", default=5),
)
TEXT = Task("text-to-video", "GreyVideo", OWN)
BEGINS = Task("image-to-video", "GreyImageToVideo", (*OWN, Parameter("image", "other")))
NEEDS = Task("image-to-video", "GreyOnly", (*OWN, Parameter("image", "other", required=True)))
SILENT = replace(CARD, tasks=(TEXT,))
MOVING = replace(CARD, tasks=(TEXT, BEGINS))


class Filming(Grey):
    """Makes grey videos at once; told to, it fails."""

    def __init__(self, card: Card = MOVING) -> None:
        super().__init__()
        self.ready = protocol.WorkerReady(card, {}, 0.0)
        self.is_broken = False

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> Done:
        done = await super().submit(request)
        if self.is_broken:
            raise PipelineFailed("it broke")
        return replace_clip(done, RawVideo(16, 16, 2, b"\x80" * 3 * 16 * 16 * 2))


def replace_clip(done: Done, clip: RawVideo) -> Done:
    done.clip, done.pictures = clip, []
    return done


def url_of(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


async def post(
    opened: AppClient, fields: Any = (), *, file: bytes | None = None, **body: Any
) -> httpx2.Response:
    """JSON, or a form where there are fields or a file."""
    if not body:
        form: dict[str, Any] = {n: (None, v) for n, v in {"prompt": "a", **dict(fields)}.items()}
        form |= {"input_reference": ("a.png", file)} if file is not None else {}
        return await opened.http.post(VIDEOS, files=form)
    return await opened.http.post(VIDEOS, json={"prompt": "a", **body})
