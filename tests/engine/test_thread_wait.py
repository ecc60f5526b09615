"""The wait of a thread, from its stack: locks of all kinds, and what only looks like one."""

import fcntl
import multiprocessing
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from carpool.engine.thread_wait import ThreadWait, are_at_work, wait_of

SLEEPER = [sys.executable, "-c", "input()"]


class Locks:
    """One of each kind, held until `free` is called."""

    def __init__(self, folder: Path) -> None:
        self.lock, self.reentrant = threading.Lock(), threading.RLock()
        self.semaphore, self.event = threading.Semaphore(1), threading.Event()
        self.condition, self.barrier = threading.Condition(), threading.Barrier(2)
        self.queue, self.simple = queue.Queue[int](), queue.SimpleQueue[int]()
        self.shared, self.future = multiprocessing.Lock(), Future[int]()
        self.file = folder / "lock"
        self._held: list[Any] = [self.lock, self.reentrant, self.semaphore, self.shared]
        for lock in self._held:
            lock.acquire()
        self._open = self.file.open("w")
        fcntl.flock(self._open, fcntl.LOCK_EX)

    def free(self) -> None:
        for lock in self._held:
            lock.release()
        self._open.close()
        self.event.set()
        self.barrier.abort()
        with self.condition:
            self.condition.notify_all()
        self.queue.put(1)
        self.simple.put(1)
        self.future.set_result(1)


def with_lock(locks: Locks) -> None:
    with locks.lock:
        pass


def with_semaphore(locks: Locks) -> None:
    with locks.semaphore:
        pass


def with_shared_lock(locks: Locks) -> None:
    with locks.shared:
        pass


def in_condition(locks: Locks) -> None:
    with locks.condition:
        locks.condition.wait()


def at_barrier(locks: Locks) -> None:
    with pytest.raises(threading.BrokenBarrierError):
        locks.barrier.wait()


def again_and_again(locks: Locks) -> None:
    while not locks.lock.acquire(timeout=0.05):
        pass


def file_lock(locks: Locks) -> None:
    with locks.file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def in_a_pool(locks: Locks) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(locks.lock.acquire).result()


def all_of_a_pool(locks: Locks) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda lock: lock.acquire(), [locks.lock]))


WAITS: dict[str, Callable[[Locks], Any]] = {
    "acquire": lambda locks: locks.lock.acquire(),
    "RLock": lambda locks: locks.reentrant.acquire(),
    "event": lambda locks: locks.event.wait(),
    "queue": lambda locks: locks.queue.get(),
    "simple queue": lambda locks: locks.simple.get(),
    "future": lambda locks: locks.future.result(),
    "futures": lambda locks: wait_for([locks.future]),
    **{
        work.__name__: work
        for work in (
            with_lock, with_semaphore, with_shared_lock, in_condition, at_barrier, again_and_again,
            file_lock, in_a_pool, all_of_a_pool,
        )
    },
}  # fmt: skip


@contextmanager
def running(work: Callable[[], Any], end: Callable[[], Any]) -> Iterator[int]:
    """A thread that runs until `end` is called; its id."""
    has_begun = threading.Event()

    def run() -> None:
        has_begun.set()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        end()
        thread.join(20)
        assert not thread.is_alive()


def resting(thread: int, tries: int = 400) -> ThreadWait:
    """The thread's wait once it has come to rest: it is at the same place for a while."""
    last = None
    for _ in range(tries):
        wait = wait_of(thread)
        if wait is not None and last is not None and wait.is_same(last):
            return wait
        last = wait
        threading.Event().wait(0.02)
    raise AssertionError("it never came to rest")


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_a_lock_is_told_with_its_line(name: str, tmp_path: Path) -> None:
    locks = Locks(tmp_path)
    with running(partial(WAITS[name], locks), locks.free) as thread:
        wait = resting(thread)

    assert wait.is_lock
    assert wait.place.startswith("test_thread_wait.py:")


def receive(ours: socket.socket) -> None:
    ours.recv(1)


def use_a_processor(is_over: threading.Event) -> None:
    while not is_over.is_set():
        torch.randn(64, 64) @ torch.randn(64, 64)


def test_waits_for_the_network_and_for_processes_are_no_locks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, running(partial(receive, ours), lambda: theirs.send(b"1")) as thread:
        assert not resting(thread).is_lock
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with running(lambda: process.wait(20), process.kill) as thread:
            assert not resting(thread).is_lock
        assert process.returncode


def test_sleep_and_work_are_no_locks() -> None:
    is_over = threading.Event()
    with running(lambda: time.sleep(0.2), lambda: None) as thread:
        assert not resting(thread).is_lock
    with running(partial(use_a_processor, is_over), is_over.set) as thread:
        for _ in range(20):
            wait = wait_of(thread)
            assert wait is None or not wait.is_lock


def test_code_of_libraries_does_not_count() -> None:
    lock = threading.Lock()
    lock.acquire()

    names = {"__name__": "torch._inductor.async_compile", "lock": lock}
    exec("def compile(): lock.acquire()", names)
    with running(names["compile"], lock.release) as thread:  # type: ignore[arg-type]
        threading.Event().wait(0.05)
        assert wait_of(thread) is None


def test_the_processors_time_tells_sleep_from_work() -> None:
    is_over, lock = threading.Event(), threading.Lock()
    lock.acquire()
    with (
        running(lambda: lock.acquire(), lock.release) as thread,
        running(partial(use_a_processor, is_over), is_over.set) as busy,
    ):
        asleep, awake = resting(thread), wait_of(busy)
        threading.Event().wait(0.1)
        assert resting(thread).cpu_s == asleep.cpu_s
        for _ in range(200):
            later = wait_of(busy)
            if awake is not None and later is not None and later.cpu_s > awake.cpu_s:
                break
            awake = awake or later
            threading.Event().wait(0.02)
        else:
            raise AssertionError("it used no processor")


def test_threads_are_at_work_unless_they_wait_or_are_ours_or_do_not_count() -> None:
    lock = threading.Lock()
    lock.acquire()
    others = set(sys._current_frames())
    with running(lambda: lock.acquire(), lock.release) as thread:
        resting(thread)
        assert not are_at_work(others)
        ours, theirs = socket.socketpair()
        with ours, theirs, running(partial(receive, ours), lambda: theirs.send(b"1")) as busy:
            resting(busy)
            assert are_at_work(others)
            assert not are_at_work({*others, busy})
