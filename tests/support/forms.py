"""Forms with pictures, sent to the application before a fake worker whose model edits."""

from dataclasses import replace
from typing import Any

import httpx2

from carpool.request.card import Card, Parameter, Task
from carpool.worker import protocol
from support.app import CARD, Grey, ask
from support.endpoints import EDITS
from support.pictures import png

OWN = CARD.tasks[0]
LISTS = (
    Parameter("original_size", "other", also=("list",)),
    Parameter("control_scale", "float", also=("numbers",)),
    Parameter("attention_kwargs", "dict"),
)
CHANGE = Task(
    "image-to-image", "GreyImg2Img", (*OWN.parameters, *LISTS, Parameter("image", "other"))
)
FILL = Task("inpaint", "GreyInpaint", (*CHANGE.parameters, Parameter("mask_image", "other")))
BOTH = replace(CARD, tasks=(OWN, CHANGE, FILL), max_pixels=64 * 64)
FREE = tuple(one for one in CHANGE.parameters if one.name != "strength")
SEVERAL = replace(CARD, tasks=(Task("edit", "GreyEdit", FREE, max_images=3),))
PICTURE = ("image", png())


def worker_of(card: Card) -> Grey:
    worker = Grey()
    worker.ready = protocol.WorkerReady(card, {}, 0.0)
    return worker


def send(
    files: Any,
    *,
    worker: Grey | None = None,
    path: str = EDITS,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> httpx2.Response:
    fields = {"prompt": "a", **fields} if path == EDITS else fields
    named = [(name, ("a.png", content)) for name, content in files]
    form = httpx2.Request("POST", "http://localhost", data=fields, files=named)
    kind = {"content-type": form.headers["content-type"]}
    worker = worker or worker_of(BOTH)
    return ask(form.read(), path, worker=worker, headers=kind, **(settings or {}))
