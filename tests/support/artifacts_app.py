"""Fake workers whose models make meshes or sound."""

from dataclasses import replace
from typing import Any

import numpy as np

from carpool.artifacts import Mesh, Sound
from carpool.request.card import Card, Parameter, Task
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.protocol import Done
from support.app import CARD, Grey

MESHES, SOUND = "/v1/meshes", "/v1/audio/generations"
STEPS = Parameter("num_inference_steps", "int", default=4)
OF_PICTURES = Task("image-to-mesh", "Sphere", (STEPS, Parameter("image", "other", required=True)))
OF_WORDS = Task("text-to-mesh", "Sphere", (STEPS, Parameter("prompt", "str")))
BELL = Task("text-to-audio", "Bell", (STEPS, Parameter("prompt", "str"),
            Parameter("audio_end_in_s", "float")))  # fmt: skip
HUM = Task("text-to-audio", "Hum", (STEPS, Parameter("prompt", "str")))
VERTICES = np.eye(3, dtype=np.float32)
FACES = np.array([[0, 1, 2], [2, 1, 0]], np.uint32)


class Making(Grey):
    """Makes what its task names, at once."""

    def __init__(self, task: Task, **options: Any) -> None:
        super().__init__(**options)
        card: Card = replace(CARD, tasks=(task,), lora=())
        self.more: dict[str, Any] = {}  # of a mesh
        self.ready, self.makes = protocol.WorkerReady(card, {}, 0.0), task.makes

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        self.jobs.append(request)
        return protocol.Estimated(1.0, 0.0, 1.0)

    async def statistics(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 1e6}}

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> Done:
        done = await super().submit(request)
        done.pictures = []
        if self.makes == "meshes":
            done.mesh = Mesh(VERTICES, FACES, **self.more)
        else:
            samples = np.linspace(-1, 1, 1000, dtype=np.float32)
            done.sound = Sound(np.stack([samples, -samples]), 8000)
        return done
