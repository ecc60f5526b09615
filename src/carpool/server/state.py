"""State that all routes of one server share: the fleet, jobs, API keys, limits and caches."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.types import Receive

from carpool.config import ServeSettings
from carpool.errors import Cancelled, ModelNotFound, nearest
from carpool.fleet.fleet import Fleet
from carpool.jobs.runner import Runner
from carpool.media.executors import FairExecutor
from carpool.media.metadata import file_metadata
from carpool.media.reader import ImageIntake, PictureReader
from carpool.request.card import Card
from carpool.server.access.idempotency import IdempotencyCache
from carpool.server.access.keys import APIClient, Keyring
from carpool.server.access.limits import MemoryBudget, Permit, RateLimiter
from carpool.server.access.signed_links import SignedFiles
from carpool.server.bodies import schema
from carpool.server.bodies.forms import number
from carpool.server.events import Events
from carpool.server.observer import Observer
from carpool.server.transport.middleware import OF_MODEL
from carpool.telemetry import logs
from carpool.telemetry.tracing import Tracing
from carpool.types import CheckedRequest

T = TypeVar("T")
Needs = Literal["ready", "restarting", "loaded"]
"""Needed state of a model's worker: see `AppState.model`."""
PARSED_INLINE_BYTES = 64 << 10  # larger JSON is parsed on a thread

Translate = Callable[[Mapping[str, Any], Card], dict[str, Any]]

bearer = HTTPBearer(auto_error=False)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind this server, as the front process knows it."""

    id: str
    card: Card
    max_n: int
    settings: ServeSettings = field(default_factory=ServeSettings)
    default_lora: Mapping[str, Any] = field(default_factory=dict)  # from `set_lora`, by owner

    def check_name(self, name: str | None) -> None:
        """Raise ModelNotFound for the name of another model."""
        if name not in (None, self.id, self.card.id):
            text = str(name)[:60]
            hint = nearest(text, [self.id])
            raise ModelNotFound(f"model {text!r} is not served here: use {self.id!r}{hint}")

    def file_metadata(
        self, request: CheckedRequest | None, result: Mapping[str, Any] | None = None, **extra: Any
    ) -> dict[str, Any] | None:
        """The settings to store in a file; {} without a request, None if files store none."""
        return file_metadata(self.id, request, self.settings, result, **extra)


class AppState:
    """`app.state.server`. The caller starts and stops the fleet and the runner.

    Args:
        translate: renames the fields of other servers in a body to this API's.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: ServeSettings,
        runner: Runner,
        keys: Keyring | None,
        tracing: Tracing | None,
        translate: Translate,
    ) -> None:
        threads = max(2, os.cpu_count() or 2)
        store = runner.store
        self.fleet, self.settings, self.runner = fleet, settings, runner
        self.keys = keys or Keyring(settings.api_key, settings.api_key_file)
        self.tracing, self.translate = tracing or Tracing(), translate
        self.observer = Observer(fleet, settings, runner)
        self.idempotency: IdempotencyCache[Any] = IdempotencyCache(_size_of, time.monotonic)
        self.files = SignedFiles(store.folder / "links", clock=store.clock)
        self.reader = PictureReader(allow_remote=settings.allow_remote_media)
        self.encoder = FairExecutor(
            "carpool-encode", threads, per_tenant=threads - settings.has_keys
        )
        self.events = Events(
            fleet, self.observer, runner, knows=self.keys.knows, encoder=self.encoder,
            has_metadata=settings.metadata,
        )  # fmt: skip
        self.started_s = int(time.time())
        self.default_lora: dict[tuple[str, str], list[dict[str, Any]]] = {}  # key: model and owner
        self._json = FairExecutor("carpool-json", 4, per_tenant=1, rests=True)
        self._memory = MemoryBudget(settings.max_in_flight_bytes, settings.max_upload_bytes)
        self._limits = RateLimiter(
            settings.requests_per_minute, settings.max_in_flight_per_key, time.monotonic
        )

    @property
    def model_names(self) -> list[str]:
        """The names of all models, the default model first; raises as `model` for a single one."""
        return [self.model("loaded").id] if self.fleet.is_single else self.fleet.names

    async def load(self, name: str | None, needs: Needs) -> ServedModel:
        """Load a model on demand and wait for it; then as `model`.

        Raises:
            LoadFailed: the model cannot be loaded.
        """
        deployment = self.fleet.of(name)
        if deployment.is_on_demand and deployment.ready is None:
            await self.fleet.loaded(name)
        return self.model(needs, name)

    def model(self, needs: Needs = "ready", name: str | None = None) -> ServedModel:
        """A served model.

        Args:
            needs: "ready": a ready worker. "restarting": also a restarting worker, for jobs, which
                wait. "loaded": no worker, if the model has been loaded before.
            name: one of several models; None: the first.

        Raises:
            ModelNotFound: no model has this name.
            X, WorkerLost, Draining: the worker is not in that state.
        """
        settings, deployment = self.settings, self.fleet.of(name)
        ready, state = deployment.ready, deployment.state
        is_restarting = needs == "restarting" and state == "worker_lost"
        if not is_restarting and (needs != "loaded" or ready is None):
            deployment.check_open()
        assert ready is not None
        id_ = deployment.id
        return ServedModel(
            id_,
            ready.card,
            min(settings.max_n, settings.max_running + settings.max_queue),
            settings,
            {owner: lora for (model, owner), lora in self.default_lora.items() if model == id_},
        )

    async def any_loaded_model(self, needs: Needs) -> ServedModel:
        """A loaded model; its card serves to parse a body before the body's own model is known."""
        loaded = (name for name, model in self.fleet.deployments.items() if model.ready)
        name = next(loaded, None)
        return await self.load(name, "loaded" if name else needs)

    async def card_of(self, name: str | None) -> Card:
        """The card of a model, loaded on demand."""
        return (await self.load(name, "loaded")).card

    @asynccontextmanager
    async def admit(
        self, request: Request, receive: Receive, *, is_work: bool
    ) -> AsyncIterator[Receive]:
        """Authenticate a request and hold it against its key's limits, before its body is read.

        Sets `client`, `memory` and, for requests for work, `slot` of `request.state`.

        Args:
            is_work: the request counts against the request limits.

        Returns:
            The function that receives its body.
        """
        token = await bearer(request)
        client = self.keys.client_of(token.credentials.encode("latin-1") if token else b"")
        if client.key:
            logs.about.get({})["key"] = client.key
        request.state.client = client
        async with AsyncExitStack() as stack:
            if is_work:
                request.state.slot = await stack.enter_async_context(self._limits.hold(client.key))
            request.state.memory = stack.enter_context(self._memory.open(client.key))
            yield request.state.memory.metered(receive)

    async def parse_json(self, request: Request, parse: Callable[[], Any], size: int) -> Any:
        """Parse a body; a large one on a thread."""
        if size <= PARSED_INLINE_BYTES:
            return parse()
        return await self._json.run(request.state.client.owner, parse)


