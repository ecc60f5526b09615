"""A policy's inputs and outputs: frozen views of requests and calls, and its choices.

Work is given in seconds alone on the device at its usual speed: at the speed of the moment, equal
requests would look different whenever the machine is busy for a while. Views are `msgspec.Struct`s,
which are made, compared and hashed without running Python, as most are made at every forward.
"""

from collections.abc import Hashable, Mapping
from math import inf

from msgspec import Struct

from carpool.types import Phase


class CallKind(Struct, frozen=True):
    """Calls that cost the same: a method, and the sizes of one row."""

    name: str  # "transformer.forward"
    size: int  # numbers in the tensors of one row
    detail: str = ""  # what else tells it from others: shapes

    def __str__(self) -> str:
        return f"{self.name} {self.detail or self.size}"


NO_KIND = CallKind("", 0)


class QueuedRequest(Struct, frozen=True):
    """One queued request, as much of it as a policy may see."""

    request: int  # place in the order of all requests
    arrived_s: float = 0.0
    left_s: float = 0.0  # predicted work
    whole_s: float = 0.0  # the same, from its beginning
    deadline_s: float = inf  # on the clock of `arrived_s`
    priority: int = 0  # -10 to 10; higher goes first
    tenant: str = ""
    user: str = ""  # of the tenant
    outputs: int = 1
    group: str = ""  # of the outputs of one request, which the modes of peers batch as one
    group_size: int = 1  # how many of them there are or will be
    cost: float = 0.0  # towards a batch's `max_cost`
    signature: Mapping[str, Hashable] = {}  # `dynamic`
    wave: Hashable = None  # what must be equal to share a wave: mode `request`


class ParkedCall(Struct, frozen=True):
    """One call waiting to be run, as much of it as a policy may see."""

    order: int  # place in the order of all calls ever parked; smaller waits longer
    request: int  # place in the order of all requests ever admitted
    key: Hashable  # calls with equal keys may share a forward
    rows: int = 1  # batch rows it adds; 2 when the pipeline batches its guidance
    max_rows: int = 1  # widest forward its key may have just now
    phase: Phase = "denoise"
    kind: CallKind = NO_KIND  # what its forward costs
    arrived_s: float = 0.0  # its request
    left_s: float = 0.0  # predicted work of its request from here on
    whole_s: float = 0.0  # the same, from its beginning
    deadline_s: float = inf
    priority: int = 0
    tenant: str = ""
    user: str = ""
    steps: int = 0  # of denoising, of its request; 0: not known
    is_token: bool = False  # the next of a text that is being written


class Admission(Struct, frozen=True):
    """The queued requests that are admitted now."""

    requests: tuple[int, ...]
    wake_s: float = inf  # when to ask again, if nothing happens before
    stop_reason: str = ""  # of a batch that is formed here: why it is not larger


class Choice(Struct, frozen=True):
    """The calls that share the next forward, its leader first. Empty only if none is parked."""

    calls: tuple[ParkedCall, ...]
    why: str = ""  # it is not wider: "cap", "knee", "untried", "nobody"
