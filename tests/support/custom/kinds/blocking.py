"""Locks, queues, event loops and pools around a module's call, and inside of a net."""

import asyncio
import fcntl
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from support.custom.base import Custom, Net, kind
from support.custom.kinds.forwards import net


def held(name: str, make: Callable[[], Any]) -> None:
    """A kind with a context that all requests share, over each call."""

    class Held(Custom):
        lock = make()

        def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
            with self.lock:
                return super().predict(i, x, t, words)

    kind(name)(Held)


held("a lock over each call", threading.Lock)
held("a reentrant lock over each call", threading.RLock)
held("a semaphore of two over each call", lambda: threading.Semaphore(2))
held("a bounded semaphore over each call", lambda: threading.BoundedSemaphore(1))
held("a condition over each call", lambda: threading.Condition(threading.Lock()))

_LOCK = threading.Lock()


@kind("a global lock over a whole request")
class Whole(Custom):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            return super().__call__(*args, **kwargs)

    __call__.__wrapped__ = Custom.__call__  # type: ignore[attr-defined]


@kind("a lock on self")
class OnSelf(Custom):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__(unet, scheduler)
        self.lock = threading.Lock()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with self.lock:
            return super().predict(i, x, t, words)


@kind("a lock in a closure")
def in_closure(pipe: Any) -> None:
    lock, inner = threading.Lock(), type(pipe).predict

    class Locked(type(pipe)):  # type: ignore[misc]
        def predict(self, *args: Any) -> Any:
            with lock:
                return inner(self, *args)

    pipe.__class__ = Locked


@kind("a lock that a helper's methods take and give back")
class Taken(Custom):
    lock = threading.Lock()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.lock.acquire()
        try:
            return super().predict(i, x, t, words)
        finally:
            self.lock.release()


@kind("a queue with one token")
class Token(Custom):
    tokens: queue.Queue[int] = queue.Queue()
    tokens.put(1)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        token = self.tokens.get()
        try:
            return super().predict(i, x, t, words)
        finally:
            self.tokens.put(token)


@kind("a bounded queue that fills")
class Bounded(Custom):
    places: queue.Queue[int] = queue.Queue(maxsize=1)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.places.put(i)
        try:
            return super().predict(i, x, t, words)
        finally:
            self.places.get()


@kind("an event that the call before sets")
class Turns(Custom):
    free = threading.Event()
    free.set()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.free.wait()
        self.free.clear()
        try:
            return super().predict(i, x, t, words)
        finally:
            self.free.set()


@kind("a locked file")
class FileLocked(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with open(os.path.join(tempfile.gettempdir(), "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return super().predict(i, x, t, words)


@kind("asyncio.run around each call")
class Async(Custom):
    async def later(self, *args: Any) -> Tensor:
        await asyncio.sleep(0)
        return super().predict(*args)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return asyncio.run(self.later(i, x, t, words))


@kind("an event loop of the class around each call")
class OwnLoop(Async):
    loop: Any = None

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        OwnLoop.loop = OwnLoop.loop or asyncio.new_event_loop()
        answer: Tensor = self.loop.run_until_complete(self.later(i, x, t, words))
        return answer


@kind("asyncio.gather of two calls")
class Gathered(Async):
    async def both(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return sum(await asyncio.gather(self.later(i, x, t, words), self.later(i, -x, t, words)))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return asyncio.run(self.both(i, x, t, words))


@kind("an asyncio lock of the class")
class AsyncLocked(Async):
    lock = asyncio.Lock()

    async def later(self, *args: Any) -> Tensor:
        async with self.lock:
            return Custom.predict(self, *args)


@kind("the call on a thread of a pool")
class Pooled(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with torch.no_grad(), ThreadPoolExecutor(1) as pool:
            return pool.submit(super().predict, i, x, t, words).result()


@kind("two calls on a pool that the class keeps")
class PoolOfTwo(Custom):
    pool: Any = None

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        PoolOfTwo.pool = PoolOfTwo.pool or ThreadPoolExecutor(2)
        both = list(self.pool.map(lambda s: Custom.predict(self, i, s, t, words), [x, -x]))
        return torch.stack(both).mean(0).detach()


@kind("a thread that prepares the next step")
class Prefetching(Custom):
    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        box: list[float] = []
        thread = threading.Thread(target=lambda: box.append(float(x.mean()) + i))
        thread.start()
        noise = super().predict(i, x, t, words)
        thread.join()
        return noise * (1 + 0.1 * box[0])


@kind("a worker thread with queues to and fro")
class Worked(Custom):
    def begin(self, prompt: str) -> None:
        self.todo: queue.Queue[Any] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()
        self.worker = threading.Thread(target=self.work, daemon=True)
        self.worker.start()

    def work(self) -> None:
        while (task := self.todo.get()) is not None:
            self.done.put(Custom.predict(self, *task).detach())

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.todo.put((i, x, t, words))
        noise: Tensor = self.done.get()
        return noise

    def end(self, x: Tensor) -> Tensor:
        self.todo.put(None)
        self.worker.join()
        return x


@net("a lock inside of a net")
class LockedNet(Net):
    lock = threading.Lock()

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        with self.lock:
            return (self.body(sample, timestep, words),)


@net("a pool inside of a net")
class PooledNet(Net):
    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return (pool.submit(self.body, sample, timestep, words).result().detach(),)


@net("asyncio.run inside of a net")
class AsyncNet(Net):
    async def later(self, *args: Any) -> Tensor:
        return self.body(*args)

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (asyncio.run(self.later(sample, timestep, words)),)
