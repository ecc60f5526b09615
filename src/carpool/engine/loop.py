"""The main loop: admit requests, choose calls, run them as one forward, resume their fibers.

An `Engine` is driven by one thread, which calls `step` again and again (`run` does). `submit`,
`cancel`, `close` and `statistics` may be called from any thread. Every request is a `Rider`: its
pipeline runs in a fiber, and stands still at each heavy module call until `step` answers it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from carpool.config import EngineSettings
from carpool.engine.adapters.folder import Folder
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.cost_store import Table
from carpool.engine.execute import Failure, Ready, execute
from carpool.engine.faults import Faults
from carpool.engine.fiber import Raised, Returned
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Interception
from carpool.engine.isolation import Isolation
from carpool.engine.model.load import Loaded, versions
from carpool.engine.model.preview import Glimpse, Previews, Watch
from carpool.engine.model.view import call, finish, view
from carpool.engine.numerics import Exact
from carpool.engine.observe.heartbeat import Pulse
from carpool.engine.observe.stats import Tally, memory
from carpool.engine.observe.timeline import Lives
from carpool.engine.pipeline_errors import explained
from carpool.engine.queue import Line
from carpool.engine.request import Listener, Outcome, Rider
from carpool.engine.scheduler import Desk
from carpool.engine.specs.probation import Probation
from carpool.engine.specs.verdicts import Verdicts
from carpool.engine.tokenizers import HostCall, Tokenizers
from carpool.errors import (
    Cancelled,
    CarpoolError,
    PipelineFailed,
    SettingRejected,
    reason,
)
from carpool.schedule.policy import Policy
from carpool.types import CheckedRequest, Clock, Event, Forward, Phase

log = logging.getLogger("carpool")

Finish = Callable[[Callable[[], None]], object]
"""Runs work off the loop, in the order given: `executor.submit`, or a test's own."""

OnRide = Callable[[Phase, int, Mapping[str, float]], None]
"""Hears of a forward's phase, rows and riders: ids, with the seconds from each one's submission."""


