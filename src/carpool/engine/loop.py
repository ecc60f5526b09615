"""The main loop: admit requests, choose calls, run them as one forward, resume their fibers.

An `Engine` is driven by one thread, which calls `step` again and again (`run` does). `submit`,
`cancel`, `close` and `statistics` may be called from any thread. Every request is a `Rider`: its
pipeline runs in a fiber, and stands still at each heavy module call until `step` answers it.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from carpool.config import EngineSettings
from carpool.engine import pipeline
from carpool.engine.desk import Desk
from carpool.engine.execute import Failure, Ready, execute
from carpool.engine.fiber import Raised, Returned
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Interception
from carpool.engine.learned import Table
from carpool.engine.line import Line
from carpool.engine.lora import Adapters
from carpool.engine.rider import Listener, Outcome, Rider
from carpool.errors import (
    Cancelled,
    CarpoolError,
    InvalidValue,
    OutOfMemory,
    PipelineFailed,
)
from carpool.schedule.policy import Policy
from carpool.types import Clock, Event, Forward, Job

log = logging.getLogger("carpool")

Finish = Callable[[Callable[[], None]], object]
"""Runs work off the loop, in the order given: `executor.submit`, or a test's own."""


class Engine:
    """Runs the requests of one pipeline, several at a time."""

    def __init__(
        self,
        loaded: pipeline.Loaded,
        settings: EngineSettings,
        *,
        clock: Clock = time.monotonic,
        finish: Finish | None = None,
        on_forward: Callable[[Forward], None] = lambda forward: None,
        table: Table | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.loaded, self.settings = loaded, settings
        self._clock, self._on_forward = clock, on_forward
        self._line = Line(settings.max_queue, clock)
        self._desk = Desk(loaded, settings, self._line, clock, table, policy)
        self._riders: dict[int, Rider] = {}  # in flight, by number
        self._fuser = Fuser()
        self._interception = Interception(loaded.pipe.components)
        self._adapters = Adapters(loaded.pipe, loaded.device.torch)
        for name, path in loaded.lora.items():
            self.add_lora(name, path)
        self._finisher = ThreadPoolExecutor(1, "carpool-finish")
        self._finish: Finish = finish or self._finisher.submit
        self._calls = self._steps = 0
        self._tally: Counter[tuple[str, str, int, int]] = Counter()
        self._times = {"forward_s": 0.0, "fiber_s": 0.0, "turn_s": 0.0}
        self._classes_alone: set[str] = set()

    # From any thread

    def submit(self, job: Job, listener: Listener) -> None:
        """Put a checked request into the line; see `Line.put` for what it raises."""
        self._desk.refuse_late(job, list(self._riders.values()))
        free_places = max(0, self.settings.max_running - len(self._riders))
        self._line.put(job, listener, free_places=free_places)

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """End a request, waiting or running, before its next forward."""
        self._line.cancel(request_id, error)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Register an adapter while requests run; see `Adapters.add` for what it raises."""
        self._adapters.add(name, path)
        card = replace(self.loaded.card, lora=self._adapters.names)
        self.loaded = replace(self.loaded, card=card)

    def close(self) -> None:
        """End every request and let `run` return."""
        self._line.close()

    def statistics(self) -> dict[str, Any]:
        """What is going on, and what has been run so far. Durations in seconds.

        `turn_s` is the loop's whole busy time; without `forward_s` (modules) and `fiber_s` (the
        pipelines' own code) it is what the engine itself costs.
        """
        return {
            "waiting": len(self._line),
            "running": len(self._riders),
            "requests": self._line.admitted,
            "steps": self._steps,
            "forwards": [
                {"component": c, "method": m, "requests": requests, "rows": rows, "count": count}
                for (c, m, requests, rows), count in sorted(self._tally.copy().items())
            ],
            **self._desk.statistics(),
            "memory": {"peak_bytes": self.loaded.device.peak_bytes()},
            **self._times,
        }

    # On the engine's own thread

    def run(self) -> None:
        """Step until closed, sleeping while there is nothing to do."""
        try:
            self.enter()
            while not self._line.is_closed:
                if not self.step():
                    self._desk.wait()
        except Exception as error:  # a defect of ours: nobody may wait for ever because of it
            log.exception("the engine's loop failed")
            self._line.close()
            self._end_all(PipelineFailed(f"the engine failed: {error!r}"))
        finally:
            self.leave()

    def enter(self) -> None:
        """Make the calling thread the engine's own."""
        self.loaded.device.enter(self.loaded.parameters)
        torch.set_grad_enabled(False)  # of the thread, for good: fibers would swap it under us
        self._interception.install()

    def leave(self) -> None:
        """End what still runs and give the modules back as they were."""
        self._line.close()  # if it was a crash, nobody may join a line that never moves again
        self._end_all(Cancelled("the engine was closed"))
        self._interception.remove()
        self._adapters.remove()
        self._desk.keep()
        self._finisher.shutdown()

    def step(self) -> bool:
        """Make one turn: admit, choose, run, resume. False if there was nothing to run."""
        began_s = self._clock()
        self._end_unwanted()
        self._admit()
        if riders := self._desk.chosen(self._riders.values()):
            answers = self._forward([_ready(rider) for rider in riders])
            self._end_unwanted()  # whoever was given up meanwhile does not go on
            for rider, answer in zip(riders, answers, strict=True):
                if rider.number in self._riders:
                    self._resume(rider, answer)
        self._times["turn_s"] += self._clock() - began_s
        return bool(riders)

    def _admit(self) -> None:
        while riders := self._desk.admitted(len(self._riders)):
            self._board(riders)

    def _board(self, riders: Sequence[Rider]) -> None:
        for rider in riders:
            now_s = self._clock()
            self._riders[rider.number] = rider
            rider.listener.event(Event("started", rider.job.request_id, now_s))
            view = pipeline.view(self.loaded, rider.job.task)
            body = partial(pipeline.call, view, rider.job, self.loaded.card)
            self._settle(rider, self._in_fiber(partial(rider.start, view, body, now_s)))

    def _forward(self, ready: Sequence[Ready]) -> list[Any]:
        """Run calls of one key; gives answers or `Failure`s."""
        began_s = self._clock()
        answers = execute(ready, self._run, self._desk.widths, self.loaded.device.free)
        self._times["forward_s"] += self._clock() - began_s
        return answers

    def _run(self, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        self._desk.began()
        began_s = self._clock()
        with self._adapters.riding(calls, rows):
            answers = self._fuser.run(calls, rows)
        self.loaded.device.launched()
        target, duration_s = calls[0].target, self._clock() - began_s
        self._desk.ended(rows, duration_s)
        self._tally[target.component, target.method, len(calls), sum(rows)] += 1
        self._on_forward(
            Forward(
                target.component,
                target.method,
                target.phase,
                sum(rows),
                len(calls),
                duration_s,
                adapters=len({name for call in calls for name, _ in call.lora}),
            )
        )
        return answers

    def _resume(self, rider: Rider, answer: Any) -> None:
        assert rider.fiber is not None
        rider.ready = rider.parked = None
        if isinstance(answer, Failure):
            state = self._in_fiber(partial(rider.fiber.fail, answer.error))
        else:
            state = self._in_fiber(partial(rider.fiber.resume, answer))
        self._settle(rider, state)

    def _in_fiber(self, go: Callable[[], Any]) -> Any:
        """Run pipeline code until it parks or ends, and count the time as the pipeline's."""
        began_s = self._clock()
        state = go()
        self._times["fiber_s"] += self._clock() - began_s
        return state

    def _settle(self, rider: Rider, state: Any) -> None:
        """Note what a fiber came back with: its next call, or its end."""
        if isinstance(state, Returned):
            if rider.arrive():
                self._tell_step(rider, self._clock())
            self._end(rider, state.value, None)
        elif isinstance(state, Raised):
            self._end(rider, None, _explained(state.error, rider))
        else:
            now_s = self._clock()
            self._calls += 1
            if rider.park(self._described(state, rider.job), self._calls, now_s):
                self._tell_step(rider, now_s)

    def _tell_step(self, rider: Rider, now_s: float) -> None:
        self._steps += 1
        event = Event("step", rider.job.request_id, now_s, rider.step, rider.steps)
        rider.listener.event(event)

    def _described(self, call: Call, job: Job) -> Ready:
        target = call.target
        name = type(target.module).__name__
        if target.method == "generate":  # takes no generator: pipelines seed all of torch for it
            call = replace(call, seed=job.seed)
        elif target.spec is None and name not in self._classes_alone:
            self._classes_alone.add(name)
            log.warning("%s (%s) has no fusing spec: its calls run alone", name, target.component)
        if job.lora:
            call = replace(call, lora=job.lora)
        key, rows = self._fuser.describe(call)
        if self.settings.lora_batching == "grouped":
            key = key, job.lora
        return Ready(call, key, rows)

    def _end_unwanted(self) -> None:
        for rider, error in self._line.unwanted(self._riders.values()):
            self._end(rider, None, error)

    def _end_all(self, error: CarpoolError) -> None:
        for rider in self._line.take_all():
            self._end(rider, None, error)
        for rider in list(self._riders.values()):
            self._end(rider, None, error)

    def _end(self, rider: Rider, output: Any, error: Exception | None) -> None:
        """Let a request go, keep nothing of it, and tell its listener off the loop."""
        now_s = self._clock()
        self._riders.pop(rider.number, None)
        self._line.ended()
        timings = rider.leave(now_s)
        device, mark = self.loaded.device, self.loaded.device.mark()

        def tell() -> None:
            fields, failure = {}, error
            try:
                if failure is None:
                    fields = pipeline.finish(output, rider.job, partial(device.to_host, mark=mark))
            except Exception as defect:
                failure = PipelineFailed(f"the output cannot be converted: {defect!r}")
            rider.listener.done(Outcome(rider.job, fields, failure, timings))
            rider.listener.event(
                Event("finished", rider.job.request_id, now_s, rider.step, rider.steps, failure)
            )

        self._finish(tell)


def _ready(rider: Rider) -> Ready:
    assert rider.ready is not None, "a rider in flight is always parked between turns"
    return rider.ready


def _explained(error: BaseException, rider: Rider) -> Exception:
    """What the caller is told of an exception that left the pipeline."""
    _empty_frames(error)
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        told: CarpoolError = OutOfMemory(f"the pipeline's own code ran out of memory: {error}")
    elif rider.order == 0 and isinstance(error, (ValueError, TypeError)):  # it never parked
        told = InvalidValue(f"the pipeline refuses the request: {error}")
    else:
        told = PipelineFailed(f"the pipeline failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _empty_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames that an error, and those behind it, came through."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _ = frame.f_locals  # brings what `locals()` gave out before up to date: empty
        errors += [e for e in (one.__cause__, one.__context__) if e and id(e) not in seen]
