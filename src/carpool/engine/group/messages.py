"""The messages between the processes of a group, as msgpack; `packing.py` packs the values."""

from collections.abc import Callable
from typing import Any

import msgspec

from carpool.engine.adapters.hooks import AdapterPlan


class SentTensor(msgspec.Struct, array_like=True):
    """The header of a tensor sent with a message."""

    key: int
    dtype: str
    shape: list[int]
    stride: list[int]  # empty: contiguous
    raw: bytes | None  # bytes of a host tensor in a group of accelerators


class LoadFollower(msgspec.Struct, tag=True, array_like=True):
    """The first message: the model to load."""

    source: str
    settings: bytes  # `EngineSettings`
    components: list[str]
    spare_components: list[str]  # further modules of the model, not loaded here
    rank: int
    ranks: int


class Join(msgspec.Struct, tag=True, array_like=True):
    """All ranks have loaded: join at this port of the loopback address."""

    port: int


class Adapter(msgspec.Struct, tag=True, array_like=True):
    """An adapter's layers for one component; see `parts.packed`."""

    name: str
    component: str
    parts: bytes


class Forget(msgspec.Struct, tag=True, array_like=True):
    """Remove all adapters."""


class EndFollower(msgspec.Struct, tag=True, array_like=True):
    """End this process."""


class RunForward(msgspec.Struct, tag=True, array_like=True):
    """A forward of a component, run by all ranks at the same time."""

    number: int
    component: str
    arguments: Any  # positional and keyword arguments
    tensors: list[SentTensor]
    forget: list[int]  # keys to forget after this call
    exact: list[int] | None  # rows of each call, in exact numerics
    marks: dict[int, int]  # marks of tensors for exact numerics, by key
    plan: AdapterPlan | None = None
    is_even: bool = True  # all rows have equal sizes


ToFollower = LoadFollower | Join | Adapter | Forget | EndFollower | RunForward


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The follower has loaded its components onto this device."""

    device: str


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The follower cannot join the group, and exits."""

    message: str


class Joined(msgspec.Struct, tag=True, array_like=True):
    """Its components are ready for forwards."""


class Ran(msgspec.Struct, tag=True, array_like=True):
    """A forward has ended, with its error."""

    number: int
    error: str | None


class Said(msgspec.Struct, tag=True, array_like=True):
    """A line of the follower's log."""

    level: int
    line: str


ToLeader = Loaded | Failed | Joined | Ran | Said

encode = msgspec.msgpack.Encoder().encode
to_follower: Callable[[bytes], ToFollower] = msgspec.msgpack.Decoder(ToFollower).decode
to_leader: Callable[[bytes], ToLeader] = msgspec.msgpack.Decoder(ToLeader).decode
