"""CPU time of the policy `continuous` with many parked and queued requests, and of the router.

Also the calls of Carpool's functions in one more denoising step of a single request, by function
(equal on every machine), and the engine's own time without forwards and pipelines.

usage: make bench-scheduler     (or: python benchmarks/scheduler.py)
"""

import itertools
import random
import statistics
import sys
import time
import timeit
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import FrameType

import carpool
from carpool.config import EngineSettings
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import load
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest, StepTable, WorkerLoad
from carpool.request.parameters import check
from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.types import Request
from carpool_lab.check.lockstep import OutcomeListener

KINDS = [CallKind("transformer.forward", size) for size in (256, 1024, 4096)]
KEYS = {kind: ("transformer", "forward", (("hidden_states", (kind.size, 64)),)) for kind in KINDS}
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
PARKED, QUEUED, WORKERS = 1000, 10_000, 1000
OFTEN = 100  # calls in a thousand steps; rarer functions are not listed
CURVES = {kind: Curve({1: 0.01, 8: 0.02, 64: 0.1}) for kind in KINDS}


def parked(number: int) -> ParkedCall:
    kind = KINDS[number % len(KINDS)]
    return ParkedCall(number, number, KEYS[kind], 1, 64, "denoise", kind, 0.001 * number, 0.3, 0.4)


def median_ms(work: Callable[[], object], turns: int = 51) -> float:
    return statistics.median(timeit.repeat(work, number=1, repeat=turns)) * 1e3


def routing_ms(requests: int = 5000) -> float:
    """Mean CPU time of a choice among a thousand workers, at a load where some requests wait."""
    router, rng, used_s, bound = Router(), random.Random(0), 0.0, 0
    tables: dict[Hashable, StepTable] = {
        kind: tuple(0.04 * (1 + kind) * rows**0.8 for rows in range(1, 9)) for kind in range(4)
    }
    for number in range(WORKERS):
        router.add_worker(WorkerLoad(number, tables))
    for number in range(requests):
        now_s = number / 100
        if number % 100 == 0:  # once a second, the workers' report interval
            for worker in router.workers.values():
                steps = {request: max(1.0, b.steps_left - 9) for request, b in worker.bound.items()}
                router.progressed(worker.id, steps, now_s)
        router.hold(RoutedRequest(number, now_s, kind=number % 4, steps=rng.choice((8, 20, 50))))
        began_s = time.process_time()
        bound += len(router.assign(now_s))
        used_s += time.process_time() - began_s
        if number > 2 * WORKERS and rng.random() < 0.8:
            router.drop(rng.randrange(number))
    return 1e3 * used_s / bound


def run(engine: EngineCore, requests: Sequence[Request], later: deque[Callable[[], None]]) -> None:
    """Run requests to their ends on an entered engine; `later` is work for its other threads."""
    listeners = [OutcomeListener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(check(engine.loaded.card, request), listener)
    while engine.step() or later:
        while later:
            later.popleft()()
    assert not any(listener.error for listener in listeners)


def calls_of_a_step() -> Counter[str]:
    """Calls of own functions in a thousand more steps of a single request, by function.

    Costs and tables are well known. Comprehensions do not count as functions.
    """
    settings, root = EngineSettings(device="cpu"), Path(carpool.__file__).parent
    short, long = 20, 84
    calls = {short: Counter[str](), long: Counter[str]()}
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
        for is_counted, its_steps in ((False, short), (True, steps)):
            request = Request("a red circle", width=64, height=64, num_inference_steps=its_steps)
            sys.setprofile(count if is_counted else None)
            run(engine, [request], deque())
            sys.setprofile(None)
        engine.leave()
    difference = calls[long]
    difference.subtract(calls[short])
    steps = long - short
    return Counter({name: round(n * 1000 / steps) for name, n in difference.items() if n > 0})


def loop_ms(requests: int = 16) -> float:
    """Milliseconds of the loop's own CPU time per forward, with mixed requests.

    Work that the engine leaves to its other threads, such as converting pictures, does not count.
    """
    later, clock = deque[Callable[[], None]](), time.thread_time
    settings = EngineSettings(device="cpu", max_running=requests)
    loaded = load("shapes", settings)
    engine = EngineCore(loaded, settings, off_loop=later.append, clock=clock)
    engine.enter()
    sides_and_steps = ((64, 10), (32, 14), (64, 20), (32, 30))
    mixed = [
        Request("a red circle", width=side, height=side, num_inference_steps=steps)
        for side, steps in (sides_and_steps * requests)[:requests]
    ]
    run(engine, mixed, later)
    engine.leave()
    seconds = engine.statistics()
    own_s = seconds["turn_s"] - seconds["forward_s"] - seconds["fiber_s"]
    forwards = sum(entry["count"] for entry in seconds["forwards"])
    return float(own_s / forwards * 1e3)


def main() -> None:
    policy = Continuous(Costs(CURVES), max_running=PARKED + 8)
    calls = [parked(number) for number in range(1, PARKED + 1)]
    numbers = range(PARKED + 1, PARKED + 1 + QUEUED)
    line = [QueuedRequest(n, 0.001 * n, 0.4, 0.4) for n in numbers]
    for label, work in {
        f"choose(), {PARKED} parked": lambda: policy.choose(calls, 4000.0, 100.0),
        f"admit(), {QUEUED} queued": lambda: policy.admit(line, PARKED, 100.0),
    }.items():
        print(f"{median_ms(work):8.3f} ms  {label}")
    print(f"{routing_ms():8.3f} ms  the router's choice among {WORKERS} workers")
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
