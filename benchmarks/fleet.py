"""Several workers: two workers on the CPU against one, and the time of the router's choices.

Both pools run the same requests in turns, each worker with one thread; the result is the median of
the ratios. On a busy machine the cores are not free: the CPU time of each picture shows how much
two workers disturb each other.

usage: make bench     (or: python -m benchmarks.fleet [--requests N --rounds N --append-to FILE])
"""

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Hashable
from pathlib import Path

import carpool
from carpool.fleet.router import Router
from carpool.fleet.worker_load import RoutedRequest, StepTable, WorkerLoad
from carpool.worker.startup import PROCESS_NAME

MIN_RATIO = 1.8  # requests a second of two workers, relative to one
MOST_US = 100.0  # microseconds of a choice among a thousand workers


def choices_us(workers: int = 1000, count: int = 5000) -> list[float]:
    """CPU time of each choice of the router, at a load where some requests wait."""
    router, rng, times = Router(), random.Random(0), list[float]()
    tables: dict[Hashable, StepTable] = {
        kind: tuple(0.04 * (1 + kind) * rows**0.8 for rows in range(1, 9)) for kind in range(4)
    }
    for number in range(workers):
        router.add_worker(WorkerLoad(number, tables))
    for number in range(count):
        if number % 100 == 0:  # once a second, the workers' report interval
            for worker in router.workers.values():
                steps = {request: max(1.0, b.steps_left - 9) for request, b in worker.bound.items()}
                router.progressed(worker.id, steps, number / 100)
        router.hold(RoutedRequest(number, rng.randrange(4), rng.choice((8, 20, 50)), number / 100))
        began_s = time.process_time()
        bound = router.assign(number / 100)
        times.append(1e6 * (time.process_time() - began_s) / max(1, len(bound)))
        if number > 2 * workers and rng.random() < 0.8:
            router.drop(rng.randrange(number))
    return times


def cpu_s(pids: list[int]) -> float:
    """The CPU seconds of processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in fields) / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    """The worker processes: children of this process and of its fork servers."""
    parents, names = dict[int, int](), dict[int, str]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has exited
            names[int(path.parent.name)] = (path.parent / "comm").read_text().strip()
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return {
        pid
        for pid, parent in parents.items()
        if names[pid] == PROCESS_NAME and os.getpid() in (parent, parents.get(parent))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append-to", type=Path)
    options = parser.parse_args()
    prompts = ["a red circle on a blue background"] * options.requests
    took_s: dict[int, list[float]] = {1: [], 2: []}
    used_s: dict[int, list[float]] = {1: [], 2: []}
    engines, pids = dict[int, carpool.Engine](), dict[int, set[int]]()
    for workers in (1, 2):
        before = children()
        engines[workers] = carpool.load("shapes", workers=workers, device="cpu", threads=1)
        pids[workers] = children() - before
        engines[workers].generate(prompts[:16], progress=False)
    for _ in range(options.rounds):
        for workers, engine in engines.items():
            pids_now = sorted(pids[workers])
            began_s, began_cpu_s = time.perf_counter(), cpu_s(pids_now)
            engine.generate(prompts, progress=False)
            took_s[workers].append(time.perf_counter() - began_s)
            used_s[workers].append((cpu_s(pids_now) - began_cpu_s) / options.requests)
    for engine in engines.values():
        engine.close()
    ratio = statistics.median(a / b for a, b in zip(took_s[1], took_s[2], strict=True))
    one_ms, two_ms = (1e3 * statistics.median(used_s[workers]) for workers in (1, 2))
    times = choices_us()
    lines = [
        "",
        "## Several workers",
        "",
        f"{os.cpu_count()} cores; `shapes`, {options.requests} requests at once, {options.rounds} "
        "rounds in turn; `python -m benchmarks.fleet`.",
        "",
        "| what | figure | promise |",
        "| --- | --- | --- |",
        f"| requests a second of two workers, over one | {ratio:.2f} | at least {MIN_RATIO} |",
        f"| CPU time for each picture, one worker | {one_ms:.0f} ms | |",
        f"| CPU time for each picture, two workers | {two_ms:.0f} ms | |",
        f"| a choice among 1,000 workers, CPU time | {statistics.fmean(times):.0f} us (median "
        f"{statistics.median(times):.0f}) | under {MOST_US:.0f} us |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.append_to is not None:
        with options.append_to.open("a", encoding="utf-8") as file:
            file.write(text)
    return 0 if ratio >= MIN_RATIO and statistics.fmean(times) < MOST_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