class Engine:
    """Runs the requests of one pipeline, several at a time."""

    def __init__(
        self,
        loaded: Loaded,
        settings: EngineSettings,
        *,
        clock: Clock = time.monotonic,
        finish: Finish | None = None,
        on_forward: Callable[[Forward], None] = lambda forward: None,
        on_ride: OnRide | None = None,
        table: Table | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.loaded, self.settings = loaded, settings
        self._clock, self._on_forward, self._on_ride = clock, on_forward, on_ride
        self._lives, self._tally = Lives(), Tally(clock)
        self.pulse, self._faults = Pulse(clock), Faults.from_environment(os.environ)
        self._line = Line(settings.max_queue, clock, self._lives)
        self._desk = Desk(loaded, settings, self._line, clock, table, policy)
        self._riders: dict[int, Rider] = {}  # in flight, by number
        self._fuser = Fuser(is_exact=settings.numerics == "exact")
        kept = table.path.with_suffix(".fusing.json") if table else None
        self._probation = Probation(
            self._fuser, infers=settings.infer_specs, verdicts=Verdicts(kept, versions())
        )
        self._isolation = Isolation(loaded.modules, loaded.device.torch)  # before all that patches
        self._interception = Interception(loaded.modules)
        self._tokenizers = Tokenizers(loaded.pipe.components)
        self._previews = Previews(loaded.pipe)
        self._adapters = Adapters(loaded.pipe, loaded.device.torch)
        self._folder = Folder(settings.lora_dir, self._adapters.add)
        self._reloading = threading.Lock()
        for name, path in loaded.lora.items():
            self.add_lora(name, path)
        for problem in self.reload():
            log.warning("%s", problem)
        self._finisher = ThreadPoolExecutor(1, "carpool-finish")
        self._finish: Finish = finish or self._finisher.submit
        self._hosted = ThreadPoolExecutor(1, "carpool-text")
        self._host: Finish = finish or self._hosted.submit
        self._calls = 0
        self._times = {"forward_s": 0.0, "fiber_s": 0.0, "turn_s": 0.0}
        self._classes_alone: set[str] = set()

    # From any thread

    def submit(self, job: CheckedRequest, listener: Listener) -> None:
        """Put a checked request into the line; see `Gate.check`, `Line.put` for what they raise."""
        self._desk.refuse_late(job, list(self._riders.values()))
        self._desk.refuse_overload(job)
        free_places = max(0, self.settings.max_running - len(self._riders))
        self._line.put(job, listener, free_places=free_places, place_s=self.place_s)

    def cancel(self, request_id: str, error: CarpoolError | None = None) -> None:
        """End a request, waiting or running, before its next forward."""
        self._line.cancel(request_id, error)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Register an adapter while requests run; see `Adapters.add` for what it raises."""
        self._adapters.add(name, path)
        self._offer()

    def reload(self) -> list[str]:
        """Read the folder of adapters and the batching config again, while requests run.

        Returns:
            What was wrong with them: it was not taken, the rest was.
        """
        with self._reloading:
            problems = self._folder.read()
            self._offer()
            try:
                self._desk.reload()
            except SettingRejected as error:
                problems.append(str(error))
        return problems

    def _offer(self) -> None:
        names = tuple(n for n in self._adapters.names if n not in self._folder.hidden)
        self.loaded = replace(self.loaded, card=replace(self.loaded.card, lora=names))

    @property
    def place_s(self) -> float | None:
        """When the next place is likely to be free; None while nothing is known of that."""
        return self._desk.gate.place_s

    @property
    def overload_stage(self) -> int:
        """0 to 3: see `carpool.schedule.overload`."""
        return self._desk.gate.stage

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
            **self._tally.statistics(),
            **self._desk.statistics(),
            "fusing": self._probation.statistics(),
            "memory": memory(self.loaded),
            **self._times,
        }

    def life(self, request_id: str) -> dict[str, Any] | None:
        """What a request did when, and what it waited for; None if it is not known any more."""
        return self._lives.to_json(request_id, self._clock())

    # On the engine's own thread

    def run(self) -> None:
        """Step until closed, sleeping while there is nothing to do."""
        try:
            self.enter()
            while not self._line.is_closed:
                if not self.step():
                    self.pulse.rest()
                    self._desk.wait()
        except Exception as error:  # a defect of ours: nobody may wait for ever because of it
            log.exception("the engine's loop failed")
            self._line.close()
            self._end_all(PipelineFailed(f"the engine failed: {_named(error)}"))
        finally:
            self.leave()

    def enter(self) -> None:
        """Make the calling thread the engine's own."""
        self.loaded.device.enter(self.loaded.parameters)
        torch.set_grad_enabled(False)  # of the thread, for good: fibers would swap it under us
        self._interception.install()
        self._isolation.install()
        self._tokenizers.install()

    def leave(self) -> None:
        """End what still runs and give the modules back as they were."""
        self._line.close()  # if it was a crash, nobody may join a line that never moves again
        self._end_all(Cancelled("the engine was closed"))
        self._interception.remove()
        self._tokenizers.remove()
        self._adapters.remove()
        self._isolation.remove()
        self.loaded.undo()
        self._desk.keep()
        self._probation.keep()
        self._hosted.shutdown(cancel_futures=True)
        self._finisher.shutdown()

    def step(self) -> bool:
        """Make one turn: admit, choose, run, resume. False if there was nothing to run."""
        began_s = self._clock()
        self.pulse.beat()
        self._end_unwanted()
        answered = self._line.answered()
        for rider, answer in answered:
            if rider.number in self._riders:
                self._resume(rider, answer)
        self._admit()
        parked = [rider for rider in self._riders.values() if rider.ready is not None]
        if riders := self._desk.chosen(parked):
            before = self._times.copy()
            answers = self._forward(riders)
            self._end_unwanted()  # whoever was given up meanwhile does not go on
            for rider, answer in zip(riders, answers, strict=True):
                if rider.number in self._riders:
                    self._resume(rider, answer)
        turn_s = self._clock() - began_s
        self._times["turn_s"] += turn_s
        if riders:
            forward_s, fiber_s = (self._times[n] - before[n] for n in ("forward_s", "fiber_s"))
            self._desk.turned(len(riders), turn_s - forward_s - fiber_s, fiber_s)
        return bool(riders or answered or self._line.has_answers)

    def _admit(self) -> None:
        while riders := self._desk.admitted(len(self._riders)):
            self._board(riders)

    def _board(self, riders: Sequence[Rider]) -> None:
        for rider in riders:
            now_s = self._clock()
            self._riders[rider.number] = rider
            self._tally.aboard(now_s - rider.submitted_s)
            rider.listener.event(Event("started", rider.job.request_id, now_s))
            mine = view(self.loaded, rider.job.task)
            if rider.job.previews and hasattr(mine, "scheduler") and self._previews.fit():
                rider.watch = Watch(rider.job.previews, partial(self._glimpsed, rider))
                rider.watch.over(mine.scheduler)
            rider.context = self._isolation.context(rider.job.seed)
            body = partial(call, mine, rider.job, self.loaded.card)
            self._settle(rider, self._in_fiber(partial(rider.start, mine, body, now_s)))

    def _forward(self, riders: Sequence[Rider]) -> list[Any]:
        """Run the calls, of one key, that riders are parked on; gives answers or `Failure`s."""
        ready = [_ready(rider) for rider in riders]
        began_s = self._clock()
        seeds = {id(_ready(rider).call): rider.job.seed for rider in riders}
        faulty = self._faults.around(self._run, seeds, is_exact=self._fuser.is_exact)
        run = partial(self._probation.around(faulty, self._run_together), ready[0].key)
        answers = execute(ready, run, self._desk.widths, self.loaded.device.free)
        ended_s = self._clock()
        self._times["forward_s"] += ended_s - began_s
        lives = [rider.life for rider in riders]
        self._lives.rode(lives, began_s, ended_s)
        if self._on_ride is not None:
            times = {life.request_id: began_s - life.submitted_s for life in lives}
            self._on_ride(lives[0].phase, sum(one.rows for one in ready), times)
        return answers

    def _run(self, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        self._desk.began()
        self.pulse.beat(self._desk.expected_s(rows))
        began_s = self._clock()
        with self._adapters.riding(calls, rows):
            answers = self._fuser.run(calls, rows)
        self.loaded.device.launched()
        target, duration_s = calls[0].target, self._clock() - began_s
        self._desk.ended(rows, duration_s)
        forward = Forward(
            target.component,
            target.method,
            target.phase,
            sum(rows),
            len(calls),
            duration_s,
            adapters=len({name for call in calls for name, _ in call.lora}),
        )
        self._tally.forward(forward)
        self._on_forward(forward)
        return answers

    def _run_together(self, calls: Sequence[Call], rows: Sequence[int], mode: Exact) -> list[Any]:
        """Run calls as one forward that answers nobody, to compare it."""
        self.pulse.beat(self._desk.expected_s(rows))
        with self._adapters.riding(calls, rows):
            return self._fuser.fused(calls, rows, mode)

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
        self.pulse.beat()
        state = go()
        self._times["fiber_s"] += self._clock() - began_s
        return state

    def _settle(self, rider: Rider, state: Any) -> None:
        """Note what a fiber came back with: its next call, or its end."""
        assert rider.context is not None
        if rider.context.overlay.changed:
            rider.life.exclusive = self._isolation.exclusive(rider.context)
        if isinstance(state, Returned):
            if rider.arrive():
                self._tell_step(rider, self._clock())
            self._end(rider, state.value, None)
        elif isinstance(state, Raised):
            self._end(rider, None, explained(state.error, has_parked=rider.order > 0))
        elif isinstance(state, HostCall):
            self._host(partial(self._run_on_host, rider, state))
        else:
            now_s = self._clock()
            self._calls += 1
            ready, target = self._described(state, rider.job), state.target
            if rider.park(ready, self._calls, now_s):
                self._tell_step(rider, now_s)
            self._lives.parked(rider.life, (target.component, target.method), ready.key, now_s)

    def _run_on_host(self, rider: Rider, call: HostCall) -> None:
        try:
            answer = call.run()
        except Exception as error:
            answer = Failure(error)
        self._line.answer(rider, answer)

    def _tell_step(self, rider: Rider, now_s: float) -> None:
        self._tally.step(now_s)
        rider.life.step, rider.life.steps = rider.step, rider.steps
        event = Event("step", rider.job.request_id, now_s, rider.step, rider.steps)
        rider.listener.event(event)

    def _glimpsed(self, rider: Rider, glimpse: Glimpse) -> None:
        """Have a preview drawn and told off the loop, unless there is more important work."""
        if self.overload_stage:
            return
        now_s, device, mark = self._clock(), self.loaded.device, self.loaded.device.mark()

        def show() -> None:
            try:
                picture = self._previews.picture(glimpse, partial(device.to_host, mark=mark))
            except Exception:  # the request itself is as well as before
                log.exception("request %s: no preview", rider.job.request_id)
                return
            if picture is not None:
                told = Event("preview", rider.job.request_id, now_s, glimpse.step, glimpse.steps)
                rider.listener.event(replace(told, picture=picture))

        self._finish(show)

    def _described(self, call: Call, job: CheckedRequest) -> Ready:
        target = call.target
        name = type(target.module).__name__
        if job.lora:
            call = replace(call, lora=job.lora)
        call = self._probation.with_table(call)
        is_alone = call.target.spec is None and target.method != "generate"
        if is_alone and name not in self._classes_alone:
            self._classes_alone.add(name)
            log.warning("%s (%s) has no fusing spec: its calls run alone", name, target.component)
        key, rows = self._fuser.describe(call)
        if self._probation.runs_alone(call, key):
            key = self._fuser.alone(call)
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
        rider.leave()
        self._lives.end(rider.life, error, now_s)
        if now_s > rider.wanted_s:
            self._tally.late()
        timings = rider.life.timings()
        device, mark = self.loaded.device, self.loaded.device.mark()

        def tell() -> None:
            fields, failure = {}, error
            try:
                if failure is None:
                    fields = finish(output, partial(device.to_host, mark=mark))
            except Exception as defect:
                failure = PipelineFailed(f"the output cannot be converted: {_named(defect)}")
                failure.__cause__ = defect
                rider.life.fail(failure)
            rider.listener.done(Outcome(rider.job, fields, failure, timings))
            rider.listener.event(
                Event("finished", rider.job.request_id, now_s, rider.step, rider.steps, failure)
            )

        self._finish(tell)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {reason(error)}"


def _ready(rider: Rider) -> Ready:
    assert rider.ready is not None, "a rider in flight is always parked between turns"
    return rider.ready
