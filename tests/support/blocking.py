"""Steps of a pipeline that wait for each other, over a call of its module: locks of every kind."""

import asyncio
import fcntl
import multiprocessing
import queue
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from support.odd_pipeline import Odd

KEPT: list[Any] = []
"""What a thread that never ends has open: it is closed with the process."""
THREADS_WAIT_S = 10.0  # longer than any request here; Python joins threads of pools at its exit


def over_a_call(lock: AbstractContextManager[Any]) -> Odd:
    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        with lock:
            return latents + 0.1 * pipe.net(latents, timestep)

    return step


def rlock() -> Odd:
    return over_a_call(threading.RLock())


def lock() -> Odd:
    return over_a_call(threading.Lock())


def semaphore() -> Odd:
    return over_a_call(threading.Semaphore(2))


def condition() -> Odd:
    return over_a_call(threading.Condition(threading.Lock()))


def shared_lock() -> Odd:
    return over_a_call(multiprocessing.Lock())


def notified() -> Odd:
    """Waits until the one before has notified."""
    condition, is_free = threading.Condition(), [True]

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        with condition:
            condition.wait_for(lambda: is_free and is_free.pop())
        noise = pipe.net(latents, timestep)
        with condition:
            is_free.append(True)
            condition.notify()
        return latents + 0.1 * noise

    return step


def notified_in_time() -> Odd:
    condition, is_free = threading.Condition(), [True]

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        with condition:
            while not is_free:
                condition.wait(0.02)
            is_free.clear()
        noise = pipe.net(latents, timestep)
        is_free.append(True)
        return latents + 0.1 * noise

    return step


def queue_of_tokens(tokens: Any = None) -> Odd:
    tokens = queue.Queue() if tokens is None else tokens
    tokens.put(1)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        token = tokens.get()
        noise = pipe.net(latents, timestep)
        tokens.put(token)
        return latents + 0.1 * noise

    return step


def simple_queue() -> Odd:
    return queue_of_tokens(queue.SimpleQueue())


def event() -> Odd:
    is_free = threading.Event()
    is_free.set()

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        is_free.wait()
        is_free.clear()
        noise = pipe.net(latents, timestep)
        is_free.set()
        return latents + 0.1 * noise

    return step


def future() -> Odd:
    """Each waits for the one that began before."""
    futures = [Future[None]()]
    futures[0].set_result(None)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        before, mine = futures[-1], Future[None]()
        futures.append(mine)
        before.result()
        noise = pipe.net(latents, timestep)
        mine.set_result(None)
        return latents + 0.1 * noise

    return step


def file_lock() -> Odd:
    name = tempfile.mkstemp()[1]

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        with open(name, "w") as file:
            KEPT.append(file)
            fcntl.flock(file, fcntl.LOCK_EX)
            return latents + 0.1 * pipe.net(latents, timestep)

    return step


def lock_in_a_pool() -> Odd:
    """A thread of a pool takes a lock, and the request keeps it over the call."""
    lock = threading.Lock()

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lock.acquire, True, THREADS_WAIT_S).result()
            noise = pipe.net(latents, timestep)
            pool.submit(lock.release).result()
        return latents + 0.1 * noise

    return step


def pool_of_threads() -> Odd:
    """The call itself runs on a thread of a pool that all requests have."""
    pool = ThreadPoolExecutor(1)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        return latents + 0.1 * pool.submit(pipe.net, latents, timestep).result()

    return step


def run_of_asyncio() -> Odd:
    async def noise(pipe: Any, latents: Any, timestep: Any) -> Any:
        await asyncio.sleep(0)
        first = pipe.net(latents, timestep)
        await asyncio.sleep(0.001)
        return 0.1 * first

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        return latents + asyncio.run(noise(pipe, latents, timestep))

    return step


def own_event_loop() -> Odd:
    async def noise(pipe: Any, latents: Any, timestep: Any) -> Any:
        async with asyncio.Lock():
            return 0.1 * pipe.net(latents, timestep)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        loop = asyncio.new_event_loop()
        try:
            return latents + loop.run_until_complete(noise(pipe, latents, timestep))
        finally:
            loop.close()

    return step


def asyncio_lock_in_a_thread() -> Odd:
    lock = threading.Lock()

    async def noise(pipe: Any, latents: Any, timestep: Any) -> Any:
        KEPT.append(asyncio.get_running_loop())
        await asyncio.to_thread(lock.acquire, True, THREADS_WAIT_S)
        first = pipe.net(latents, timestep)
        lock.release()
        return 0.1 * first

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        return latents + asyncio.run(noise(pipe, latents, timestep))

    return step


def barrier() -> Odd:
    """As plain diffusers: nothing ever ends it, for it has one party too many."""
    barrier = threading.Barrier(9)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        barrier.wait()

    return step


def nothing_in_a_queue() -> Odd:
    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        return queue.Queue[Any]().get()

    return step


def shared_event_loop() -> Odd:
    """Fails among others: a loop cannot run twice at a time."""
    loop = asyncio.new_event_loop()
    KEPT.append(loop)

    async def noise(pipe: Any, latents: Any, timestep: Any) -> Any:
        return 0.1 * pipe.net(latents, timestep)

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        coroutine = noise(pipe, latents, timestep)
        try:
            return latents + loop.run_until_complete(coroutine)
        finally:
            coroutine.close()

    return step


def impatient_lock() -> Odd:
    """Fails among others: who does not get the lock gives up."""
    lock = threading.Lock()

    def step(pipe: Any, latents: Any, timestep: Any) -> Any:
        if not lock.acquire(timeout=0.01):
            raise RuntimeError("the net is busy")
        try:
            return latents + 0.1 * pipe.net(latents, timestep)
        finally:
            lock.release()

    return step


FREE: list[Callable[[], Odd]] = [rlock, pool_of_threads, run_of_asyncio, own_event_loop]
"""None waits for another request."""
WAITING: list[Callable[[], Odd]] = [
    lock, semaphore, condition, shared_lock, notified, notified_in_time, queue_of_tokens,
    simple_queue, event, future, file_lock, lock_in_a_pool, asyncio_lock_in_a_thread,
]  # fmt: skip
ENDLESS: list[Callable[[], Odd]] = [barrier, nothing_in_a_queue]
"""They wait in plain diffusers, too."""
FAILING: list[Callable[[], Odd]] = [shared_event_loop, impatient_lock]
