"""Worker processes of the Python API, for `carpool.load(workers=N)`.

`WorkerEngine` has the methods of `EngineCore` that `Engine`, its handles and its jobs use. An event
loop on its own thread runs the same pool that a server has. Arguments must be JSON values or PIL
images; outputs are PIL images.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from carpool import errors
from carpool.engine.request import Listener, Outcome
from carpool.errors import CarpoolError, LoraRejected, reason
from carpool.fleet.local import WorkerOptions, local_pool
from carpool.fleet.models import ModelSpec
from carpool.fleet.pool import Pool
from carpool.request.adapter_names import split_target
from carpool.request.lora import adapter_file, check_header, check_name
from carpool.types import CheckedRequest, Event, Timings
from carpool.worker import encoding, protocol
from carpool.worker.start import ForkingStarter

T = TypeVar("T")
_LORA_S = 120.0  # timeout of an adapter's registration in all workers


class WorkerEngine:
    """A pool of worker processes. Thread-safe.

    Args:
        timeout_s: see `Supervisor`.

    Raises:
        LoadFailed: a worker cannot load the model; all workers are stopped.
    """

    def __init__(self, spec: ModelSpec, timeout_s: float = 60.0) -> None:
        self._spec, self._timeout_s, self._closed = spec, timeout_s, threading.Event()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="carpool-workers", daemon=True)
        self._thread.start()
        try:
            self._pool = self._ask(self._started())
        except BaseException:
            self._end_loop()
            raise

    async def _started(self) -> Pool:
        self._starter = ForkingStarter()
        options = WorkerOptions(timeout_s=self._timeout_s, start=self._starter.start)
        pool = local_pool(self._spec, options)
        self._running = pool.start()
        ready = asyncio.create_task(pool.wait_ready())
        await asyncio.wait({ready, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await pool.stop()
            await self._starter.close()
            self._running.result()  # raises
        return pool

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()

    # Methods of `EngineCore`

    @property
    def loaded(self) -> protocol.WorkerReady:
        assert self._pool.ready is not None
        return self._pool.ready

    def run(self, entered: Callable[[], None]) -> None:
        """Return after `close`; `entered` as in `EngineCore.run`: this process is not patched."""
        entered()
        self._closed.wait()

    def submit(self, request: CheckedRequest, listener: Listener) -> None:
        """See `EngineCore.submit`.

        Raises:
            UnsupportedParameter: the output type cannot be sent between processes.
        """
        output_type = request.arguments.get("output_type", request.output_type)
        if output_type not in ("pil", None):
            rule = "worker processes give PIL images: load without workers= for others"
            raise errors.UnsupportedParameter(
                f"output_type={output_type!r}: {rule}", param="output_type"
            )
        if self._closed.is_set():
            raise errors.Draining("the engine is closing and takes no new requests")
        file_type = self.loaded.card.task(request.task).file_type
        self._ask(self._begin(replace(request, output_type=file_type), listener))

    async def _begin(self, request: CheckedRequest, listener: Listener) -> None:
        self._pool.check_open()
        self._pool.check_room()
        listener.event(Event("queued", request.request_id, time.monotonic()))
        task = asyncio.create_task(self._live(request, listener))
        self._requests[request.request_id] = task

    async def _live(self, request: CheckedRequest, listener: Listener) -> None:
        """Run one request, and pass its events to the listener."""
        fields: dict[str, Any] = {}
        error: Exception | None = None
        result, has_started = None, False

        def emit(kind: Any, step: int = 0, steps: int = 0, **details: Any) -> None:
            nonlocal has_started
            now_s = time.monotonic()
            if not has_started and kind != "finished":
                has_started = True
                listener.event(Event("started", request.request_id, now_s))
            listener.event(Event(kind, request.request_id, now_s, step, steps, **details))

        def progressed(step: int, steps: int) -> None:
            if steps:
                emit("step", step, steps)

        def previewed(message: protocol.Preview) -> None:
            picture = None
            if message.picture is not None:
                size = message.picture.height, message.picture.width, 3
                picture = np.frombuffer(message.picture.rgb, np.uint8).reshape(size)
            kind = "prompt" if message.is_prompt else "preview"
            emit(kind, message.step, message.steps, picture=picture, text=message.text)

        try:
            result = await self._pool.submit(request, progressed, previewed)
            fields = await asyncio.to_thread(_fields, result)
        except asyncio.CancelledError:
            error = errors.Cancelled("the request was cancelled")
        except CarpoolError as failure:
            error = failure
        except TypeError as failure:  # msgpack cannot encode an argument
            error = errors.InvalidValue(f"{reason(failure)}: load without workers= for that")
        except Exception as failure:
            error = errors.PipelineFailed(f"{type(failure).__name__}: {reason(failure)}")
        finally:
            del self._requests[request.request_id]
            warnings = tuple(result.warnings) if result else ()
            extras = (warnings, result.skipped_steps, result.settings) if result else ()
            timings = result.timings if result else Timings()
            listener.done(Outcome(request, fields, error, timings, *extras))
            emit("finished", error=error)

    def together(self) -> AbstractContextManager[object]:
        """Do nothing: workers start each request on arrival."""
        return nullcontext()

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """Cancel a request before its next forward."""

        def cancel() -> None:
            if (task := self._requests.get(request_id)) is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Register an adapter on all workers, while requests run.

        Raises:
            LoraRejected: the name is taken, or the file is not a LoRA for this model.
        """
        check_name(name, list(self.loaded.card.lora))
        place, target = split_target(str(path))
        file = Path(place).expanduser().absolute()
        try:
            check_header(adapter_file(file))
        except OSError as error:
            raise LoraRejected(f"adapter {name!r}: {error}") from error
        added = self._pool.add_lora(name, f"{file}@{target}" if target else str(file))
        try:
            self._ask(asyncio.wait_for(added, _LORA_S))
        except TimeoutError:
            raise LoraRejected(f"adapter {name!r}: not read within {_LORA_S:g} s") from None

    def statistics(self) -> dict[str, Any]:
        """Statistics: the sums, and each worker's own."""
        return self._ask(self._pool.statistics())

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        timelines = self._ask(self._pool.timelines([request_id]))
        return timelines[0] if timelines else None

    def close(self) -> None:
        """Cancel running requests, and stop the workers."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ask(self._stop())
        self._end_loop()

    async def _stop(self) -> None:
        for task in list(self._requests.values()):
            task.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
        await self._pool.stop()
        await self._starter.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _fields(result: protocol.Done) -> dict[str, Any]:
    """Convert a worker's message to the fields of a pipeline's output."""
    if result.text is not None:
        return result.text.fields()
    if result.mesh is not None:
        return {"meshes": [result.mesh]}
    if (sound := result.sound) is not None:
        return {"audios": sound.samples[None], "sampling_rate": sound.rate}
    if (clip := result.clip) is None:
        return {"images": [encoding.image_of(picture) for picture in result.pictures]}
    size = clip.width * clip.height * 3
    frames = [
        encoding.image_of(protocol.Picture(clip.width, clip.height, clip.rgb[at : at + size]))
        for at in range(0, size * clip.length, size)
    ]
    fields: dict[str, Any] = {"frames": [frames]}
    if clip.sound is not None:
        fields |= {"audio": clip.sound.samples[None], "sampling_rate": clip.sound.rate}
    return fields
