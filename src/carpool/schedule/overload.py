"""Overload stages: drop previews, refuse low priority, refuse all new requests.

    1  drop previews
       2  refuse requests of priority below 0
       3  refuse all new requests

Running work is never dropped. A stage starts when the queue is long, in predicted seconds or in
places, and ends when it is clearly shorter (hysteresis), so that a server at its limit does not
switch at every request.

Source: staged actions with pressure from 0 to 1 as in Envoy's overload manager.
"""

import logging
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from carpool.errors import Overloaded, TooLate

log = logging.getLogger("carpool")

ENTER = (0.5, 0.8, 1.0)  # shares of the limit where stages 1, 2 and 3 start
LEAVE = tuple(round(share - 0.1, 1) for share in ENTER)  # and where they end
SHARE_OF_FREE = 7
"""One tenant alone may take seven eighths of all places, two 7/15 each. With 3, one alone may take
three quarters; with 15, a sixteenth stays free for a newcomer."""
BOUNDS_S = (0.1, 120.0)  # range of retry hints; SDKs ignore longer ones


@dataclass(frozen=True, slots=True)
class Pressure:
    """The queue's length as shares of its limits: 1 is the limit."""

    wait: float  # predicted seconds of the queued work
    fill: float  # used places of the queue

    @property
    def most(self) -> float:
        return max(self.wait, self.fill)


def stage(before: int, pressure: Pressure) -> int:
    """The stage, 0 to 3, that follows the stage `before`.

    A full queue frees its places one by one and refuses requests by itself: it starts stage 3,
    but does not hold it.
    """
    loads = (pressure.most, pressure.most, pressure.wait)
    entered = sum(pressure.most >= share for share in ENTER)
    level = sum(share >= threshold for share, threshold in zip(loads, LEAVE, strict=True))
    return max(entered, min(before, level))


def refuses(at: int, priority: int) -> bool:
    """Whether a new request is refused at a stage."""
    return at >= 3 or (at == 2 and priority < 0)


class Overload:
    """The overload stage of one queue, and its refusals.

    Args:
        most_s: longest accepted predicted wait.
        admits_late: log a deadline that cannot be met, instead of refusing the request.
    """

    def __init__(self, most_s: float, *, admits_late: bool) -> None:
        self._most_s, self._admits_late = most_s, admits_late
        self.stage = 0

    def update(self, wait_s: float, fill: float) -> None:
        """Set the predicted seconds of queued work, and the share of used places."""
        pressure = Pressure(wait_s / self._most_s, fill)
        if self.stage or pressure.most >= ENTER[0]:  # otherwise it stays 0
            self.stage = stage(self.stage, pressure)

    def check_wait(
        self, priority: int, *, waiting: int, wait_s: float, fill: float, least_s: float = 0.0
    ) -> None:
        """Refuse a new request if its priority is too low for the stage.

        Args:
            waiting: queued requests, with `wait_s` of work.
            fill: see `Pressure`; a full queue has its own error.
            least_s: seconds until the next place is free.

        Raises:
            Overloaded: with the time to retry.
        """
        if refuses(self.stage, priority) and fill < 1:
            refusal = "no new one" if self.stage == 3 else "none of priority below 0"
            raise Overloaded(
                f"the server is overloaded: {waiting} requests wait, with work for some "
                f"{wait_s:.3g} s (the limit is {self._most_s:g} s, --max-wait): {refusal} is taken",
                retry_after_s=max(again_s(self.stage, wait_s, self._most_s), least_s),
            )

    def check_deadline(self, request_id: str, deadline_s: float, needed_s: float) -> None:
        """Refuse a request that needs more seconds than its deadline leaves.

        Raises:
            TooLate: with both times.
        """
        if needed_s <= deadline_s:
            return
        late = f"deadline_s={deadline_s:g} cannot be met: it would take {needed_s:.3g} s"
        if not self._admits_late:
            remedy = "ask for fewer steps, a smaller size, or fewer tokens"
            raise TooLate(f"{late}; {remedy}", param="deadline_s")
        log.warning("request %s: %s", request_id, late)


def check_room(
    in_flight: int, running: int, queued: int, again_s: float, *, occupied: int | None = None
) -> None:
    """Refuse a new request when `running` requests run and `queued` requests wait already.

    Args:
        occupied: the tenant's requests in flight, where tenants share the places: a tenant may
            hold `SHARE_OF_FREE` times the free places, so some stay free for the next tenant.

    Raises:
        Overloaded: retry after `again_s`.

    Source: dynamic queue thresholds, Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998.
    """
    free = running + queued - in_flight
    if occupied and free > 0 and occupied >= max(running, SHARE_OF_FREE * free):
        raise Overloaded(
            f"{occupied} requests of this API key wait or run, and {free} places are free: "
            "those are kept for other keys (--max-running, --max-queue)",
            retry_after_s=again_s,
        )
    if free <= 0:
        raise Overloaded(
            f"the queue is full: {in_flight} requests wait or run, the limit is "
            f"{running} + {queued} (--max-running, --max-queue)",
            retry_after_s=again_s,
        )


def again_s(at: int, wait_s: float, most_s: float) -> float:
    """Seconds until a refused request would be accepted: the backlog shrinks by a second a second.

    Args:
        at: the stage, 2 or 3.
        wait_s: predicted seconds of the queued work.
        most_s: longest accepted wait.
    """
    return bounded(wait_s - LEAVE[at - 1] * most_s)


def bounded(seconds: float) -> float:
    """Clamp a retry hint to the range that clients follow."""
    low_s, high_s = BOUNDS_S
    return min(max(seconds, low_s), high_s)


@dataclass(slots=True)
class Speed:
    """The speed of shared forwards against lone calls: moving means over forwards."""

    speed: float = 1.0  # seconds of lone work done by one second of forwards
    stretch: float = 1.0  # duration of a request's shared forwards over lone ones
    weight: float = 0.1  # weight of the newest forward

    def learn(self, alone_s: float, calls: int, together_s: float, times: int = 1) -> None:
        """Learn from shared forwards: their calls would take `alone_s` one after another."""
        if alone_s > 0 and together_s > 0:
            weight = 1 - (1 - self.weight) ** times
            self.speed += weight * (alone_s / together_s - self.speed)
            self.stretch += weight * (calls * together_s / alone_s - self.stretch)

    def wait_s(self, work_s: float) -> float:
        """Predicted seconds of work that takes `work_s` alone."""
        return work_s / self.speed

    def starts_s(self, lefts_s: list[float], places: int, works_s: list[float]) -> list[float]:
        """Predicted start of each waiting request, first come, first served.

        Args:
            lefts_s: remaining work of each running request, seconds alone.
            places: number of free places.
            works_s: work of the waiting requests, in order.
        """
        free_s = [0.0] * max(0, places) + [left_s * self.stretch for left_s in lefts_s]
        if not free_s:
            return [0.0] * len(works_s)
        heapify(free_s)
        starts = []
        for work_s in works_s:
            starts.append(heappop(free_s))
            heappush(free_s, starts[-1] + work_s * self.stretch)
        return starts

    def place_s(self, lefts_s: list[float]) -> float | None:
        """Predicted end of the first running request, from the remaining work of each."""
        return min(lefts_s) * self.stretch if lefts_s else None
