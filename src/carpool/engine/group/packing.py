"""Calls as plain values and tensors, to send to the followers of a group.

A call is sent as a structure of plain values with keys in place of tensors. A tensor is sent once:
while the leader's tensor lives unchanged, later calls refer to it by its key (prompt embeddings and
position ids are the same objects at every step, latents are not). Only the leader decides which
tensors are kept, and sends the followers the keys to forget: both sides hold the same tensors, of
at most `MAX_KEPT_BYTES`.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from carpool.engine.digests import raw_bytes
from carpool.engine.group.messages import SentTensor
from carpool.errors import PipelineFailed

MAX_KEPT_BYTES = 512 * 2**20
MAX_KEPT = 4096  # tensors


@dataclass(slots=True)
class _Kept:
    """A tensor that the followers hold."""

    key: int
    version: int
    tensor: weakref.ref[Tensor]


@dataclass(slots=True)
class Packer:
    """The leader's end: assigns keys to tensors, and finds the new ones. For the engine's thread.

    Args:
        device: the group's device: its tensors are broadcast, others go in messages.
    """

    device: torch.device
    most_bytes: int = MAX_KEPT_BYTES
    capacity: int = MAX_KEPT
    _entries: dict[int, _Kept] = field(default_factory=dict)  # keyed by id, least recent first
    _sizes: dict[int, int] = field(default_factory=dict)  # bytes, by key
    _bytes: int = 0
    _dead: list[tuple[int, int]] = field(default_factory=list)  # id and key; from any thread
    _forgotten: list[int] = field(default_factory=list)  # keys still to send
    _keys: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that the followers hold."""
        return self._bytes

    def pack(self, value: Any, where: str) -> tuple[Any, list[tuple[int, Tensor]]]:
        """A value with keys in place of tensors, and the new tensors to send, with their keys.

        Raises:
            PipelineFailed: it holds an unsupported value; the packer is unchanged.
        """
        tensors: list[tuple[dict[str, int], Tensor]] = []
        try:
            packed = _packed(value, self.device, tensors)
        except _Unsendable as reason:
            raise PipelineFailed(
                f"{where} is given {reason}, which cannot be sent to the other ranks of "
                "context_parallel: serve this with context_parallel=1"
            ) from None
        self._bury()
        new: list[tuple[int, Tensor]] = []
        for entry, tensor in tensors:
            entry["t"] = self._key(tensor, new)
        return packed, new

    def key_of(self, tensor: Tensor) -> int:
        """The key of a tensor in the last `pack`."""
        return self._entries[id(tensor)].key

    def forgotten(self) -> list[int]:
        """Keys that no later call uses, each returned once. Call it after `pack`."""
        self._bury()
        while self._bytes > self.most_bytes or len(self._entries) > self.capacity:
            self._forget(self._entries.pop(next(iter(self._entries))).key)
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _key(self, tensor: Tensor, new: list[tuple[int, Tensor]]) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        entry = self._entries.pop(id(tensor), None)
        if entry is not None and entry.tensor() is tensor and entry.version == version != -1:
            self._entries[id(tensor)] = entry
            return entry.key
        if entry is not None:
            self._forget(entry.key)
        self._keys += 1
        key, name = self._keys, id(tensor)

        def died(_: object) -> None:
            self._dead.append((name, key))

        self._entries[name] = _Kept(key, version, weakref.ref(tensor, died))
        self._sizes[key] = tensor.nbytes
        self._bytes += tensor.nbytes
        new.append((key, tensor))
        return key

    def _bury(self) -> None:
        while self._dead:
            name, key = self._dead.pop()
            entry = self._entries.get(name)
            if entry is not None and entry.key == key:
                del self._entries[name]
                self._forget(key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)
        self._forgotten.append(key)


class _Unsendable(Exception):
    """A value that cannot be sent."""


def _packed(value: Any, device: torch.device, tensors: list[tuple[dict[str, int], Tensor]]) -> Any:
    """A value with empty entries in place of tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise _Unsendable(f"a tensor of layout {value.layout}")
        tensors.append(({}, value))
        return tensors[-1][0]
    if type(value) is dict:
        if not all(isinstance(name, str) for name in value):
            raise _Unsendable("a dict with keys that are no text")
        return {"d": {name: _packed(entry, device, tensors) for name, entry in value.items()}}
    if type(value) in (list, tuple, torch.Size):
        kind = "l" if type(value) is list else "u"
        return {kind: [_packed(entry, device, tensors) for entry in value]}
    if isinstance(value, torch.dtype):
        return {"y": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"v": value.type == device.type}
    is_plain = value is None or isinstance(value, (bool, float, str))
    if is_plain or (isinstance(value, int) and abs(value) < 2**63):
        return value
    raise _Unsendable(f"a {type(value).__name__}")


def described(key: int, tensor: Tensor, device: torch.device) -> SentTensor:
    """The header of a tensor to send with a message."""
    raw = None
    if tensor.device.type != device.type:
        raw = raw_bytes(tensor).cpu().numpy().tobytes()
    stride = [] if tensor.is_contiguous() or 0 in tensor.stride() else list(tensor.stride())
    return SentTensor(
        key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), stride, raw
    )


@dataclass(slots=True)
class Unpacker:
    """The follower's end.

    Args:
        device: this rank's device.
        receive: receives the leader's next broadcast, of the given number of bytes.
    """

    device: torch.device
    receive: Callable[[int], Tensor]
    tensors: dict[int, Tensor] = field(default_factory=dict)  # keyed by key

    def forget(self, keys: list[int]) -> None:
        for key in keys:
            del self.tensors[key]

    def take(self, headers: list[SentTensor]) -> None:
        """Receive the tensors sent with a message."""
        for header in headers:
            place = self.device if header.raw is None else torch.device("cpu")
            form: Any = {"dtype": getattr(torch, header.dtype), "device": place}
            tensor = torch.empty(header.shape, **form)
            if tensor.numel():
                if header.raw is None:
                    sent = self.receive(tensor.nbytes)
                else:
                    sent = torch.frombuffer(bytearray(header.raw), dtype=torch.uint8)
                tensor = sent.view(tensor.dtype).reshape(header.shape)
            if header.stride:
                tensor = torch.empty_strided(header.shape, header.stride, **form).copy_(tensor)
            self.tensors[header.key] = tensor

    def value(self, packed: Any) -> Any:
        """Unpack a value."""
        if not isinstance(packed, dict):
            return packed
        [(kind, inner)] = packed.items()
        match kind:
            case "t":
                return self.tensors[inner]
            case "d":
                return {name: self.value(entry) for name, entry in inner.items()}
            case "l":
                return [self.value(entry) for entry in inner]
            case "u":
                return tuple(self.value(entry) for entry in inner)
            case "y":
                return getattr(torch, inner)
            case "v":
                return self.device if inner else torch.device("cpu")
        raise ValueError(f"an unknown kind of value, {kind!r}")
