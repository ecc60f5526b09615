"""What viewers of `/v1/events` see of a worker, as messages: forwards, requests, moves."""

import msgspec

from carpool.types import Phase


class SeenForward(msgspec.Struct, array_like=True):
    """See `carpool.engine.observe.activity`."""

    module: str
    phase: Phase
    began_s: float
    duration_s: float
    rows: int
    requests: list[int]
    why: str


class RunningRequest(msgspec.Struct, array_like=True):
    number: int
    request_id: str
    phase: Phase
    step: int
    steps: int
    left_s: float | None


class WaitingRequest(msgspec.Struct, array_like=True):
    number: int
    request_id: str
    waited_s: float
    starts_s: float | None


class SeenMove(msgspec.Struct, array_like=True):
    """A running request went on in another worker. Only within the front."""

    request_id: str
    at: float  # Unix time
    from_worker: int
    to_worker: int
    why: str


class Activity(msgspec.Struct, tag="activity"):
    """What the engine did since the last one, and its requests now. Only while it is watched."""

    now_s: float  # engine clock
    forwards: list[SeenForward]
    missed: int  # forwards that are left out
    running: list[RunningRequest]
    waiting: list[WaitingRequest]
    waiting_count: int
    worker: int = 0  # of several; the front says which
    model: str = ""  # of several; the front says which
    moves: list[SeenMove] = []  # between workers, since the last one; the front says which
