"""A policy's inputs and outputs: frozen views of requests and calls, and its choices.

Work is in seconds alone on the device at its usual speed: at the current speed, equal requests
would look different whenever the machine is busy for a while. Views are `msgspec.Struct`s: to
create, compare and hash them runs no Python code, and most are created at every forward.
"""

from collections.abc import Hashable, Mapping
from math import inf

from msgspec import Struct

from carpool.types import Phase


class CallKind(Struct, frozen=True):
    """A class of calls with equal cost: a method, and the sizes of one row."""

    name: str  # "transformer.forward"
    size: int  # total of the tensor elements of one row
    detail: str = ""  # further distinction: shapes

    def __str__(self) -> str:
        return f"{self.name} {self.detail or self.size}"


NO_KIND = CallKind("", 0)


class QueuedRequest(Struct, frozen=True):
    """A policy's view of a queued request."""

    request: int  # number in the order of submission
    arrived_s: float = 0.0
    left_s: float = 0.0  # predicted work
    whole_s: float = 0.0  # predicted work from its start
    deadline_s: float = inf  # on the clock of `arrived_s`
    priority: int = 0  # -10 to 10; higher goes first
    tenant: str = ""
    user: str = ""  # end user within the tenant
    outputs: int = 1
    group: str = ""  # outputs of one request share a group: peers' modes batch them as one
    group_size: int = 1  # outputs in the group, queued or still to come
    cost: float = 0.0  # counts towards a batch's `max_cost`
    signature: Mapping[str, Hashable] = {}  # must be equal to share a batch: mode `dynamic`
    wave: Hashable = None  # must be equal to share a wave: mode `request`


class ParkedCall(Struct, frozen=True):
    """A policy's view of a parked call."""

    order: int  # number in the order of parking; smaller waits longer
    request: int  # number in the order of submission
    key: Hashable  # calls with equal keys may share a forward
    rows: int = 1  # batch rows it adds; 2 when the pipeline batches its guidance
    max_rows: int = 1  # current max rows of a forward of its key
    phase: Phase = "denoise"
    kind: CallKind = NO_KIND  # the class of its cost
    arrived_s: float = 0.0  # arrival of its request
    left_s: float = 0.0  # predicted work that its request has left
    whole_s: float = 0.0  # predicted work from the request's start
    deadline_s: float = inf
    priority: int = 0
    tenant: str = ""
    user: str = ""
    steps: int = 0  # denoising steps of its request; 0: unknown
    is_token: bool = False  # decodes the next token of a text in progress
    is_text: bool = False  # more calls in a forward of its key always pay


class Admission(Struct, frozen=True):
    """The queued requests to admit now."""

    requests: tuple[int, ...]
    wake_s: float = inf  # the latest time of the next decision
    stop_reason: str = ""  # mode `dynamic`: why the batch is not larger


class Choice(Struct, frozen=True):
    """The calls that share the next forward, its leader first. Empty only if none is parked."""

    calls: tuple[ParkedCall, ...]
    why: str = ""  # why it is not wider: "cap", "knee", "untried", "nobody"
