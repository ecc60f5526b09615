"""Load and unload models on demand, within a limit.

A request for a model loads it, in a task that continues if the request is cancelled. A model is
unloaded after `keep_alive` seconds without requests, or to make room: the least recently used one
goes first, once it has no requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial

from carpool.errors import DeadlineExceeded, Draining, LoadFailed, TooLate
from carpool.fleet.deployment import Deployment
from carpool.fleet.pool import Pool
from carpool.types import CheckedRequest
from carpool.worker.watchdog import INTERVAL_S

log = logging.getLogger("carpool")

PATIENCE_S = 10.0  # wait for a busy model's place; then that model gets no more requests


class Loader:
    """Loads the models of one fleet; on the event loop.

    Args:
        limit: max loaded models; None: any number.
        start: starts the workers of a model.
    """

    def __init__(
        self,
        models: Collection[Deployment],
        limit: int | None,
        start: Callable[[Deployment], tuple[Pool, "asyncio.Task[None]"]],
    ) -> None:
        self._models, self._limit, self._start = models, limit, start
        self.is_draining = False
        self._placing = asyncio.Lock()
        self._freed = asyncio.Event()
        self._room_made = asyncio.Event()  # set while no model makes room

    def drain(self) -> None:
        """Stop loading, and refuse the requests that wait for a model."""
        self.is_draining = True
        self._freed.set()

    def check_open(self) -> None:
        """Raise Draining once the server drains."""
        if self.is_draining:
            raise Draining.of_new_work()

    @contextlib.contextmanager
    def using(self, model: Deployment) -> Iterator[None]:
        """Keep a model loaded within this context."""
        model.in_flight += 1
        try:
            yield
        finally:
            model.in_flight -= 1
            model.used_s = now_s()
            if not model.in_flight:
                self._freed.set()

    async def loaded(self, model: Deployment) -> Pool:
        """Wait until a model is loaded; returns its pool.

        Raises:
            LoadFailed: it cannot be loaded.
            Draining: the server drains.
        """
        while True:
            self.check_open()
            model.used_s = now_s()
            if model.pool is not None and model.pool.ready is not None:
                if not model.makes_room:
                    return model.pool
                await self._room_made.wait()
                continue
            if model.loading is None:
                model.loading = asyncio.create_task(self._load_alone(model))
                model.loading.add_done_callback(partial(_ended, model))
            model.waiting += 1
            try:
                await asyncio.shield(model.loading)
            finally:
                model.waiting -= 1
                if not model.waiting:
                    self._freed.set()

    async def loaded_in_time(self, model: Deployment, request: CheckedRequest) -> None:
        """Wait until a request's model is loaded, within the request's time limits.

        Raises:
            DeadlineExceeded: its `timeout_s` ran out.
            TooLate: its `deadline_s` passed, or will by the model's last load time.
            LoadFailed, Draining: as in `loaded`.
        """
        due_s = None if model.admits_late else request.deadline_s
        needed_s = model.ready_in_s(now_s()) or 0.0
        try:
            if due_s is not None and model.last_ready is not None and needed_s > due_s:
                raise TimeoutError
            limits_s = [limit for limit in (request.timeout_s, due_s) if limit is not None]
            async with asyncio.timeout(min(limits_s, default=None)):
                await self.loaded(model)
        except TimeoutError:
            why = f"{model.name!r} is not loaded yet"
            if due_s is None or (request.timeout_s is not None and request.timeout_s <= due_s):
                ran_out = f"timeout_s={request.timeout_s} ran out after 0 steps"
                raise DeadlineExceeded(f"{ran_out}: {why}") from None
            late = f"deadline_s={due_s:g} cannot be met: {why}"
            text = f"{late}; loading takes some {model.took_s:.3g} s"
            raise TooLate(text, param="deadline_s") from None

    async def _load_alone(self, model: Deployment) -> None:
        """Like `_load`, one model at a time."""
        try:
            async with self._placing:
                await self._load(model)
        finally:
            model.loading = None  # at once: a new request must not wait for this task

    async def _load(self, model: Deployment) -> None:
        """Load a model while requests wait for it; unload others if needed."""
        began_s, error = now_s(), None
        while self._is_wanted(model) and model.pool is None:
            if error is None and self._has_place():
                error = await self._try(model)
                continue
            # more free memory may help
            is_hopeless = error is not None and not error.wants_memory
            if not is_hopeless and await self._make_room(model, began_s):
                error = None
            elif error is not None:
                raise error

    def _is_wanted(self, model: Deployment) -> bool:
        return model.waiting > 0 and not self.is_draining

    async def _try(self, model: Deployment) -> LoadFailed | None:
        """Load a model that has a place; returns its error, or None."""
        log.info("loading %s", model.name)
        pool, running = self._start(model)
        ready = asyncio.create_task(pool.wait_ready())
        await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            model.took_s = now_s() - model.began_s
            return None
        ready.cancel()
        error = running.exception()
        model.pool = None
        await pool.stop()
        if not isinstance(error, LoadFailed):
            raise error or Draining.of_new_work()
        return error

    def _has_place(self) -> bool:
        loaded = sum(model.pool is not None for model in self._models)
        return self._limit is None or loaded < self._limit

    async def _make_room(self, model: Deployment, began_s: float) -> bool:
        """Unload the least recently used model, once it has no requests.

        If all models are busy, that one gets no new requests after `PATIENCE_S`: these wait until
        it is loaded again.

        Returns:
            Whether a model was unloaded: False if none is loaded or no request waits any more.
        """
        try:
            while self._is_wanted(model):
                loaded = [candidate for candidate in self._models if candidate.is_loaded_on_demand]
                if not loaded:
                    return False
                if idle := [candidate for candidate in loaded if _is_idle(candidate)]:
                    await _unload(min(idle, key=_last_use))
                    return True
                working = [candidate for candidate in loaded if candidate.in_flight]
                if working and now_s() - began_s >= PATIENCE_S:
                    min(working, key=_last_use).makes_room = True
                    self._room_made.clear()
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        await self._freed.wait()
            return False
        finally:
            for candidate in self._models:
                candidate.makes_room = False
            self._room_made.set()

    async def tidy(self) -> None:
        """Background loop: unload idle models."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            for model in self._models:
                if _is_idle(model) and now_s() - model.used_s >= model.keep_alive_s:
                    await _unload(model)
                    self._freed.set()


def _is_idle(model: Deployment) -> bool:
    """Whether an on-demand model is loaded, and no request uses or awaits it."""
    if model.makes_room:
        return not model.in_flight  # waiting requests wait until it is loaded again
    is_asked_for = model.in_flight or model.waiting or model.loading is not None
    return model.is_loaded_on_demand and not is_asked_for


async def _unload(model: Deployment) -> None:
    pool, model.pool = model.pool, None
    if pool is not None:
        model.last_ready = pool.ready or model.last_ready
        log.info("unloading %s", model.name)
        await pool.stop()


def _ended(model: Deployment, task: "asyncio.Task[None]") -> None:
    """Log the error of a failed load."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: %s", model.name, error)


def _last_use(model: Deployment) -> tuple[float, str]:
    return model.used_s, model.name


def now_s() -> float:
    return asyncio.get_running_loop().time()
