"""The main loop: admit requests, choose calls, run them as one forward, resume their fibers.

One thread drives an `EngineCore` by calling `step` in a loop (`run` does). Any thread may call
`submit`, `cancel`, `release`, `add_lora`, `reload`, `close`, `statistics`, `timeline` and
`requests`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from carpool.config import EngineSettings
from carpool.engine.adapters.registry import AdapterRegistry
from carpool.engine.containment import UNCONTAINED, EngineLost
from carpool.engine.cost_store import StoredCosts
from carpool.engine.deadlock import DeadlockWatch
from carpool.engine.delivery import RunOffLoop
from carpool.engine.execute import Wrapper
from carpool.engine.journal import Journal
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.model_runner import ModelRunner
from carpool.engine.observe.stats import LoadReport
from carpool.engine.observe.timeline import ForwardObserver
from carpool.engine.parts import EngineParts
from carpool.engine.request import Listener
from carpool.engine.running import RunningRequests
from carpool.engine.scheduler import Scheduler
from carpool.engine.watched_engine import WatchedEngine
from carpool.errors import Cancelled, CarpoolError, WorkerLost, named
from carpool.request.adapter_names import AdapterInfo
from carpool.request.card import Card
from carpool.schedule.policy import Policy
from carpool.telemetry.activity import Snapshot
from carpool.types import CheckedRequest, Clock

log = logging.getLogger("carpool")

MOST_FAILED_TURNS = 3  # consecutive failures; the next turn is not expected to succeed either


class EngineCore:
    """Runs the requests of one pipeline, several at a time.

    Args:
        off_loop: runs outcomes, previews and host calls; default: the engine's own threads.
        observers: called after every forward, in addition to the engine's own.
        table: learned costs, stored in a file.
        policy: default: the one of the settings' batching mode.
        around: the owner's wrapper around forwards that answer requests; see `wrappers.py`.
        is_restart: a replacement for an earlier engine: an adapter that can no longer be read
            fails only the requests that name it, not the engine.
        deadlock: the line where an earlier engine deadlocked: all requests ride privately.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        settings: EngineSettings,
        *,
        clock: Clock = time.monotonic,
        off_loop: RunOffLoop | None = None,
        observers: Sequence[ForwardObserver] = (),
        table: StoredCosts | None = None,
        policy: Policy | None = None,
        around: Wrapper = lambda run: run,
        is_restart: bool = False,
        deadlock: str = "",
    ) -> None:
        self.loaded, self.settings, self._clock = loaded, settings, clock
        self.at_deadlock: Callable[[str], None] = lambda place: None  # on the watchdog's thread
        self.is_stuck, self._end = False, threading.Event()  # stuck: its thread will not go on
        self.parts = parts = EngineParts.of(loaded, settings, clock, off_loop)
        self.stages, self.heartbeat, self._stats = parts.stages, parts.heartbeat, parts.stats
        self.contain, self._timelines = parts.stages.contain, parts.timelines
        self._queue, self._installation, self._failed_turns = parts.queue, parts.installation, 0
        adapters = parts.adapters
        self.progress = parts.heartbeat.read  # like the next two, for any thread
        self.scheduler = Scheduler(parts, table, policy)
        self.estimate = self.scheduler.admission.estimate
        self.log_last_batches = self.scheduler.log_last_batches
        self._observers: list[ForwardObserver] = [
            self.scheduler.forward, self._stats.forward, self._timelines.forward, *observers
        ]  # fmt: skip
        self._registry = AdapterRegistry(adapters, settings.lora_dir, self._offer)
        self._registry.add_all(loaded.lora, is_tolerant=is_restart)
        if loaded.group is not None:
            loaded.group.attach(adapters)
        for problem in self.reload():
            log.warning("%s", problem)
        proof_path = table.path.with_suffix(".fusing.json") if table else None
        self.runner = ModelRunner(parts, self.scheduler, self._observers, around, proof_path)
        self.running = RunningRequests(parts, self.runner.describer, self.scheduler)
        self.running.rides.deadlock = deadlock
        self._watched = WatchedEngine(parts, self.running, self._stand)

    # From any thread

    def submit(
        self,
        request: CheckedRequest,
        listener: Listener,
        waited_s: float = 0.0,
        journal: Journal | None = None,
        *,
        is_admitted: bool = False,
    ) -> None:
        """Queue a checked request, which may already have waited or run elsewhere.

        Args:
            waited_s: seconds already waited: its times count from that much earlier.
            journal: the request resumes at the end of this journal and appends to it; for one
                run of one request. None: no journal.
            is_admitted: another process accepted it: skip the checks for lateness.

        Raises:
            InvalidValue: the engine lacks an adapter of the request.
            TooLate, Overloaded, Draining: see `AdmissionControl.refusal`, `RequestQueue.put`.
        """
        self._installation.adapters.check(request.lora)
        if not is_admitted:
            self.scheduler.check(request, self.running.states, waited_s)
        self._queue.put(
            request,
            listener,
            free_places=max(0, self.settings.max_running - len(self.running.by_number)),
            place_s=self.scheduler.admission.place_s,
            waited_s=waited_s,
            journal=journal,
        )

    def together(self) -> AbstractContextManager[object]:
        """Requests submitted inside this `with` start together."""
        return self._queue.together()

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """End a request, queued or running, before its next forward."""
        self._queue.cancel(request_id, error)

    def release(self, request_id: str) -> None:
        """Give up a request before its next forward, so that another engine can continue it.

        It ends with `Released` once its journal is complete. If the journal lacks more than one
        step, the request stays.
        """
        self._queue.release(request_id)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Register an adapter while requests run; for its errors see `Adapters.add`."""
        self._registry.add(name, path)

    def reload(self) -> list[str]:
        """Read adapters and batching config again; returns problems: such entries are skipped."""
        return [*self._registry.reload(), *self.scheduler.reload()]

    def _offer(self, ids: tuple[str, ...], adapters: tuple[AdapterInfo, ...]) -> None:
        card = replace(self.loaded.card, lora=ids, adapters=adapters)
        self.loaded = replace(self.loaded, card=card)

    def close(self) -> None:
        """End every request and let `run` return."""
        self._queue.close()

    def wait_end(self) -> Self:
        """Wait until `run` has returned, or is stuck (see `is_stuck`)."""
        self._end.wait()
        return self

    def statistics(self) -> dict[str, Any]:
        """Counters and state: those of `Stats`, of the scheduler and of the model runner."""
        return {
            "waiting": len(self._queue),
            "running": len(self.running.by_number),
            "requests": self._queue.submitted,
            **self._stats.statistics(),
            **self.scheduler.statistics(),
            **self.runner.statistics(),
            "isolation": self.running.rides.statistics(),
            "conditioning": self.parts.conditioning.statistics(),
        }

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """The timeline of a request, with the causes of its waits; None once it was dropped."""
        return self._timelines.to_json(request_id, self._clock())

    def requests(self) -> Snapshot:
        """The running and the queued requests, for monitoring."""
        return self.scheduler.snapshot(self.running.states)

    @property
    def card(self) -> Card:
        """The model, with the adapters that it has now."""
        return self.loaded.card

    def free_bytes(self) -> int | None:
        """Free device memory; None: unknown."""
        return self.loaded.device.free_bytes()

    def hold(self, work_s: float) -> None:
        """Set the backlog queued upstream for this engine: a larger one makes forwards wider."""
        self.scheduler.held_s = work_s

    def load_report(self) -> LoadReport:
        """Seconds per step, and the steps that running requests have left."""
        return LoadReport(
            self.scheduler.step_costs,
            self.scheduler.text_costs,
            {
                state.request_id: left
                for state in self.running.states
                if (left := self.scheduler.steps_left(state)) or state.timeline.steps
            },
            self.loaded.streamer is not None,
            self.scheduler.admission.place_s,
            self.running.rides.private_tasks,
        )

    # On the engine's own thread

    def run(self, entered: Callable[[], None] = lambda: None) -> None:
        """Step until closed, sleeping while there is nothing to do.

        Args:
            entered: called once modules and libraries are patched: other threads may go on then.
        """
        watch = DeadlockWatch(self._watched.begin(), time.monotonic)
        try:
            self.enter()
            entered()
            watch.start()
            while not self._queue.is_closed:
                self._turn()
        except (Exception, EngineLost) as error:
            log.exception("the engine ends")
            self._queue.close()
            if not self.loaded.device.is_lost:
                self.loaded.device.at_loss()  # the worker ends here; its requests resume in another
            why = str(error) if isinstance(error, EngineLost) else f"the engine: {named(error)}"
            self.running.end_all(WorkerLost(f"{why}: load the model again, in a new process"))
        finally:
            entered()
            self.leave()
            watch.stop()
            self._end.set()

    def _stand(self, place: str) -> None:
        """Give up an engine thread that is stuck at a line. Runs on the watchdog's thread."""
        reason: CarpoolError = Cancelled("the engine was closed")
        if self._queue.is_closed:
            log.error("the engine is closed; its thread is abandoned at %s", place)
        else:
            reason = self._deadlocked(place)
            self._queue.close(reason)
        self._watched.answer_all(reason)
        self.is_stuck = True
        self.stages.contain("unwind", None, self._installation.remove)
        self._end.set()

    def _deadlocked(self, place: str) -> WorkerLost:
        reason = (
            f"the engine is deadlocked: a request waits at {place} for a lock of another one on "
            'the same thread: load the model again with isolation="private"'
        )
        log.error("%s", reason)
        self.at_deadlock(place)
        return WorkerLost(reason)

    def _turn(self) -> None:
        """Make a turn, and sleep if there was nothing to do.

        If a turn fails outside its stages, the next turn still has the calls it did not run.

        Raises:
            EngineLost: several turns in a row have failed.
        """
        try:
            if not self.step():
                self.heartbeat.idle()
                self.scheduler.wait()
            self._failed_turns = 0
        except UNCONTAINED:
            raise
        except BaseException as error:
            self._failed_turns += 1
            log.exception("a turn of the engine failed")
            self.loaded.device.at_loss()
            if self._failed_turns >= MOST_FAILED_TURNS:
                raise EngineLost(f"the engine failed: {named(error)}") from error

    def enter(self) -> None:
        """Make the calling thread the engine's own."""
        self.loaded.device.enter(self.loaded.parameters)
        torch.set_grad_enabled(False)  # thread-wide, kept: fibers would switch it under us
        self._installation.install()
        self.running.prepare()

    def leave(self) -> None:
        """End all requests and restore the modules."""
        self._queue.close()  # after a crash, too: nothing may stay in a queue that no longer runs
        self.running.end_all(Cancelled("the engine was closed"))
        if not self.is_stuck:
            self._installation.remove()
        self.scheduler.close()
        self.stages.contain("learn", None, self.runner.probation.keep)
        self.parts.off_loop.close()

    def step(self) -> bool:
        """Make one turn: admit, choose, run, resume. False if there was nothing to run."""
        if self.stages.has_faults:
            self.stages.reach("turn")
        began_s, forward_s = self.heartbeat.beat(), 0.0
        self.running.fiber_s = self.running.longest_s = 0.0
        self.running.have_advanced = self.running.is_step_due = False
        if self._queue.has_news:
            self.running.take_news()
        if self.running.postponed:
            self.running.resume_held()
        while self.running.private is None and (
            states := self.scheduler.admit(len(self.running.by_number))
        ):
            self.running.admit(states)
            for state in states:
                self.running.start(state)
        selections = self.scheduler.select(self.running.parked)
        selected = [state for selection in selections for state in selection]
        if selected:
            forward_at_s, ride = self._clock(), self.running.private
            answers = [self.runner.inside(ride)] if ride else self.runner.execute(selections)
            forward_s = self._clock() - forward_at_s
            if self._queue.has_ended:
                self.running.end_cancelled()
            self.running.resume(zip(selected, answers, strict=True))
            if self.running.answers.shared.has_news:
                self.running.resume(self.running.answers.repeated(self.running.parked))
        turn_s, fiber_s = self._clock() - began_s, self.running.fiber_s
        self._stats.turn_s += turn_s
        self._stats.forward_s += forward_s
        self._stats.fiber_s += fiber_s
        if selected and not ride:
            loop_s, longest_s = turn_s - forward_s - fiber_s, self.running.longest_s
            kind, learn = self.scheduler.kind, self.scheduler.learning.turn
            turn = kind, len(selected), loop_s, fiber_s, longest_s
            self.stages.contain("learn", None, learn, *turn)
        return bool(selected) or self.running.have_advanced or self._queue.has_news
