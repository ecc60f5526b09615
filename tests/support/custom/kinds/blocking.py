"""Locks, queues, event loops and pools around a module's call, and inside of a net."""

import asyncio
import threading
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


@kind("asyncio.run around each call")
class Async(Custom):
    async def later(self, *args: Any) -> Tensor:
        await asyncio.sleep(0)
        return super().predict(*args)

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        return asyncio.run(self.later(i, x, t, words))


@net("a lock inside of a net")
class LockedNet(Net):
    lock = threading.Lock()

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        with self.lock:
            return (self.body(sample, timestep, words),)
