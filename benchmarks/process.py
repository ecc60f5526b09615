"""Processes of benchmarks: their memory, their CPU time, the machine they run on."""

import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

ARENAS = "MALLOC_ARENA_MAX"  # of glibc: heaps that threads may have


def new_process(initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """A process that has nothing of this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=initializer)


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of the process, all its threads."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def with_one_heap() -> None:
    """Begin this program again with one heap for all its threads, where the C library is glibc.

    With a heap for each thread, as is usual, equal engines of one process differ by up to 5 % for
    as long as it lives, by where the memory of their forwards happens to lie; with one, by 1 %
    (docs/experiments.md).
    """
    if os.environ.get(ARENAS) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, ARENAS: "1"})


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) for torch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )
