"""Locks, queues, event loops and pools around a module's call, and inside of a net."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from support.custom.base import Custom, Net, kind
from support.custom.kinds.forwards import net


@kind("a lock over each call")
class Held(Custom):
    lock = threading.Lock()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        with self.lock:
            return super().predict(i, x, t, words)


@kind("a lock that a helper's methods take and give back")
class Taken(Custom):
    lock = threading.Lock()

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        self.lock.acquire()
        try:
            return super().predict(i, x, t, words)
        finally:
            self.lock.release()


@kind("asyncio.run around each call")
class Async(Custom):
    async def later(self, *args: Any) -> Tensor:
        await asyncio.sleep(0)
        return super().predict(*args)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return asyncio.run(self.later(i, x, t, words))


@kind("asyncio.gather of two calls")
class Gathered(Async):
    async def both(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return sum(await asyncio.gather(self.later(i, x, t, words), self.later(i, -x, t, words)))

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return asyncio.run(self.both(i, x, t, words))


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