@dataclass(frozen=True, slots=True)
class AuthenticatedRequest:
    """One authenticated request, with the state of its server."""

    state: AppState
    request: Request
    client: APIClient

    async def load(self, name: str | None, needs: Needs) -> ServedModel:
        """Load the model of the request; see `AppState.load`."""
        self.request.scope[OF_MODEL] = self.state.fleet.of(name).name
        return await self.state.load(name, needs)

    async def model_of(
        self, body: schema.GenerationRequest, needs: Needs, model: ServedModel | None = None
    ) -> ServedModel:
        """Load the model of a body, unless it is, and fill missing fields from headers."""
        header = self.request.headers.get("x-step-cache")
        if header is not None and body.step_cache is None:
            try:
                body.step_cache = number(header)
            except ValueError:
                body.step_cache = header  # the later check reports invalid values
        return model or await self.load(body.model, needs)

    def intake(self, n: int = 1) -> ImageIntake:
        """The reader of the request's pictures, for `n` outputs."""
        return ImageIntake(self.state.reader, self.client.owner, self.request.state.memory, n)

    async def unless_disconnected(self, work: Awaitable[T]) -> T:
        """Run the work; raise Cancelled as soon as the client disconnects."""

        async def disconnect() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass

        task = asyncio.ensure_future(work)
        hangup = asyncio.create_task(disconnect())
        try:
            await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled("the client closed the connection")
            return task.result()
        finally:
            hangup.cancel()
            task.cancel()

    async def check_room(self) -> None:
        """Refuse a request if the fleet is full, or its client has too many requests and jobs."""
        self.state.fleet.check_room(self.client.key)
        slot: Permit = self.request.state.slot
        if slot.most is not None:
            open_jobs = await self.state.runner.count_open(self.client.owner)
            slot.check(sum(open_jobs.values()))


def _size_of(answer: BaseModel | list[bytes]) -> int:
    """Bytes of a stored answer: JSON, or the final events of a stream."""
    if isinstance(answer, BaseModel):
        return len(answer.model_dump_json())
    return sum(map(len, answer))
