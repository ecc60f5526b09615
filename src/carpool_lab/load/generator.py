"""Send requests on schedule and record their results, independent of HTTP.

It uses the event loop's clock, so tests run in virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from carpool.errors import CarpoolError
from carpool_lab.load.client import RequestError
from carpool_lab.workload import Arrival, kind_of

SendBody = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends a request; returns the server's JSON, or raises `RequestError`."""

Tick = Callable[[], object]
"""Called at the end of a request."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one request. Times are seconds after the start of the run."""

    body: Mapping[str, Any] = field(hash=False)
    at_s: float  # scheduled time
    sent_s: float
    done_s: float
    latency_s: float  # from the scheduled time; in a closed loop, from the sending
    failure: str | None = None  # the reason; None: success
    message: str = ""  # message of the failure
    peak_memory_mb: float | None = None  # if the server reports it
    slo_s: float = inf  # latency target

    @property
    def is_good(self) -> bool:
        """Return whether the request succeeded within its latency target."""
        return self.failure is None and self.latency_s <= self.slo_s


async def run(
    arrivals: Sequence[Arrival],
    ask: SendBody,
    *,
    max_concurrency: int | None = None,
    is_closed: bool = False,
    tick: Tick = lambda: None,
) -> list[RequestResult]:
    """Send all requests on schedule; returns after the last answer.

    Args:
        max_concurrency: most concurrent requests; more requests wait here, oldest first.
        is_closed: a closed loop: latency counts from the sending. Otherwise it counts from the
            scheduled time and includes all waiting.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    gate = asyncio.Semaphore(max_concurrency or len(arrivals) or 1)

    async def one(arrival: Arrival) -> RequestResult:
        await asyncio.sleep(began_s + arrival.at_s - clock())
        async with gate:
            sent_s = clock() - began_s
            failure, message, reply = None, "", {}
            try:
                reply = dict(await ask(arrival.body))
            except RequestError as failed:
                failure, message = failed.reason, failed.message
            done_s = clock() - began_s
        tick()
        return RequestResult(
            body=arrival.body,
            at_s=arrival.at_s,
            sent_s=sent_s,
            done_s=done_s,
            latency_s=done_s - (sent_s if is_closed else arrival.at_s),
            failure=failure,
            message=message,
            peak_memory_mb=reply.get("peak_memory_mb"),
        )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(arrival)) for arrival in arrivals]
    return [task.result() for task in tasks]


Key = tuple[str, int | None]
"""The kind of a request, and its steps; None: the model's default."""


@dataclass(frozen=True, slots=True)
class SoloLatencies:
    """Latencies of requests that run alone on the server."""

    seconds: Mapping[Key, float]

    def of(self, body: Mapping[str, Any]) -> float:
        """Seconds of a request, interpolated linearly between measured step counts."""
        kind, steps = _key(body)
        if (kind, steps) in self.seconds:
            return self.seconds[kind, steps]
        points = sorted((n, s) for (k, n), s in self.seconds.items() if k == kind and n is not None)
        assert steps is not None, "`samples` has requests without steps"
        (few, few_s), (steps_high, many_s) = points
        return few_s + (many_s - few_s) * (steps - few) / (steps_high - few)


def samples(arrivals: Iterable[Arrival]) -> list[Mapping[str, Any]]:
    """The requests to measure alone: for each kind one with the fewest and one with the most steps.

    Requests without a number of steps are a separate kind.
    """
    by_key: dict[Key, Mapping[str, Any]] = {}
    for arrival in arrivals:
        by_key.setdefault(_key(arrival.body), arrival.body)
    ends: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for (kind, steps), body in sorted(by_key.items(), key=lambda item: item[0][1] or 0):
        ends.setdefault((kind, steps is None), []).append(body)
    return [body for bodies in ends.values() for body in (bodies[:1] + bodies[1:][-1:])]


async def warm_up(
    bodies: Sequence[Mapping[str, Any]], ask: SendBody, *, rounds: int, tick: Tick = lambda: None
) -> SoloLatencies:
    """Send each request `rounds` times, one at a time; its minimum is its solo latency.

    Raises:
        CarpoolError: a request failed; the load would fail too.
    """
    clock = asyncio.get_running_loop().time
    seconds: dict[Key, float] = {}
    for body in [*bodies] * rounds:
        began_s = clock()
        try:
            await ask(body)
        except RequestError as failed:
            reason = f"{failed.reason}: {failed.message}"
            raise CarpoolError(f"a warmup request failed: {reason}") from None
        key = _key(body)
        seconds[key] = min(seconds.get(key, inf), clock() - began_s)
        tick()
    return SoloLatencies(seconds)


def with_slo(
    outcomes: Iterable[RequestResult], solo: SoloLatencies, scale: float
) -> list[RequestResult]:
    """Add the latency target to outcomes: `scale` times their solo latency."""
    return [replace(outcome, slo_s=scale * solo.of(outcome.body)) for outcome in outcomes]


def _key(body: Mapping[str, Any]) -> Key:
    return kind_of(body), body.get("num_inference_steps")
