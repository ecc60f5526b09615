"""The messages between the processes of a group, as msgpack. Their contents: see `packing.py`."""

from typing import Any

import msgspec


class SentTensor(msgspec.Struct, array_like=True):
    """A tensor that comes with a message."""

    key: int
    dtype: str
    shape: list[int]
    stride: list[int]  # empty: contiguous
    raw: bytes | None  # the bytes, for a tensor of the host in a group of accelerators


class AdapterRun(msgspec.Struct, array_like=True):
    """Neighbouring rows that have an adapter at one scale: see `adapters.hooks.Run`."""

    name: str
    scale: float
    begin: int
    end: int


class LoadFollower(msgspec.Struct, tag=True, array_like=True):
    """The first message: what to load."""

    source: str
    settings: bytes  # `EngineSettings`
    components: list[str]
    spare_components: list[str]  # modules of the model that this process does not load
    rank: int
    ranks: int


class Join(msgspec.Struct, tag=True, array_like=True):
    """All have loaded: come together at this port of the loopback address."""

    port: int


class Adapter(msgspec.Struct, tag=True, array_like=True):
    """An adapter's layers for one component; see `adapter_layers.packed`."""

    name: str
    component: str
    layers: list[Any]
    tensors: list[SentTensor]


class Forget(msgspec.Struct, tag=True, array_like=True):
    """Remove all adapters."""


class EndFollower(msgspec.Struct, tag=True, array_like=True):
    """End this process."""


class RunForward(msgspec.Struct, tag=True, array_like=True):
    """A forward of a component, which all ranks run at the same time."""

    number: int
    component: str
    arguments: Any  # positional and named ones
    tensors: list[SentTensor]
    forget: list[int]  # keys, after this call
    exact: list[int] | None  # rows of each call, in exact numerics
    marks: dict[int, int]  # by key: what exact numerics follows of each tensor
    rows: int = 0  # with adapters: of all calls, and which rows have which
    runs: list[AdapterRun] = msgspec.field(default_factory=list)
    is_shared: bool = False
    is_even: bool = True


ToFollower = LoadFollower | Join | Adapter | Forget | EndFollower | RunForward


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The follower has loaded its components, onto this device."""

    device: str


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The follower cannot be part of the group, and ends."""

    message: str


class Joined(msgspec.Struct, tag=True, array_like=True):
    """Its components are ready for forwards."""


class Ran(msgspec.Struct, tag=True, array_like=True):
    """A forward has ended; with what it raised."""

    number: int
    error: str | None


class Said(msgspec.Struct, tag=True, array_like=True):
    """A line of its log."""

    level: int
    line: str


ToLeader = Loaded | Failed | Joined | Ran | Said

encode = msgspec.msgpack.Encoder().encode


def to_follower(body: bytes) -> ToFollower:
    """The message that the leader has encoded."""
    message: ToFollower = _TO_FOLLOWER.decode(body)
    return message


def to_leader(body: bytes) -> ToLeader:
    """The message that a follower has encoded."""
    message: ToLeader = _TO_LEADER.decode(body)
    return message


_TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
_TO_LEADER = msgspec.msgpack.Decoder(ToLeader)
