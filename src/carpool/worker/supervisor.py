"""The supervisor of a worker process, on the front's event loop: start, messages, restart.

When a worker dies, its requests (`requests.py`) are `Moved`; new requests are refused until the
next worker has loaded the model. A hanging worker is killed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from carpool.errors import CarpoolError, Draining, LoadFailed, Starting, WorkerLost
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.connection import Connection, Connector, watched
from carpool.worker.guilt import CrashEvidence, Deadlock, Death, DeathLog
from carpool.worker.in_flight import OnPreview
from carpool.worker.journals import Journals
from carpool.worker.queries import Queries
from carpool.worker.requests import WorkerRequests
from carpool.worker.restarts import Restarts

log = logging.getLogger("carpool")

WorkerState = Literal["starting", "ready", "worker_lost", "draining", "stopped"]
_MOST_LISTED = 8  # requests in a log line


class WorkerListener:
    """Receives changes and reports of a worker, on the event loop. Does nothing with them.

    Attributes:
        adapters: paths of the adapters registered since the start, by name: a new worker gets them
            before it accepts requests.
    """

    adapters: Mapping[str, str] = MappingProxyType({})

    def changed(self) -> None:
        """Its state has changed, or whether it accepts requests."""

    def reported(self, report: protocol.Report) -> None:
        """It sent its report, once a second."""

    def acted(self, activity: protocol.Activity) -> None:
        """It sent its engine's activity, a few times a second while watched."""


