"""Records of engine activity for `/v1/events`: forwards, requests, moves between workers."""

from dataclasses import dataclass

from carpool.types import Phase


@dataclass(frozen=True, slots=True)
class SeenForward:
    """One forward, with the numbers of its requests."""

    module: str  # such as "transformer.forward"
    phase: Phase
    began_s: float  # engine clock
    duration_s: float
    rows: int
    requests: tuple[int, ...]
    why: str  # why it was not wider


@dataclass(frozen=True, slots=True)
class RunningRequest:
    number: int  # requests are numbered in the order of their submission
    request_id: str
    phase: Phase
    step: int
    steps: int
    left_s: float | None  # predicted work left, seconds alone on the device
    tokens: int = 0  # text tokens written for it


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    number: int
    request_id: str
    waited_s: float
    starts_s: float | None  # predicted, from now


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The requests of an engine at one moment."""

    now_s: float  # engine clock
    running: tuple[RunningRequest, ...]
    waiting: tuple[WaitingRequest, ...]  # the first ones
    waiting_count: int


@dataclass(frozen=True, slots=True)
class SeenMove:
    """A running request moved to another worker."""

    request_id: str
    at: float  # Unix time
    from_worker: int
    to_worker: int
    why: str
