"""The record of one model of a fleet: its pool, its state, and its last use."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from carpool.fleet.pool import Pool
from carpool.worker import protocol
from carpool.worker.supervisor import WorkerState


@dataclass(slots=True, eq=False)
class Deployment:
    """One model of a fleet, loaded or not."""

    name: str  # empty: its own id
    make: Callable[[], Pool]
    is_on_demand: bool = False
    keep_alive_s: float = float("inf")
    pool: Pool | None = None
    last_ready: protocol.WorkerReady | None = None  # message of its latest load
    in_flight: int = 0
    used_s: float = 0.0  # the event loop's clock
    began_s: float = 0.0  # start of loading
    took_s: float = 10.0  # duration of the last load; a guess before
    admits_late: bool = False  # logs requests with unreachable deadlines instead of refusing them
    loading: "asyncio.Task[None] | None" = None
    waiting: int = 0  # requests waiting for the load
    makes_room: bool = False  # about to be unloaded: gets no requests until it is loaded again

    @property
    def id(self) -> str:
        """Its name in requests and answers; empty: not known before it is loaded."""
        return self.name or (self.ready.card.id if self.ready else "")

    @property
    def state(self) -> WorkerState | Literal["unloaded"]:
        return "unloaded" if self.pool is None else self.pool.state

    @property
    def is_loaded_on_demand(self) -> bool:
        return self.is_on_demand and self.pool is not None

    @property
    def ready(self) -> protocol.WorkerReady | None:
        if self.pool is not None and self.pool.ready is not None:
            self.last_ready = self.pool.ready
        return self.last_ready

    def check_open(self) -> None:
        """Raise unless requests are accepted. An unloaded model accepts and is then loaded."""
        if self.pool is not None and not (self.is_on_demand and self.pool.state == "starting"):
            self.pool.check_open()

    def ready_in_s(self, now_s: float) -> float | None:
        """Predicted seconds until it is loaded; None if it is."""
        if self.state == "ready":
            return None
        return max(0.0, self.took_s - (now_s - self.began_s if self.pool else 0.0))