class Supervisor:
    """One worker process and its restarts.

    Args:
        load: the first message to each process.
        connector: connects to the worker's process.
        timeout_s: max seconds without progress; see `watchdog`.
        listener: receives changes and reports.
        journals: for resuming requests after a death; None: they start over. The workers of a pool
            share them, and the pool closes the opened ones.
        deaths: deaths of all workers of the server.
        deadlock: the deadlock of any worker of the model.
    """

    def __init__(
        self,
        load: protocol.LoadModel,
        connector: Connector,
        *,
        timeout_s: float = 60.0,
        listener: WorkerListener | None = None,
        journals: Journals | None = None,
        deaths: DeathLog | None = None,
        deadlock: Deadlock | None = None,
    ) -> None:
        self._load, self._connector = load, connector
        self._deadlock, self._is_deadlocked = deadlock or Deadlock(), False
        self._listener, self._timeout_s = listener or WorkerListener(), timeout_s
        self._state: WorkerState = "starting"
        self._is_draining = False
        deaths = deaths or DeathLog()
        self._requests = WorkerRequests(self._send, journals, self._listener.changed, deaths=deaths)
        self._queries = Queries(self._send)
        self._connection: Connection | None = None
        self._is_lost = False  # whether only the connection to the newest worker was lost
        self._loaded: protocol.WorkerReady | None = None  # message of the current worker
        self.ready: protocol.WorkerReady | None = None  # message of the newest ready worker
        self._first_ready = asyncio.Event()
        self._started_s = 0.0  # start of the newest worker; event loop's clock
        self._startup_s = 3.0  # startup time of the newest ready worker
        self._task: asyncio.Task[None] | None = None
        self._is_watched = False
        self._end = ""  # how the last worker ended, and its requests

    @property
    def state(self) -> WorkerState:
        return "draining" if self._is_draining and self._state == "ready" else self._state

    def start(self) -> asyncio.Task[None]:
        """Start the first worker. The task ends with `stop`, or fails with `LoadFailed`."""
        self._task = asyncio.create_task(self._keep_running())
        return self._task

    async def wait_ready(self) -> protocol.WorkerReady:
        await self._first_ready.wait()
        assert self.ready is not None
        return self.ready

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        *,
        waited_s: float = 0.0,
        evidence: CrashEvidence | None = None,
        is_admitted: bool = False,
    ) -> protocol.Done:
        """Run a request in the worker. Cancelling the awaiting task cancels the request.

        Args:
            on_progress: called with the steps done and their total; with (0, 0) if the request
                starts over because the worker died, and no journal of it is kept.
            on_preview: called with the request's previews, all before the answer.
            waited_s: seconds it waited in a pool.
            evidence: evidence from earlier workers.
            is_admitted: the worker must not refuse it as too late.

        Raises:
            Starting, WorkerLost, Draining: no requests are accepted now.
            PipelineFailed: the request killed workers; see `guilt`.
            Moved: the worker died, or released it.
            CarpoolError: the request failed.
        """
        self.check_open()
        return await self._requests.run(
            request, on_progress, on_preview, waited_s, evidence, is_admitted
        )

    @property
    def takes_requests(self) -> bool:
        """Whether it would run a request at once: it is ready, and no request has to run alone."""
        return self._state == "ready" and not self._is_draining and not self._requests.has_suspects

    def release(self, request_id: str) -> None:
        """Ask the worker to release a request, which is then `Moved` to resume elsewhere.

        The request stays if its journal lacks more than a step.
        """
        self._requests.release(request_id)

    def hold(self, work_s: float) -> None:
        """Send the worker its share of the pool's backlog."""
        self._send(protocol.Held(work_s))

    async def add_lora(self, name: str, path: str) -> list[str]:
        """Register an adapter in the worker; returns problems: none if there is no worker now."""
        if self._loaded is not None:
            with contextlib.suppress(WorkerLost, Draining):
                return list(await self._queries.ask(protocol.AddLora(name, path)))
        return []

    def check_open(self) -> None:
        """Raise unless requests are accepted now."""
        if self._is_draining:
            raise Draining.of_new_work()
        if self._state == "starting":
            raise Starting("the model is still loading", retry_after_s=self._until_ready_s())
        if self._state != "ready":
            again_s = self._until_ready_s()
            raise WorkerLost("the worker has died and is being restarted", retry_after_s=again_s)

    def _until_ready_s(self) -> float:
        """Predict the seconds until the next worker is ready, from the last startup."""
        return min(max(self._startup_s - self._running_s(), 1.0), 120.0)

    def _running_s(self) -> float:
        """Seconds since the newest worker was started."""
        return asyncio.get_running_loop().time() - self._started_s

    async def statistics(self) -> dict[str, Any]:
        """The engine's own statistics."""
        return dict(await self._ask(protocol.GetStatistics()))

    async def timelines(self, request_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The timelines of requests, without those that the worker has dropped."""
        return list(await self._ask(protocol.GetTimelines(list(request_ids))))

    async def estimate(self, request: CheckedRequest) -> protocol.Estimated:
        """Predict the time of a request that arrives now."""
        return protocol.Estimated(*await self._ask(protocol.Estimate(request)))

    async def _ask(self, query: protocol.Query) -> Any:
        if self._state != "ready":
            self.check_open()
        return await self._queries.ask(query)

    def watch(self, *, is_on: bool) -> None:
        """Let the worker send its engine's activity, or not."""
        was_on, self._is_watched = self._is_watched, is_on
        if was_on != is_on and self._state == "ready":
            self._send(protocol.Watch(is_on))

    def reload(self) -> None:
        """Let the worker reload its adapter folder and batching config."""
        self._send(protocol.Reload())

    def fail_all(self, error: CarpoolError) -> None:
        """Refuse new requests, and fail those in flight."""
        self._is_draining = True
        self._requests.fail_all(error)
        self._queries.fail(error)

    async def stop(self) -> None:
        """Stop the worker; returns when its process has ended."""
        self.fail_all(Draining("the server was stopped at once", retry_after_s=5))
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LoadFailed):
                await self._task
        self._state = "stopped"

    async def stop_without_successor(self) -> None:
        """Like `stop`; also ends a remote worker, so that no later front can take it over."""
        await self.stop()
        await self._connector.end()

    async def _keep_running(self) -> None:
        restarts = Restarts()
        while True:
            was_ready = await self._run_once()
            cause, is_first = self._end.partition(";")[0], not self._first_ready.is_set()
            delay_s = restarts.delay_s(
                cause, was_ready=was_ready, is_lost=self._is_lost, is_first=is_first
            )
            event = "the worker is out of reach" if self._is_lost else "the worker died"
            log.error("%s (%s); restart in %g s", event, self._end, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> bool:
        """Run one worker process to its end; returns whether it was ever ready."""
        self._started_s = asyncio.get_running_loop().time()
        try:
            connection = self._connection = await self._connector.open()
        except OSError as error:  # out of memory or file descriptors
            log.error("a worker cannot be started: %s", error)
            self._end, self._is_lost = str(error), self._connector.is_remote
            return False
        was_ready = False
        try:
            self._load.is_restart = self._first_ready.is_set()
            self._load.deadlock, self._is_deadlocked = self._deadlock.place, False
            connection.send(self._load)
            async with contextlib.aclosing(watched(connection, self._timeout_s)) as messages:
                async for message in messages:
                    if isinstance(message, protocol.LoadFailure) and self._first_ready.is_set():
                        # a file broke since the start of the server, and may be repaired: retry
                        log.error("a worker cannot be started: %s", message.message)
                        break
                    if isinstance(message, protocol.WorkerReady):
                        was_ready, self._startup_s = True, self._running_s()
                    self._receive(message)
        finally:
            death, had = Death(self, asyncio.get_running_loop().time()), self._requests.sent
            if self._first_ready.is_set():
                self._state = "worker_lost"
                self._requests.pause()
                self._listener.changed()
            self._connection = self._loaded = None
            self._queries.fail(WorkerLost("the worker died", retry_after_s=self._until_ready_s()))
            await connection.close()  # the reason for its end is known from here on
            death.is_explained = connection.is_explained or self._is_deadlocked
            self._requests.worker_died(death)
            if self._first_ready.is_set():
                self._listener.changed()
            self._is_lost = connection.is_lost
            self._end = f"{connection.end}; its requests: {_listed(had)}"
        return was_ready

    def _receive(self, message: protocol.ToFront) -> None:
        match message:
            case protocol.WorkerReady() as ready:
                self._loaded = ready
                adapters = self._listener.adapters.items()
                if answers := [self._queries.ask(protocol.AddLora(*item)) for item in adapters]:
                    asyncio.gather(*answers).add_done_callback(self._open_with_adapters)
                else:
                    self._open()
            case protocol.Activity() as activity:
                if self._is_watched:
                    self._listener.acted(activity)
            case protocol.Reloaded(card, problems):
                assert self._loaded is not None
                self._loaded = self._loaded.now(card)
                if self._state == "ready":
                    self.ready = self._loaded
                log.info("reloaded; adapters: %s", ", ".join(card.lora) or "none")
                for problem in problems:
                    log.error("not reloaded: %s", problem)
            case protocol.LoadFailure(reason, wants_memory):
                error = LoadFailed(reason)
                error.wants_memory = wants_memory
                raise error
            case protocol.Answer() as answer:
                self._queries.answered(answer)
            case protocol.RequestFailed(error=WorkerLost.__name__) if self._connection is not None:
                self._connection.kill()  # it cannot continue: the next worker runs its requests
            case protocol.Deadlocked(place):
                self._deadlocked(place)
            case protocol.Heartbeat(report=report):
                if report is not None:
                    self._listener.reported(report)
            case _:
                self._requests.receive(message)

    def _deadlocked(self, place: str) -> None:
        """Kill a deadlocked worker; its successors use private rides."""
        if self._connection is not None:
            self._connection.kill()
        if self._load.settings.context_parallel > 1 or self._load.deadlock:
            return  # private rides are impossible with other ranks, or have not helped
        self._is_deadlocked, self._deadlock.place = True, place
        model = self._load.factory or self._load.model
        text = "requests of %s wait for each other at %s: from now on each runs alone"
        log.error(text, model, place)

    def _open_with_adapters(self, answers: "asyncio.Future[Any]") -> None:
        if answers.exception() is None:  # else the worker has died
            self._open()

    def _open(self) -> None:
        """Accept requests with this worker."""
        if self.ready is not None:
            log.info("the worker is ready again")
        self.ready, self._state = self._loaded, "ready"
        self._first_ready.set()
        if self._is_watched:
            self._send(protocol.Watch(True))
        self._requests.worker_is_ready()
        self._listener.changed()

    def _send(self, message: protocol.ToWorker) -> None:
        if self._connection is not None:
            self._connection.send(message)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "") or "none"
