"""The simulator decides as the engine does: same arrivals, same costs, the same batches."""

import random
from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from carpool.config import BatchingMode
from carpool.engine.request import RequestState
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind, QueuedRequest
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.scenario import MODES
from carpool_lab.simulate.simulator import SimulatedRequest, Stage, Worker
from support.engine_driver import Drive, Recorder, VirtualClock, driving
from support.tiny import ARGUMENTS

ARRIVALS = 40
STAGES = {  # seconds by rows; predictions know of denoising only, so decodes take hardly any
    "text_encoder.forward": Curve({1: 0.2, 16: 1.7}),
    "text_encoder_2.forward": Curve({1: 0.1, 16: 0.1}),
    "transformer.forward": Curve({1: 1.0, 4: 1.6, 16: 6.4}),
    "vae.decode": Curve({1: 1e-6, 16: 1e-6}),
}
PHASES = {"text_encoder.forward": "encode", "text_encoder_2.forward": "encode"}
Arrival = tuple[float, Mapping[str, Any]]
Batch = tuple[str, tuple[int, ...]]


class Told(Costs):
    """Costs that are known and never change."""

    def curve(self, kind: CallKind) -> Curve:
        return STAGES[kind.name]

    def learn(self, kind: CallKind, rows: int, *seconds: float) -> None:
        pass


def arrivals(rate_qps: float) -> list[Arrival]:
    dice, now_s, made = random.Random(3), 0.0, list[Arrival]()
    for _ in range(ARRIVALS):
        now_s += dice.expovariate(rate_qps)
        body = {
            "num_inference_steps": dice.choice([2, 3, 6]),
            "guidance_scale": dice.choice([2.0, 3.5]),
            "priority": dice.choice([0, 0, 0, 1]),
        }
        made.append((now_s, body))
    return made


class Timed:
    """Lets forwards of an engine take what the costs say; who arrives meanwhile is submitted."""

    def __init__(self, drive: Drive, clock: VirtualClock, coming: list[Arrival], base: Any) -> None:
        self.drive, self.clock, self.coming, self.base = drive, clock, deque(coming), base
        self.heard: list[Recorder] = []
        self.batches: list[Batch] = []
        scheduler, self.fuse = drive.engine.scheduler, drive.engine.runner.fuser.run
        scheduler.costs = scheduler.learning.costs = scheduler._predictor.costs = Told()
        self.choose = scheduler.select
        scheduler.select = self.chosen  # type: ignore[method-assign]
        drive.engine.runner.fuser.run = self.run  # type: ignore[method-assign]

    def chosen(self, states: Any) -> list[list[RequestState]]:
        selections = self.choose(states)
        for chosen in selections:
            name = self.drive.engine.scheduler.kind.name
            self.batches.append((name, tuple(sorted(rider.number for rider in chosen))))
        return selections

    def run(self, calls: Any, rows: Any) -> Any:
        name = f"{calls[0].target.component}.{calls[0].target.method}"
        self.pass_until(self.clock.now_s + STAGES[name].seconds(sum(rows)))
        return self.fuse(calls, rows)

    def pass_until(self, then_s: float) -> None:
        while self.coming and self.coming[0][0] <= then_s:
            self.clock.now_s, body = self.coming.popleft()
            self.heard.append(self.drive.submit(**{**self.base, **body}))
        self.clock.now_s = then_s

    def play(self) -> None:
        while self.coming or any(not one.is_done for one in self.heard):
            if not self.drive.engine.step():
                next_s = self.coming[0][0] if self.coming else float("inf")
                self.pass_until(min(next_s, self.drive.engine.scheduler.wake_s))


def simulated(coming: list[Arrival], mode: BatchingMode) -> list[Batch]:
    costs = Told()
    kinds = {name: CallKind(name, 1) for name in STAGES}
    rides = []
    for number, (at_s, body) in enumerate(coming, 1):
        steps = body["num_inference_steps"]
        stages = tuple(
            Stage(
                kinds[name],
                "denoise" if name == "transformer.forward" else PHASES.get(name, "decode"),  # type: ignore[arg-type]
                name,
                1.0 if name == "transformer.forward" else 0.0,
                count=steps if name == "transformer.forward" else 1,
            )
            for name in STAGES
        )
        said = {n: v for n, v in body.items() if n != "priority"}
        waiting = QueuedRequest(
            number, at_s, float(steps), float(steps), priority=body["priority"], signature=said,
            wave=tuple(said.items()),
        )  # fmt: skip
        rides.append(SimulatedRequest(waiting, stages))
    worker = Worker(
        MODES[mode](costs), costs, {"encode": 8, "denoise": 8, "decode": 4}, is_traced=True
    )
    return simulate(rides, [worker]).batches


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode == "continuous" else [pytest.mark.slow])
        for mode in get_args(BatchingMode)
    ],
)
def test_the_simulator_forms_the_batches_of_the_engine(mode: BatchingMode) -> None:
    coming, clock = arrivals(rate_qps=0.45), VirtualClock()
    with driving(
        "flux",
        clock=clock,
        mode=mode,
        batching_max_size=8,
        batching_delay_ms=5.0,
        max_num_seqs=8,
        request_batch_max_wait_ms=20.0,
    ) as drive:
        engine = Timed(drive, clock, coming, ARGUMENTS["flux"])
        drive.engine.scheduler._policy = MODES[mode](Told())
        engine.play()

    phases = [(_phase(name), riders) for name, riders in engine.batches]
    assert phases == simulated(coming, mode)
    assert len({rider for _, riders in phases for rider in riders}) == ARRIVALS


def _phase(name: str) -> str:
    return "denoise" if name == "transformer.forward" else PHASES.get(name, "decode")
