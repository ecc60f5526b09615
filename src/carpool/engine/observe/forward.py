"""The record of one forward, which observers get."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from carpool.types import Phase

if TYPE_CHECKING:
    from carpool.engine.request import RequestState


class Forward(Struct, frozen=True):
    """One run of a module for one or several requests: what observers get.

    Runs that raised are not recorded.
    """

    component: str  # the pipeline's name for the module, such as "transformer"
    method: str
    phase: Phase
    states: "tuple[RequestState, ...]"  # the requests that shared it
    row_counts: tuple[int, ...]  # batch rows of each
    began_s: float  # engine clock
    duration_s: float  # on CUDA: until the kernels were launched, not until they ended
    adapters: int = 0  # different ones that its requests use
    why: str = ""  # it is not wider: see `width_reason`

    @property
    def requests(self) -> int:
        return len(self.states)

    @property
    def rows(self) -> int:
        return sum(self.row_counts)


def forward_of(
    states: "Sequence[RequestState]", began_s: float, ended_s: float, why: str = ""
) -> Forward:
    """The record of a forward of the calls that these requests are parked on."""
    target = states[0].call.target
    loras = [state.call.lora for state in states]
    return Forward(
        target.component,
        target.method,
        target.phase,
        tuple(states),
        tuple([state.rows for state in states]),
        began_s,
        ended_s - began_s,
        len({name for lora in loras for name, _ in lora}) if any(loras) else 0,
        why,
    )


ForwardObserver = Callable[[Forward], None]
"""Is called after every forward, on the engine's thread, before its requests go on.

Must be quick and must not raise.
"""
