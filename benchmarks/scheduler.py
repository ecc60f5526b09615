"""How long the policy of `continuous` thinks: choose() and admit() with many parked and queued.

usage: make bench-scheduler     (or: python benchmarks/scheduler.py [--parked N --queued N])
"""

import argparse
import statistics
import time
from collections.abc import Callable

from carpool.schedule.continuous import Continuous
from carpool.schedule.cost import Costs, Curve
from carpool.types import Kind, Parked, Waiting

KINDS = [Kind("transformer.forward", size) for size in (256, 1024, 4096)]
KEYS = {kind: ("transformer", "forward", (("hidden_states", (kind.size, 64)),)) for kind in KINDS}
CURVES = {kind: Curve({1: 0.01, 8: 0.02, 64: 0.1}) for kind in KINDS}


def parked(number: int) -> Parked:
    kind = KINDS[number % len(KINDS)]
    return Parked(number, number, KEYS[kind], 1, 64, "denoise", kind, 0.001 * number, 0.3, 0.4)


def median_ms(work: Callable[[], object], turns: int = 51) -> float:
    times_s = []
    for _ in range(turns):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parked", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=10_000)
    options = parser.parse_args()
    policy = Continuous(Costs(CURVES), max_running=options.parked + 8)
    calls = [parked(number) for number in range(1, options.parked + 1)]
    first = options.parked + 1
    line = [Waiting(n, 0.001 * n, 0.4, 0.4) for n in range(first, first + options.queued)]
    for what, work in {
        f"choose(), {options.parked} parked": lambda: policy.choose(calls, 4000.0, 100.0),
        f"admit(), {options.queued} queued": lambda: policy.admit(line, options.parked, 100.0),
    }.items():
        print(f"{median_ms(work):8.3f} ms  {what}")


if __name__ == "__main__":
    main()
