"""Form whole-request batches for the modes `dynamic` and `request`, and compute when each starts.

`dynamic`: the oldest queued request is the head; every queued request that fits joins it, up to
the caps; a batch that is not full waits until its head is `--batching-delay-ms` old. `request`:
the queue's longest prefix with equal keys is a wave; a request with another key blocks those
behind it.

Times are numbers of the engine's clock. Batches are units of admission only; the engine decides
which calls share a forward, and handles failures.

Source: SGLang-Diffusion 0.5.23 and vLLM-Omni 0.30, as their schedulers behave.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from carpool.schedule.peers.compatibility import signature_difference
from carpool.schedule.views import QueuedRequest
from carpool.settings.peers.sglang_rules import Caps

QUIET_S = 0.05  # a waiting wave starts after so long without an arrival,
TOGETHER_S = 0.1  # the outputs of one request arrive this close to each other
QUIET_SHARE = 0.2  # or after this share of the longest wait, if shorter


@dataclass(frozen=True, slots=True)
class Batch:
    """The head of the queue, and the requests that would run with it."""

    joined: tuple[int, ...]  # places in the queue behind the head
    outputs: int  # total, including the head's
    is_closed: bool  # no later request could join: do not wait
    stop_reason: str
    rejects: Counter[str]  # why queued requests do not join, or why the head cannot batch
    cap: int  # max outputs


@dataclass(frozen=True, slots=True)
class GroupedRequest:
    """A request with all its outputs, as both peers count requests."""

    view: QueuedRequest  # its first output, with the totals of all outputs
    numbers: tuple[int, ...]  # numbers of its outputs


def grouped_requests(
    waiting: Sequence[QueuedRequest], max_groups: int, now_s: float
) -> tuple[list[GroupedRequest], float]:
    """The queue's first requests, each with all its outputs, which are queued one by one.

    A request with missing outputs blocks those behind it, at most for `TOGETHER_S`: then the
    missing outputs were refused, cancelled or are done, and it goes without them.

    Args:
        waiting: every queued output, oldest first.
        max_groups: max requests.
        now_s: engine clock.

    Returns:
        The requests, and the time to look again for missing outputs, engine clock.
    """
    groups: dict[Hashable, list[QueuedRequest]] = {}
    missing = 0  # outputs still to come in these groups
    for request in waiting:
        key = request.group or request.request
        if key in groups:
            groups[key].append(request)
            missing -= 1
        elif len(groups) < max_groups:
            groups[key] = [request]
            missing += request.group_size - 1
        elif not missing:
            break
    grouped: list[GroupedRequest] = []
    for outputs in groups.values():
        head, given_up_s = outputs[0], outputs[-1].arrived_s + TOGETHER_S
        if len(outputs) < head.group_size and now_s < given_up_s:
            return grouped, given_up_s
        if len(outputs) > 1:
            total, cost = (
                sum(output.outputs for output in outputs),
                sum(output.cost for output in outputs),
            )
            head = replace(head, outputs=total, cost=cost)
        grouped.append(GroupedRequest(head, tuple(output.request for output in outputs)))
    return grouped, math.inf


def fill(head: QueuedRequest, queue: Sequence[QueuedRequest], caps: Caps, user_max: int) -> Batch:
    """Choose the requests that join the head of the queue: all that fit, in queue order.

    Requests that differ from the head are skipped and block nothing. A head above a cap is alone.
    The next request is assumed to cost as much as the head: a batch closes when that is too much.

    Args:
        queue: the requests behind the head, oldest first.
        caps: for the head's size.
        user_max: `--batching-max-size`, outputs; 1 is off.

    Returns:
        The batch as it would start now. `stop_reason` of a closed batch: `dynamic_disabled`,
        `head:REASON`, `config_cap:N` for the smallest cap reached, a rule's or the user's, or
        `cost_budget_next:COST>MOST`. Of an open batch: the first reject, or `delay` if all queued
        requests have joined.
    """
    if user_max <= 1:
        return Batch((), head.outputs, True, "dynamic_disabled", Counter(), head.outputs)
    if unfit := signature_difference(head.signature, head.signature):
        reason = f"head:{unfit}"
        return Batch((), head.outputs, True, reason, Counter([reason]), head.outputs)
    cap_reason = f"config_cap:{caps.outputs}"
    max_cost = math.inf if caps.cost is None else caps.cost
    joined, outputs, total = list[int](), head.outputs, head.cost
    rejects = Counter[str]()

    def closed() -> str | None:
        if outputs >= caps.outputs:
            return cap_reason
        if total + head.cost > max_cost:
            return f"cost_budget_next:{_above(total + head.cost, max_cost)}"
        return None

    for place, candidate in enumerate(queue):
        if closed():
            break
        if difference := signature_difference(head.signature, candidate.signature):
            rejects[difference] += 1
        elif outputs + candidate.outputs > caps.outputs:
            rejects[cap_reason] += 1
        elif total + candidate.cost > max_cost:
            rejects[f"cost_budget:{_above(total + candidate.cost, max_cost)}"] += 1
        else:
            joined.append(place)
            outputs += candidate.outputs
            total += candidate.cost
    closing = closed()
    reason = closing or next(iter(rejects), "delay")
    return Batch(tuple(joined), outputs, closing is not None, reason, rejects, caps.outputs)


def wait_until(head: QueuedRequest, batch: Batch, delay_s: float) -> float:
    """The time when a batch starts, engine clock; a past time means now.

    The delay counts from the head's arrival, not from when the engine was free: under load it
    adds no wait.
    """
    return head.arrived_s if batch.is_closed else head.arrived_s + delay_s


def wave(keys: Sequence[Hashable], max_num_seqs: int) -> int:
    """The number of requests at the head of the queue that run as one wave.

    Args:
        keys: `request_key` of the queued requests, oldest first.
        max_num_seqs: the most, at least 1.
    """
    return sum(1 for _ in takewhile(lambda key: key == keys[0], keys[:max_num_seqs]))


def wave_deadline(
    in_queue: int, max_num_seqs: int, *, began_s: float, last_arrival_s: float, wait_s: float
) -> float:
    """The time when the next wave starts, engine clock; recompute it at every arrival.

    It waits at most `wait_s`, and less after 50 ms or a fifth of `wait_s`, whichever is shorter,
    without an arrival. It starts at once when the queue is as long as the largest wave, whatever
    the keys.

    Args:
        in_queue: queued requests, at least 1.
        began_s: when the engine was free and the queue not empty.
        last_arrival_s: when the last queued request arrived.
        wait_s: `--request-batch-max-wait-ms`, in seconds.
    """
    if in_queue >= max_num_seqs:
        return began_s
    quiet_s = min(QUIET_S, wait_s * QUIET_SHARE)
    return min(began_s + wait_s, max(began_s, last_arrival_s) + quiet_s)


def _above(total: float, limit: float) -> str:
    return f"{total:.0f}>{limit:.0f}"
