"""What to run now: pure functions from the calls that are parked to those that share a forward.

A policy sees `Parked` records only: no tensors, no clock, no state of its own. It may return
calls of one key at a time, and must return some whenever any are parked.
"""

from collections.abc import Sequence
from typing import Protocol

from carpool.config import BatchingMode
from carpool.types import Parked


class Policy(Protocol):
    def __call__(self, parked: Sequence[Parked]) -> list[Parked]:
        """Choose the calls of the next forward.

        Args:
            parked: calls waiting, in any order; no two with the same `order`.

        Returns:
            Calls of one key, in the order in which they are stacked. Empty only if `parked` is.
        """
        ...


def off(parked: Sequence[Parked]) -> list[Parked]:
    """Choose one call of the request that was admitted first: no fusing, first come first served.

    The reference: what it gives is what plain diffusers gives, one request after another.
    """
    return [min(parked, key=lambda call: (call.request, call.order))] if parked else []


def continuous(parked: Sequence[Parked]) -> list[Parked]:
    """Choose the call that waits longest, then fill its forward with others of its key.

    The line is that of calls, not of requests: a request joins its end again after every forward.
    So no call is passed over more often than there were calls in line before it, and a newcomer's
    text encoding is never held up by somebody else's whole denoising.

    A call wider than its key's cap runs alone. Nobody overtakes within a key: the first call that
    does not fit closes the forward, so that a narrow call never keeps jumping a wide one.

    Source: iteration-level scheduling and selective batching, Yu et al., Orca, OSDI 2022.
    """
    line = sorted(parked, key=lambda call: call.order)
    chosen: list[Parked] = []
    rows = 0
    for call in line:
        if chosen and call.key != chosen[0].key:
            continue
        if chosen and rows + call.rows > chosen[0].max_rows:
            break
        chosen.append(call)
        rows += call.rows
    return sorted(chosen, key=lambda call: call.request)  # a stable order keeps stacks reusable


POLICIES: dict[BatchingMode, Policy] = {"continuous": continuous, "off": off}
