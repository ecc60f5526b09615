"""A fleet: the models behind one address, loaded at the start or on demand."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from carpool.errors import CarpoolError, ModelNotFound, nearest
from carpool.fleet.deployment import Deployment
from carpool.fleet.loader import Loader, now_s
from carpool.fleet.pool import OnActivity, Pool
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.in_flight import OnPreview
from carpool.worker.supervisor import WorkerState

T = TypeVar("T")


class Fleet:
    """One or several models, by name; the first one is the default of requests.

    Attributes:
        is_single: one permanent model, which has requests of any model name.

    Args:
        max_loaded: max loaded models; None: any number.
    """

    def __init__(self, deployments: Sequence[Deployment], max_loaded: int | None = None) -> None:
        self._deployments = {model.name: model for model in deployments}
        self._first = deployments[0]
        self.is_single = len(deployments) == 1 and not self._first.is_on_demand
        self._loader = Loader(deployments, max_loaded, self._open)
        self._on_activity: OnActivity | None = None
        self._tidying: asyncio.Task[None] | None = None

    # State

    @property
    def deployments(self) -> Mapping[str, Deployment]:
        return self._deployments

    @property
    def names(self) -> list[str]:
        """The names of the models in requests and answers, as far as known."""
        return [model.id for model in self._deployments.values()]

    @property
    def ready(self) -> protocol.WorkerReady | None:
        """The first model, once one is loaded."""
        answers = (model.ready for model in (self._first, *self._deployments.values()))
        return next((ready for ready in answers if ready is not None), None)

    @property
    def state(self) -> WorkerState:
        states = {model.state for model in self._deployments.values()}
        if self._loader.is_draining:
            return "draining" if "stopped" not in states else "stopped"
        if any(model.is_on_demand for model in self._deployments.values()):
            return "ready"  # it is loaded on demand
        order: tuple[WorkerState, ...] = ("ready", "draining", "starting", "worker_lost")
        return next((state for state in order if state in states), "stopped")

    @property
    def private_tasks(self) -> dict[str, str]:
        """Why requests ride alone, by the model's name and the task."""
        return {
            f"{name} {task}".lstrip(): why
            for name, model in self._deployments.items()
            for task, why in (model.pool.private_tasks if model.pool else {}).items()
        }

    @property
    def has_several(self) -> bool:
        """Whether it may have more than one worker: always, with several models."""
        pool = self._first.pool
        return not self.is_single or (pool is not None and pool.has_several)

    def workers(self) -> list[dict[str, Any]]:
        """The workers with the names of their models; see `Pool.workers`."""
        models = self._deployments.values()
        return [{"model": m.id, **row} for m in models if m.pool for row in m.pool.workers()]

    @property
    def is_degraded(self) -> bool:
        """Whether a permanent model is not ready, or a model lacks workers."""
        return self.state == "ready" and any(
            (not model.is_on_demand and (model.pool is None or model.pool.state != "ready"))
            or (model.pool is not None and model.pool.is_degraded)
            for model in self._deployments.values()
        )

    def of(self, name: str | None) -> Deployment:
        """The model of this name.

        Raises:
            ModelNotFound: this server has no such model.
        """
        if not name or self.is_single:
            return self._first
        model = self._deployments.get(name)
        if model is None:
            names = ", ".join(map(repr, self._deployments))
            hint = nearest(name[:60], list(self._deployments))
            problem = f"model {name[:60]!r} is not served here; use one of {names}{hint}"
            raise ModelNotFound(problem, param="model")
        return model

    @property
    def loads_at_start(self) -> bool:
        """Whether any model is loaded at the start."""
        return any(not model.is_on_demand for model in self._deployments.values())

    # Start and stop

    def start(self) -> "asyncio.Future[Any]":
        """Load all permanent models in parallel. The result fails with the first `LoadFailed`."""
        at_start = [model for model in self._deployments.values() if not model.is_on_demand]
        running = [self._open(model)[1] for model in at_start]
        self._tidying = asyncio.create_task(self._loader.tidy())
        end = asyncio.gather(self._tidying, *running)
        end.add_done_callback(lambda end: end.cancelled() or end.exception())  # read in any case
        return end

    def _open(self, model: Deployment) -> tuple[Pool, "asyncio.Task[None]"]:
        pool = model.pool = model.make()
        model.began_s = now_s()

        def is_any_ready() -> bool:
            return any(pool.state == "ready" for pool in self.pools)

        running = pool.start(None if model.is_on_demand else is_any_ready)
        pool.watch_activity(self._on_activity and partial(self._acted, model.name))
        return pool, running

    async def wait_ready(self) -> protocol.WorkerReady:
        """Wait until one of the permanent models is loaded."""
        at_start = [model.pool for model in self._deployments.values() if not model.is_on_demand]
        if not at_start:
            return (await self.loaded(self._first.name))[1]
        return await first_of([pool.wait_ready() for pool in at_start if pool is not None])

    async def wait_open(self, model: str | None = None) -> None:
        """Wait until a model, loaded if necessary, or any model accepts requests."""
        if model is not None:
            target = self.of(model)
            pool = await self._loader.loaded(target) if target.is_on_demand else target.pool
            assert pool is not None
            with self._loader.using(target):
                await pool.wait_open()
        elif not any(deployment.is_on_demand for deployment in self._deployments.values()):
            await first_of([pool.wait_open() for pool in self.pools])
        if self._loader.is_draining:
            await asyncio.Event().wait()

    async def loaded(self, name: str | None) -> tuple[Pool, protocol.WorkerReady]:
        """Wait until a model is loaded, loading it if necessary; returns its pool.

        Raises:
            ModelNotFound: this server has no such model.
            LoadFailed: it cannot be loaded.
            Draining: the server drains.
        """
        model = self.of(name)
        if model.is_on_demand:
            pool = await self._loader.loaded(model)
            assert pool.ready is not None
            return pool, pool.ready
        self._loader.check_open()
        assert model.pool is not None
        if model.pool.ready is None:
            model.pool.check_open()
        return model.pool, model.pool.ready or await model.pool.wait_ready()

    async def drain(self, timeout_s: float) -> None:
        """Drain all models; see `Pool.drain`."""
        self._loader.drain()
        await asyncio.gather(*(pool.drain(timeout_s) for pool in self.pools))

    async def stop(self) -> None:
        """End all workers."""
        self._loader.drain()
        if self._tidying is not None:
            self._tidying.cancel()
        await asyncio.gather(*(pool.stop() for pool in self.pools))

    @property
    def pools(self) -> list[Pool]:
        """The pools of the loaded models."""
        return [model.pool for model in self._deployments.values() if model.pool is not None]

    # Requests

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> protocol.Done:
        """Run a request on its model; see `Supervisor.submit` and `loaded`."""
        model, waited_s = self.of(request.model), 0.0
        if model.is_on_demand and (model.state != "ready" or model.makes_room):
            arrived_s = now_s()
            await self._loader.loaded_in_time(model, request)
            waited_s = now_s() - arrived_s
        pool, _ = await self.loaded(model.name)
        with self._loader.using(model):
            return await pool.submit(
                request, on_progress=on_progress, on_preview=on_preview, waited_s=waited_s
            )

    def check_open(self) -> None:
        """Raise unless any model accepts requests."""
        self._loader.check_open()
        if self.state != "ready" and self._first.pool is not None:
            self._first.pool.check_open()

    def check_room(self, tenant: str = "") -> None:
        """Raise if no model has a free place for a tenant's request."""
        errors = []
        for pool in self.pools:
            try:
                pool.check_room(tenant)
                return
            except CarpoolError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def statistics(self) -> dict[str, Any]:
        """Statistics of a single model; else sums, and those of every loaded model, by name."""
        if self.is_single and self._first.pool is not None:
            return await self._first.pool.statistics()
        models: dict[str, Any] = {}
        for name, model in self._deployments.items():
            fields: dict[str, Any] = {"state": model.state, "in_flight": model.in_flight}
            if model.pool is not None:
                with contextlib.suppress(CarpoolError):
                    fields |= await model.pool.statistics()
            models[name] = fields
        keys = ("waiting", "running", "requests")
        total = {key: sum(counts.get(key, 0) for counts in models.values()) for key in keys}
        again = max(fields.get("steps_again", 0) for fields in models.values())  # the sum
        return {**total, "steps_again": again, "models": models}

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        """Predict the time of a request that arrives now, on its model."""
        pool, _ = await self.loaded(request.model)
        return await pool.estimate(request)

    def watch_activity(self, listener: OnActivity | None) -> None:
        """Send the activity of all engines to a listener, also of models that are loaded later."""
        self._on_activity = listener
        for model in self._deployments.values():
            if model.pool is not None:
                model.pool.watch_activity(listener and partial(self._acted, model.name))

    def _acted(self, model: str, activity: protocol.Activity) -> None:
        activity.model = model
        if self._on_activity is not None:
            self._on_activity(activity)

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests; raises if no model has a worker to ask."""
        timelines: dict[str, dict[str, Any]] = {}
        errors = []
        for pool in self.pools:
            try:
                timelines |= {line["id"]: line for line in await pool.timelines(request_ids)}
            except CarpoolError as error:
                errors.append(error)
        if errors and len(errors) == len(self.pools):
            raise errors[0]
        return [timelines[name] for name in request_ids if name in timelines]

    def roll(self) -> None:
        """Replace the workers of all loaded models."""
        for pool in self.pools:
            pool.roll()

    def reload(self) -> None:
        """Let all workers reload their adapter folders and batching configs."""
        for pool in self.pools:
            pool.reload()


async def first_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> T:
    """The result of the first coroutine to end; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return finished.pop().result()
    finally:
        for task in tasks:
            task.cancel()
