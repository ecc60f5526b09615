"""A worker for the application in the test's process: it runs each job on an engine of its own."""

from typing import Any

import numpy as np

from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from support.app import Grey
from support.engine_driver import Drive, Recorder


class EngineWorker(Grey):
    """Runs each job on the engine before it lets anything else happen."""

    def __init__(self, drive: Drive) -> None:
        super().__init__()
        self._drive = drive
        self.ready = protocol.WorkerReady(drive.engine.loaded.card, {}, 0.0)

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        self.jobs.append(request)
        recorder = Recorder()
        self._drive.engine.submit(request, recorder)
        self._drive.finish()
        if recorder.error is not None:
            raise recorder.error
        fields = recorder.outcome.fields
        done = protocol.Done(
            request.request_id, request.seed, [], Timings(), protocol.TokenUsage(1, 1)
        )
        done.warnings = list(recorder.outcome.warnings)
        done.settings = dict(recorder.outcome.settings)
        if "frames" in fields:
            video = np.stack([np.asarray(frame.convert("RGB")) for frame in fields["frames"][0]])
            length, height, width, _ = video.shape
            done.clip = protocol.RawVideo(width, height, length, video.tobytes())
        else:
            images = (image.convert("RGB") for image in fields["images"])
            done.pictures = [
                protocol.Picture(one.width, one.height, one.tobytes()) for one in images
            ]
        return done
