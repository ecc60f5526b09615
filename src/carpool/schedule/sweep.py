"""Choose the forwards that share a sweep over streamed weights: until compute hides the copies.

A sweep takes the longer of copying the weights once and of computing all its forwards. While
compute is shorter, further calls of the same component, of any key and size, cost little or
nothing. The policy chooses each further forward among the calls that pay off, so its order, shares
and widths hold. Other calls join the next sweep, one step later.
"""

from collections.abc import Callable, Sequence
from math import inf

from carpool.schedule.cost import Costs
from carpool.schedule.policy import Policy
from carpool.schedule.views import CallKind, Choice, ParkedCall


def choose_sweep(
    policy: Policy,
    parked: Sequence[ParkedCall],
    waiting_s: float,
    now_s: float,
    costs: Costs,
    may_share: Callable[[ParkedCall], bool] = lambda call: True,
) -> list[Choice]:
    """Choose the forwards that run next: one, or with streamed weights those of one sweep.

    Args:
        policy: chooses each forward.
        parked: calls waiting, in any order; no two with the same `order`.
        waiting_s: predicted work of queued requests.
        now_s: engine clock.
        costs: seconds of forwards, and of weight copies.
        may_share: whether a call can pause in the middle of its forward.

    Returns:
        Forwards in the order of choice, all of one component if there are several; empty only
        if no call is parked.
    """

    def choose(calls: Sequence[ParkedCall]) -> Choice:
        return policy.choose(calls, waiting_s, now_s, parked)

    first = choose(_newcomers(parked, costs) or parked)
    if not first.calls:
        return []
    choices, leader = [first], first.calls[0]
    stream_s = costs.stream_s(leader.kind)
    if not stream_s or not may_share(leader):
        return choices
    compute_s = _compute_s(costs, first)
    orders = {call.order for call in first.calls}
    is_dated = _is_dated(first)
    while compute_s < stream_s:
        candidates = [
            call
            for call in parked
            if call.kind.name == leader.kind.name and call.order not in orders and may_share(call)
        ]
        if is_dated:
            candidates = _hidden(candidates, stream_s - compute_s, costs)
        else:
            candidates = [
                call
                for call in candidates
                if _pays(costs.compute_s(call.kind, call.rows), compute_s, stream_s, len(orders))
            ]
        if not candidates:
            break
        choice = choose(candidates)
        choices.append(choice)
        compute_s += _compute_s(costs, choice)
        orders |= {call.order for call in choice.calls}
        is_dated = is_dated or _is_dated(choice)
    return choices


def sweep_s(choices: Sequence[Choice], costs: Costs) -> float:
    """Total seconds of the chosen forwards."""
    compute_s = sum(_compute_s(costs, choice) for choice in choices)
    return max(costs.stream_s(choices[0].calls[0].kind), compute_s) if choices else 0.0


def step_seconds(
    costs: Costs, kind: CallKind, rows: int, *, most_rows: int, most_running: int
) -> list[float]:
    """Seconds of a step by the number of requests that share it: entry n - 1 is for n requests.

    Up to one full forward; with streamed weights up to `most_running` requests, as all their
    forwards share the copies.

    Args:
        rows: rows of each request's call.
        most_rows: max rows of a forward.
        most_running: max running requests.
    """
    stream_s, full = costs.stream_s(kind), max(1, most_rows // rows)
    full_s = costs.compute_s(kind, full * rows)
    seconds = []
    for requests in range(1, (most_running if stream_s else full) + 1):
        forwards, remainder = divmod(requests, full)
        left_s = costs.compute_s(kind, remainder * rows) if remainder else 0.0
        seconds.append(max(stream_s, forwards * full_s + left_s))
    return seconds


def _compute_s(costs: Costs, choice: Choice) -> float:
    return costs.compute_s(choice.calls[0].kind, sum(call.rows for call in choice.calls))


def _newcomers(parked: Sequence[ParkedCall], costs: Costs) -> list[ParkedCall]:
    """Calls of encoders, if the next sweep has room for their requests.

    A policy may delay encodes while a forward has no room; a sweep with room needs them now.
    """
    denoise = [call for call in parked if call.phase == "denoise"]
    stream_s = min((costs.stream_s(call.kind) for call in denoise), default=0.0)
    if not stream_s or sum(costs.compute_s(call.kind, call.rows) for call in denoise) >= stream_s:
        return []
    return [call for call in parked if call.phase == "encode"]


def _is_dated(choice: Choice) -> bool:
    return any(call.deadline_s < inf for call in choice.calls)


def _pays(more_s: float, compute_s: float, stream_s: float, calls: int) -> bool:
    """Whether the copies hide a call, or it does not lower the completion rate."""
    return compute_s + more_s <= stream_s or calls * more_s <= stream_s


def _hidden(calls: Sequence[ParkedCall], left_s: float, costs: Costs) -> list[ParkedCall]:
    """The oldest calls that the copies hide entirely, so that no deadline suffers."""
    hidden = []
    for call in sorted(calls, key=lambda call: call.order):
        left_s -= costs.compute_s(call.kind, call.rows)
        if left_s < 0:
            break
        hidden.append(call)
    return hidden
