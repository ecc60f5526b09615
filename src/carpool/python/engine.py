"""The Python API: load a model, generate, follow and cancel requests.

with carpool.load("shapes") as engine:
    for output in engine.generate(["a red circle", "a blue star"], num_inference_steps=12):
        output.images[0].save(f"{output.seed}.png")
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from tqdm.auto import tqdm

from carpool.config import ServeSettings, load_settings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.loop import EngineCore
from carpool.engine.model.libraries import quiet_libraries
from carpool.engine.model.load import load as load_pipeline
from carpool.errors import CarpoolError, Draining, Forked, InvalidValue, Overloaded, SettingRejected
from carpool.python.handle import Handle, Loop, OnEvent, Output, check_owner
from carpool.python.settings import LoadSettings
from carpool.request.card import Card
from carpool.request.expand import MAX_N, check_previews, grouped, merged, outputs_each, repeated
from carpool.request.lora import check_name
from carpool.request.own_values import check_n
from carpool.request.parameters import check
from carpool.settings.engine import OF_FILES
from carpool.types import CheckedRequest, Event, Request

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from carpool.jobs.store import JobStore
    from carpool.python.jobs import Jobs
    from carpool.python.workers import WorkerEngine


class Engine:
    """A loaded model that runs many requests concurrently, on its own thread."""

    def __init__(
        self, loop: Loop, settings: ServeSettings, store: "JobStore | None" = None
    ) -> None:
        self._loop, self._settings = loop, settings
        self._pid = os.getpid()
        self._jobs: Jobs | None = None
        self._making = threading.Lock()
        entered = threading.Event()
        run = partial(loop.run, entered.set)
        self._thread = threading.Thread(target=run, name="carpool-engine", daemon=True)
        self._thread.start()
        entered.wait()  # its library patches must be done before the caller continues
        if store is not None:
            self._jobs = self._make_jobs(store)

    @property
    def card(self) -> Card:
        """The model's card: its parameters, sizes and defaults."""
        return self._loop.loaded.card

    @property
    def jobs(self) -> "Jobs":
        """Jobs are accepted at once, and their outputs become files.

        With a `state_dir` they survive the process; without it, closing the engine deletes them.

        Raises:
            Draining: the engine is closed.
        """
        check_owner(self._pid)
        with self._making:
            if self._jobs is None:
                if not self._thread.is_alive():
                    raise Draining("the engine was closed and takes no jobs")
                from carpool.python.jobs import open_store

                self._jobs = self._make_jobs(open_store(self._settings))
            return self._jobs

    def _make_jobs(self, store: "JobStore") -> "Jobs":
        from carpool.python.jobs import Jobs

        return Jobs(self._loop, self._thread.is_alive, self._settings, store)

    def submit(
        self, request: Request | str, *, partial_images: int = 0, **parameters: Any
    ) -> Handle:
        """Start a request and return at once.

        Args:
            request: one prompt, or a `Request`.
            partial_images: most `preview` events, if the model supports previews.
            parameters: `seed`, `timeout_s`, and parameters of the pipeline's `__call__`; values in
                a `Request` win.

        Raises:
            Rejected: the request is invalid; nothing was started.
            Overloaded: the queue is full; retry after `retry_after_s`.
        """
        single, *rest = repeated(merged(request, parameters))
        if rest:
            raise InvalidValue(f"the request has {1 + len(rest)} outputs: generate takes it")
        checked = check(self.card, single)
        return self._start(replace(checked, previews=check_previews(partial_images)))

    def generate(
        self,
        requests: Request | str | Sequence[Request | str],
        *,
        n: int = 1,
        return_errors: bool = False,
        progress: bool | Callable[[int, Event], object] | None = None,
        partial_images: int = 0,
        **parameters: Any,
    ) -> list[Output]:
        """Run requests concurrently and wait for all of them.

        Args:
            requests: a prompt, a `Request`, or a list of them. The `prompt` and `negative_prompt`
                of a `Request` may be lists, with one entry for each prompt.
            n: outputs of each prompt, with seeds s, s+1, ...; alias: `num_images_per_prompt`.
            return_errors: return an `Output` with `error` for failed requests instead of raising.
            progress: show a bar; default: on a terminal, if several requests run. Or a function
                that the engine's thread calls with the index of an output and each of its events.
                If it raises, the error is logged, and it gets no more events of that output.
            partial_images, parameters: apply to all requests, see `submit`.

        Returns:
            The outputs in the order of requests, prompts and seeds.

        Raises:
            Rejected: a request is invalid; nothing was started.
            CarpoolError: the first failure, after all requests have ended.
            Forked: this process is a fork of the one that loaded the model.
        """
        if isinstance(requests, (Request, str)):
            requests = [requests]
        if not requests:
            raise InvalidValue("the list of prompts is empty: give at least one", param="prompt")
        check_n(n, MAX_N)
        previews = check_previews(partial_images)
        singles: list[CheckedRequest | Output] = []
        for item in requests:
            request = merged(item, parameters)
            count = n
            try:
                copies = list(repeated(request, n))
                count = len(copies)
                checked = [replace(check(self.card, copy), previews=previews) for copy in copies]
                singles += grouped(checked, outputs_each(request, n))
            except CarpoolError as error:
                if not return_errors:
                    raise
                singles += [Output(request.request_id, request.seed, error=error)] * count
        return self._run_all(singles, return_errors, progress)

    def _run_all(
        self,
        requests: Sequence[CheckedRequest | Output],
        return_errors: bool,
        progress: bool | Callable[[int, Event], object] | None,
    ) -> list[Output]:
        check_owner(self._pid)  # before a lock that the engine's thread may have held at the fork
        checked = [request for request in requests if isinstance(request, CheckedRequest)]
        steps = sum(self.card.steps(request.arguments) for request in checked)
        by_default = progress is None and len(requests) > 1 and sys.stderr.isatty()
        handles: list[Handle | Output] = []
        with tqdm(total=steps, unit="step", disable=not (progress is True or by_default)) as bar:
            follow = progress if callable(progress) else partial(_advance, bar)
            follows = [partial(follow, place) for place in range(len(requests))]
            try:
                with self._loop.together(), contextlib.suppress(Overloaded):
                    for request, listen in zip(requests, follows, strict=True):
                        handles.append(self._start_or_refuse(request, listen))
                for request in requests[len(handles) :]:  # the rest waits for places in the queue
                    listen = follows[len(handles)]
                    handles.append(self._start_or_refuse(request, listen, handles))
                outputs = [_output_of(handle) for handle in handles]
            except BaseException:  # interrupted: the results are no longer needed
                for handle in handles:
                    if isinstance(handle, Handle):
                        handle.cancel()
                raise
        if not return_errors:
            for output in outputs:
                if output.error is not None:
                    raise output.error
        return outputs

    def _start_or_refuse(
        self,
        request: CheckedRequest | Output,
        follow: OnEvent,
        before: Sequence[Handle | Output] = (),
    ) -> Handle | Output:
        """Start one request of a list; a refusal becomes its output, so other requests continue.

        If the queue is full, ends of requests `before` make room: a long list is no overload.
        """
        if isinstance(request, Output):
            return request
        while True:
            try:
                return self._start(request, follow)
            except Overloaded as full:
                futures = [h._listener.future for h in before if isinstance(h, Handle)]
                running = [future for future in futures if not future.done()]
                if not running:
                    raise
                wait(running, timeout=full.retry_after_s, return_when="FIRST_COMPLETED")
            except Forked:
                raise
            except CarpoolError as refused:
                return Output(request.request_id, request.seed, error=refused)

    def _start(self, request: CheckedRequest, follow: OnEvent | None = None) -> Handle:
        check_owner(self._pid)
        return Handle(request, self._loop, follow)

    def add_lora(self, name: str, path: str | Path, *, target: str | None = None) -> None:
        """Register an adapter while requests run; new requests may use `lora=[{"id": name}]`.

        Args:
            name: its name in requests; letters, digits, '.', '_' and '-'.
            path: a .safetensors file in any layout that diffusers reads, or its folder.
            target: for models with two experts, the adapter's expert: `transformer` (high noise) or
                `transformer_2`; default: by the file's content or name, otherwise the first.

        Raises:
            LoraRejected: the name is taken, or the file is not a LoRA for this model.
        """
        check_owner(self._pid)
        self._loop.add_lora(name, path if target is None else f"{path}@{target}")

    def statistics(self) -> dict[str, Any]:
        """Statistics: running and waiting requests, forwards so far; see `carpool.engine.loop`."""
        return self._loop.statistics()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """The timeline of a request: its phases, waits, and the requests that shared its forwards.

        Times are seconds since its submission; fields that end in `_at` are Unix time. The waits
        are the durations of other forwards meanwhile: `place_in_forward`, compatible forwards that
        were full; `incompatible_forwards`, forwards of its module that it could not share;
        `other_modules`, all others. None if unknown or older than the last thousand requests.
        """
        return self._loop.timeline(request_id)

    def close(self) -> None:
        """Cancel running requests and restore the model's modules.

        If the engine's thread blocks in the pipeline's own code, for example on a lock that no
        request will release, the thread is abandoned.

        Unfinished jobs stay in their `state_dir`, for the next engine that opens it.
        """
        check_owner(self._pid)
        with self._making:
            if self._jobs is not None:
                self._jobs.close()
                self._jobs = None
            self._loop.close()
            if not (isinstance(self._loop, EngineCore) and self._loop.wait_end().is_stuck):
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    model: "str | Path | DiffusionPipeline" = "shapes",
    *,
    lora: Mapping[str, str | Path] | Sequence[str] = (),
    **settings: Unpack[LoadSettings],
) -> Engine:
    """Load a model and start an engine for it.

    Args:
        model: "shapes" (embedded), a hub id, a local folder in diffusers layout, or a pipeline.
        lora: adapters to register, as paths by name, or as `NAME=PATH`; see `Engine.add_lora`.
        settings: fields of `carpool.config.EngineSettings`, such as `device`, `dtype`,
            `max_batch_size`, `max_running`; and settings of `Engine.jobs`: `state_dir` (a folder
            whose open jobs continue; none: memory), `job_ttl`, `max_store_bytes`, `metadata`,
            `metadata_prompt`. `workers=4` runs the model in four processes, one for each device
            (`devices="cuda:0,cuda:1"`), restarted when they die; outputs are PIL images.

    Raises:
        LoadFailed: the model cannot be found or served.
        LoraRejected: an adapter cannot be used.
        SettingRejected: a setting is unknown or impossible.
        StoreFailed: the `state_dir` is unusable, or another process uses it.
    """
    if isinstance(lora, Mapping):
        lora = [f"{check_name(name)}={path}" for name, path in lora.items()]
    if not isinstance(model, (str, Path)):
        for name in OF_FILES:
            if (value := settings.get(name)) not in (None, "auto", ()):
                rule = "the given pipeline is loaded already; pass it to its from_pretrained"
                raise SettingRejected(f"{name}={value!r}: {rule}")
    config = load_settings({**settings, "lora": tuple(lora)})
    with contextlib.ExitStack() as undo:
        store: JobStore | None = None
        if config.state_dir is not None:  # errors appear before the slow load
            from carpool.python.jobs import open_store

            store = undo.enter_context(contextlib.closing(open_store(config)))
        options = config.engine()
        if (config.workers, config.devices, options.context_parallel) != (None, None, 1):
            engine = Engine(_workers(model, config), config, store)
        else:
            with quiet_libraries(bars=sys.stderr.isatty()):  # large models take minutes to load
                loaded = load_pipeline(model, options)
            undo.callback(loaded.undo)
            core = EngineCore(loaded, options, table=StoredCosts(loaded, options))
            engine = Engine(core, config, store)
        undo.pop_all()
    return engine


def _workers(model: Any, settings: ServeSettings) -> "WorkerEngine":
    """Start the model in worker processes."""
    from carpool import preflight
    from carpool.fleet.models import models_of, settings_on
    from carpool.python.workers import WorkerEngine

    if not isinstance(model, (str, Path)):
        ranks = settings.context_parallel
        setting = f"context_parallel={ranks}" if ranks > 1 else f"workers={settings.workers!r}"
        rule = "cannot be handed to other processes: give its hub id or folder"
        raise SettingRejected(f"{setting}: a pipeline that is loaded already {rule}")
    [spec] = models_of([str(model)], settings)
    for device in dict.fromkeys(spec.devices):
        preflight.check(spec.model, settings_on(spec, device))
    return WorkerEngine(spec, settings.worker_timeout)


def _advance(bar: "tqdm[Any]", _: int, event: Event) -> None:
    if event.kind == "step":
        bar.update()


def _output_of(handle: Handle | Output) -> Output:
    if isinstance(handle, Output):
        return handle  # rejected before it started
    try:
        return handle.result()
    except CarpoolError as error:
        return Output(request_id=handle.request_id, seed=handle.seed, error=error)
