"""Workers of a pool without processes: they take requests, and end them when they are told to."""

import asyncio
from collections.abc import Sequence
from typing import Any

from carpool.config import EngineSettings
from carpool.errors import CarpoolError, Draining, LoadFailed, Starting, WorkerLost
from carpool.fleet.pool import Pool
from carpool.fleet.worker_load import RoutedRequest
from carpool.telemetry.activity import Snapshot
from carpool.types import CheckedRequest, RequestSize, Timings
from carpool.worker import protocol
from carpool.worker.guilt import CrashEvidence, Death
from carpool.worker.journals import Journals
from carpool.worker.requests import Moved
from carpool.worker.supervisor import Supervisor, WorkerListener, WorkerState
from support.app import CARD
from support.fake_hosts import settle


def routed(number: int, kind: Any, steps: int, **more: Any) -> RoutedRequest:
    return RoutedRequest(number, kind=kind, steps=steps, **more)


class FakeWorker(Supervisor):
    """One worker: `load`, `die`, `finish` are what its process would do."""

    def __init__(self, device: str, listener: WorkerListener) -> None:
        self.device, self.listener = device, listener
        self.ready: protocol.WorkerReady | None = None
        self._state: WorkerState = "starting"
        self.running: dict[str, asyncio.Future[protocol.Done]] = {}
        self.admitted = dict[str, bool]()  # by request
        self.got: list[tuple[str, float, int]] = []  # request, waited_s, deaths of its workers
        self._evidence: dict[str, CrashEvidence] = {}  # of running requests
        self.held_s, self.lora = 0.0, dict[str, str]()
        self.stopped = self.retired = False
        self.asked_to_release: list[str] = []
        self.keeps = set[str]()  # requests whose journals are not whole
        self.is_watched = False
        self.wait_s = 0.0  # that it estimates
        self._is_ready, self._failed = asyncio.Event(), asyncio.Event()
        self._error = LoadFailed("")

    # What its process does

    def load(self, model_digest: str = "") -> None:
        ready = protocol.WorkerReady(CARD, {}, 0.5, model_digest=model_digest)
        self.ready, self._state = ready, "ready"
        self._is_ready.set()
        self.listener.changed()

    def fail(self, message: str, *, wants_memory: bool = False) -> None:
        self._error = LoadFailed(message)
        self._error.wants_memory = wants_memory
        self._failed.set()

    @property
    def has_failed(self) -> bool:
        return self._failed.is_set()

    def die(self) -> None:
        self._state = "worker_lost"
        self.listener.changed()
        for request_id, answer in self.running.items():
            if not answer.done():
                self._evidence[request_id].died(Death(self, 0.0))
                answer.set_exception(Moved())

    def finish(self, request_id: str) -> None:
        done = protocol.Done(request_id, 1, [], Timings(), protocol.TokenUsage(1, 1))
        self.running[request_id].set_result(done)

    def act(self, now_s: float) -> None:
        """Its engine did something, if anybody watches."""
        if self.is_watched:
            self.listener.acted(protocol.Activity(Snapshot(now_s, (), (), 0), [], 0))

    def report(self, seconds: Sequence[float], texts: Any = None, **steps_left: float) -> None:
        costs: dict[RequestSize, list[float]] = {(None, None, None): list(seconds)}
        self.listener.reported(protocol.Report(costs, steps_left, text_costs=texts or {}))

    # What a pool asks of it

    @property
    def state(self) -> WorkerState:
        return self._state

    @property
    def takes_requests(self) -> bool:
        return self._state == "ready"

    def start(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._failed.wait()
        raise self._error

    async def wait_ready(self) -> protocol.WorkerReady:
        await self._is_ready.wait()
        assert self.ready is not None
        return self.ready

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: Any = None,
        on_preview: Any = None,
        *,
        waited_s: float = 0.0,
        evidence: CrashEvidence | None = None,
        is_admitted: bool = False,
    ) -> protocol.Done:
        self.check_open()
        self.admitted[request.request_id] = is_admitted
        evidence = self._evidence[request.request_id] = evidence or CrashEvidence()
        self.got.append((request.request_id, waited_s, evidence.lives))
        answer: asyncio.Future[protocol.Done] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = answer
        try:
            return await answer
        finally:
            del self.running[request.request_id]

    def check_open(self) -> None:
        if self._state == "starting":
            raise Starting("the model is still loading", retry_after_s=3)
        if self._state != "ready":
            raise WorkerLost("the worker has died and is being restarted", retry_after_s=2)

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        return protocol.Estimated(1.0, self.wait_s, 1.0)

    def watch(self, *, is_on: bool) -> None:
        self.is_watched = is_on

    async def statistics(self) -> dict[str, Any]:
        return {"waiting": 0, "running": len(self.running), "requests": len(self.got)}

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        known = {name for name, _, _ in self.got}
        return [{"id": name} for name in request_ids if name in known]

    def reload(self) -> None:
        self.lora["reloaded"] = ""

    def release(self, request_id: str) -> None:
        self.asked_to_release.append(request_id)
        answer = self.running.get(request_id)
        if answer is not None and not answer.done() and request_id not in self.keeps:
            answer.set_exception(Moved(was_released=True))

    def hold(self, work_s: float) -> None:
        self.held_s = work_s

    async def add_lora(self, name: str, path: str) -> list[str]:
        self.lora[name] = path
        return ["it is no LoRA"] if path == "broken" else []

    async def stop_without_successor(self) -> None:
        await self.stop()
        self.retired = True

    async def stop(self) -> None:
        self.stopped, self._state = True, "stopped"
        self.fail_all(Draining("the server was stopped at once"))

    def fail_all(self, error: CarpoolError) -> None:
        for answer in self.running.values():
            if not answer.done():
                answer.set_exception(error)


SOLO = (1.0, 2.0, 3.0, 4.0)  # seconds of a step: rows gain nothing


class Stage:
    """A pool of fake workers, and requests that were submitted to it.

    Args:
        journals: the requests have journals, so they can move.
    """

    def __init__(
        self, devices: Sequence[str], *, journals: bool, settings: Any = None, **options: Any
    ) -> None:
        self.workers: list[FakeWorker] = []
        self.journals = Journals(of_all=journals)
        settings = settings or EngineSettings()
        self.pool = Pool(self.make, devices, settings, self.journals, **options)
        self.tasks: dict[str, asyncio.Task[protocol.Done]] = {}
        self.running = self.pool.start()

    def make(self, device: str, listener: WorkerListener) -> FakeWorker:
        self.workers.append(FakeWorker(device, listener))
        return self.workers[-1]

    async def load(self, *numbers: int) -> None:
        await settle()
        for number in numbers:
            self.workers[number].load()
            self.workers[number].report(SOLO)
        await settle()

    async def submit(
        self, *names: str, steps: int = 10, tokens: int | None = None, **options: Any
    ) -> None:
        arguments = {"prompt": "a cat", "num_inference_steps": steps, "max_new_tokens": tokens}
        for name in names:
            if self.journals.of_all:
                self.journals.open(name)
            request = CheckedRequest(name, 1, arguments, **options)
            self.tasks[name] = asyncio.create_task(self.pool.submit(request))
        await settle()

    async def finish(self) -> None:
        """End all requests, as often as new ones are bound."""
        while any(not task.done() for task in self.tasks.values()):
            for worker in self.workers:
                for name in list(worker.running):
                    worker.finish(name)
            await settle()

    def all(self) -> list[str]:
        return [name for names in self.has() for name in names]

    def has(self) -> list[list[str]]:
        """The running requests of each worker."""
        return [sorted(worker.running) for worker in self.workers]
