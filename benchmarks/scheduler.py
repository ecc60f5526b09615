"""CPU time of the policy `continuous`: choose() and admit() with many parked and queued requests.

The calls of our own functions that one more denoising step of a lone request makes, by function:
the same number on every machine. And what the engine itself takes beside forwards and pipelines.

And the cost of observability (timelines, statistics, width reasons): a run of the embedded model is
recorded, its observations are repeated, and their time is compared with that of its forwards.

usage: make bench-scheduler     (or: python benchmarks/scheduler.py [--parked N --queued N])
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import carpool
from carpool.config import EngineSettings
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import load
from carpool.engine.observe.forward import Forward
from carpool.engine.observe.stats import FORWARD_BUCKETS_S, Stats
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.observe.width_reason import width_reason
from carpool.request.parameters import check
from carpool.schedule.batch_modes import together
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import Admission, CallKind, Choice, ParkedCall, QueuedRequest
from carpool.telemetry.histograms import histogram
from carpool.types import Request

KINDS = [CallKind("transformer.forward", size) for size in (256, 1024, 4096)]
KEYS = {kind: ("transformer", "forward", (("hidden_states", (kind.size, 64)),)) for kind in KINDS}
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
OFTEN = 100  # of a thousand steps: functions that fewer call are not listed
CURVES = {kind: Curve({1: 0.01, 8: 0.02, 64: 0.1}) for kind in KINDS}


def parked(number: int) -> ParkedCall:
    kind = KINDS[number % len(KINDS)]
    return ParkedCall(number, number, KEYS[kind], 1, 64, "denoise", kind, 0.001 * number, 0.3, 0.4)


def median_ms(work: Callable[[], object], turns: int = 51) -> float:
    times_s = []
    for _ in range(turns):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) * 1e3


class Recorded:
    """A policy that takes everybody aboard and fuses all it can, and keeps what it was asked."""

    def __init__(self) -> None:
        self.turns: list[tuple[Choice, Sequence[ParkedCall]]] = []

    def admit(self, waiting: Sequence[QueuedRequest], aboard: int, now_s: float) -> Admission:
        return Admission(tuple(one.request for one in waiting))

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        choice = together(parked)
        if parked:
            self.turns.append((choice, parked))
        return choice


class Nobody:
    """Hears of a request, and does nothing."""

    def event(self, event: object) -> None: ...

    def done(self, outcome: Any) -> None:
        assert outcome.error is None, outcome.error


def explaining_us(turns: Sequence[tuple[Choice, Sequence[ParkedCall]]]) -> float:
    """Microseconds that explaining takes in a turn, on average."""
    timelines, stats = TimelineStore(), Stats(time.monotonic)
    seconds = histogram(FORWARD_BUCKETS_S)
    known = {
        call.request: timelines.begin(str(call.request), 0.0) for _, all_ in turns for call in all_
    }
    for _, all_ in turns:
        for call in all_:
            known[call.request].start(0.0)
            timelines.parked(known[call.request], call.kind.name, call.key, 0.0)
    states: dict[int, Any] = {
        number: SimpleNamespace(timeline=timeline) for number, timeline in known.items()
    }
    began_s = time.perf_counter()
    for number, (choice, all_) in enumerate(turns):
        width_reason(choice, all_)
        calls = choice.calls
        shared = tuple([states[call.request] for call in calls])
        rows = tuple([call.rows for call in calls])
        forward = Forward("transformer", "forward", "denoise", shared, rows, number, 0.5)
        timelines.forward(forward)
        stats.forward(forward)
        seconds.observe(forward.duration_s)
        for call in choice.calls:
            stats.step(number)
            timelines.parked(known[call.request], call.kind.name, call.key, number + 0.5)
    return (time.perf_counter() - began_s) / len(turns) * 1e6


def explained(requests: int) -> str:
    """A line: what explaining costs with so many requests of two sizes."""
    settings, policy = EngineSettings(device="cpu", max_running=requests), Recorded()
    seconds: list[float] = []
    engine = EngineCore(
        load("shapes", settings),
        settings,
        off_loop=lambda work: work(),
        observers=[lambda forward: seconds.append(forward.duration_s)],
        policy=policy,
    )
    for number in range(requests):
        size = 64 if number % 2 == 0 else 32
        request = Request("a red circle", width=size, height=size, num_inference_steps=12)
        engine.submit(check(engine.loaded.card, request), Nobody())
    engine.enter()
    while engine.step():
        pass
    engine.leave()
    cost_us = statistics.median(explaining_us(policy.turns) for _ in range(21))
    forward_ms = statistics.mean(seconds) * 1e3
    return (
        f"{cost_us / 1e3:8.3f} ms  explaining, a forward of the embedded model, {requests} aboard: "
        f"{cost_us / 10 / forward_ms:.2f} % of its {forward_ms:.2f} ms"
    )


def calls_of_a_step() -> Counter[str]:
    """Calls of our own functions for one more step of a lone request, in a thousandth, by function.

    With costs and tables that are known well. Comprehensions are no functions.
    """
    settings, root, few, many = EngineSettings(device="cpu"), Path(carpool.__file__).parent, 20, 84
    calls = {few: Counter[str](), many: Counter[str]()}
    ticks = itertools.count()
    for steps, counter in calls.items():
        engine = EngineCore(
            load("shapes", settings), settings, off_loop=lambda work: work(),
            clock=lambda: next(ticks) / 10_000,
        )  # fmt: skip

        def count(frame: FrameType, event: str, _: object, counter: Counter[str] = counter) -> None:
            code = frame.f_code
            if event == "call" and code.co_name not in COMPREHENSIONS:
                path = Path(code.co_filename)
                if path.is_relative_to(root):
                    counter[f"{path.relative_to(root)}:{code.co_qualname}"] += 1

        engine.enter()
        for is_counted, its_steps in ((False, few), (True, steps)):
            request = Request("a red circle", width=64, height=64, num_inference_steps=its_steps)
            engine.submit(check(engine.loaded.card, request), Nobody())
            sys.setprofile(count if is_counted else None)
            while engine.step():
                pass
            sys.setprofile(None)
        engine.leave()
    more = calls[many]
    more.subtract(calls[few])
    return Counter({name: round(n * 1000 / (many - few)) for name, n in more.items() if n > 0})


def loop_ms(requests: int = 16) -> float:
    """Milliseconds a forward that the engine's loop takes itself, with mixed requests."""
    settings = EngineSettings(device="cpu", max_running=requests)
    engine = EngineCore(load("shapes", settings), settings, off_loop=lambda work: work())
    engine.enter()
    for number in range(requests):
        size, steps = (64, 32)[number % 2], (10, 14, 20, 30)[number % 4]
        request = Request("a red circle", width=size, height=size, num_inference_steps=steps)
        engine.submit(check(engine.loaded.card, request), Nobody())
    while engine.step():
        pass
    engine.leave()
    seconds = engine.statistics()
    own_s = seconds["turn_s"] - seconds["forward_s"] - seconds["fiber_s"]
    forwards = sum(entry["count"] for entry in seconds["forwards"])
    return float(own_s / forwards * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parked", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=10_000)
    options = parser.parse_args()
    policy = Continuous(Costs(CURVES), max_running=options.parked + 8)
    calls = [parked(number) for number in range(1, options.parked + 1)]
    first = options.parked + 1
    line = [QueuedRequest(n, 0.001 * n, 0.4, 0.4) for n in range(first, first + options.queued)]
    for what, work in {
        f"choose(), {options.parked} parked": lambda: policy.choose(calls, 4000.0, 100.0),
        f"admit(), {options.queued} queued": lambda: policy.admit(line, options.parked, 100.0),
    }.items():
        print(f"{median_ms(work):8.3f} ms  {what}")
    for requests in (1, 2, 32):
        print(explained(requests))
    print(f"{loop_ms():8.3f} ms  the loop's own, a forward, 16 mixed requests")
    calls_a_step = calls_of_a_step()
    files = {name.partition(":")[0] for name, n in calls_a_step.items() if n >= OFTEN}
    total = sum(calls_a_step.values()) / 1000
    print(f"{total:8.1f}     calls for one more step of a lone request, in {len(files)} files")
    for name, n in calls_a_step.most_common():
        if n >= OFTEN:
            print(f"{n / 1000:8.2f}     {name}")


if __name__ == "__main__":
    main()
