"""Processes of benchmarks: memory, CPU time."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

ARENAS = "MALLOC_ARENA_MAX"  # glibc: maximum number of heaps


def new_process(initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A spawned process that shares no state with this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=initializer)


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of the process with all threads."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def with_one_heap() -> None:
    """Restart this program with one heap for all threads, if the C library is glibc.

    With the usual heap per thread, equal engines of one process differ permanently by up to 5 %,
    because of the placement of their forwards' memory; with one heap by 1 %
    (docs/experiments.md).
    """
    if os.environ.get(ARENAS) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, ARENAS: "1"})
