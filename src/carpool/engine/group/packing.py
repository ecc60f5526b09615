"""Calls as plain values and tensors, to be sent to the followers of a group.

A call crosses as a structure of plain values with keys in the place of tensors. A tensor is sent
once: as long as the leader's tensor lives, unchanged, later calls name it by its key (prompt
embeddings and position ids are the same objects at every step, latents are not). Only the leader
decides what is kept, and tells the followers what to forget: both sides hold the same, and at
most `MAX_KEPT_BYTES`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from carpool.engine.group.messages import SentTensor
from carpool.errors import PipelineFailed

MAX_KEPT_BYTES = 512 * 2**20
MAX_KEPT = 4096  # tensors
ALIGNED = 16  # bytes: every tensor in a packed buffer begins at a multiple


@dataclass(slots=True)
class _Kept:
    """A tensor that the followers have."""

    key: int
    version: int
    tensor: weakref.ref[Tensor]


@dataclass(slots=True)
class Packer:
    """The leader's end: names tensors by keys, and says which are new. For the engine's thread.

    Args:
        device: of the group; tensors of it are broadcast in one buffer, others are in the message.
    """

    device: torch.device
    most_bytes: int = MAX_KEPT_BYTES
    most: int = MAX_KEPT
    _kept: dict[int, _Kept] = field(default_factory=dict)  # by id; used longest ago first
    _sizes: dict[int, int] = field(default_factory=dict)  # bytes, by key
    _bytes: int = 0
    _dead: list[tuple[int, int]] = field(default_factory=list)  # id and key; from any thread
    _gone: list[int] = field(default_factory=list)  # keys, not told yet
    _keys: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that the followers hold for later calls."""
        return self._bytes

    def pack(self, value: Any, where: str) -> tuple[Any, list[tuple[int, Tensor]]]:
        """A value with keys for its tensors, and those that have to be sent, with their keys.

        Raises:
            PipelineFailed: something in it cannot be sent. Nothing has changed then.
        """
        _check(value, where)
        self._bury()
        new: list[tuple[int, Tensor]] = []
        return self._packed(value, new), new

    def key_of(self, tensor: Tensor) -> int:
        """Of a tensor that was packed last."""
        return self._kept[id(tensor)].key

    def forgotten(self) -> list[int]:
        """Keys that no call after this one names, each once. After `pack`."""
        self._bury()
        while self._kept and (self._bytes > self.most_bytes or len(self._kept) > self.most):
            oldest = next(iter(self._kept))
            self._forget(self._kept.pop(oldest).key)
        gone, self._gone = self._gone, []
        return gone

    def _packed(self, value: Any, new: list[tuple[int, Tensor]]) -> Any:
        if isinstance(value, Tensor):
            return {"t": self._key(value, new)}
        if isinstance(value, Mapping):
            return {"d": {name: self._packed(entry, new) for name, entry in value.items()}}
        if isinstance(value, (list, tuple)):
            kind = "l" if isinstance(value, list) else "u"
            return {kind: [self._packed(entry, new) for entry in value]}
        if isinstance(value, torch.dtype):
            return {"y": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"v": value.type == self.device.type}
        return value

    def _key(self, tensor: Tensor, new: list[tuple[int, Tensor]]) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        known = self._kept.pop(id(tensor), None)
        if known is not None and known.tensor() is tensor and known.version == version != -1:
            self._kept[id(tensor)] = known
            return known.key
        if known is not None:
            self._forget(known.key)
        self._keys += 1
        key, name = self._keys, id(tensor)

        def died(_: object) -> None:
            self._dead.append((name, key))

        self._kept[name] = _Kept(key, version, weakref.ref(tensor, died))
        self._sizes[key] = tensor.nbytes
        self._bytes += tensor.nbytes
        new.append((key, tensor))
        return key

    def _bury(self) -> None:
        while self._dead:
            name, key = self._dead.pop()
            kept = self._kept.get(name)
            if kept is not None and kept.key == key:
                del self._kept[name]
                self._forget(key)

    def _forget(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)
        self._gone.append(key)


_PLAIN = (type(None), bool, float, str, torch.dtype, torch.device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_of(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_of(entry)


def _check(value: Any, where: str) -> None:
    """Raise if something in a value cannot be sent."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            return
        what = f"a tensor of layout {value.layout}"
    elif type(value) is dict:
        if all(isinstance(name, str) for name in value):
            for entry in value.values():
                _check(entry, where)
            return
        what = "a dict with keys that are no text"
    elif type(value) in (list, tuple, torch.Size):
        for entry in value:
            _check(entry, where)
        return
    elif isinstance(value, _PLAIN) or (isinstance(value, int) and abs(value) < 2**63):
        return
    else:
        what = f"a {type(value).__name__}"
    raise PipelineFailed(
        f"{where} is given {what}, which cannot be sent to the other ranks of context_parallel: "
        "serve this with context_parallel=1"
    )


def described(key: int, tensor: Tensor, device: torch.device) -> SentTensor:
    """The header of a tensor that comes with a message."""
    raw = None
    if tensor.device.type != device.type:
        raw = _bytes_of(tensor).cpu().numpy().tobytes()
    stride = [] if tensor.is_contiguous() or 0 in tensor.stride() else list(tensor.stride())
    return SentTensor(
        key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), stride, raw
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one entry, expanded: torch calls that contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def buffer_of(tensors: list[Tensor], device: torch.device) -> Tensor | None:
    """The bytes of all tensors that are on the group's device, in one buffer; None: there are none.

    Each begins at a multiple of `ALIGNED` bytes.
    """
    pieces: list[Tensor] = []
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.numel():
            pieces.append(_bytes_of(tensor))
            if rest := -pieces[-1].numel() % ALIGNED:
                pieces.append(torch.zeros(rest, dtype=torch.uint8, device=tensor.device))
    return torch.cat(pieces) if pieces else None


def sizes_of(sent: list[SentTensor]) -> list[int]:
    """Bytes of the tensors that are in the buffer, with the padding after each."""
    found = []
    for one in sent:
        size = getattr(torch, one.dtype).itemsize
        for length in one.shape:
            size *= length
        found.append(0 if one.raw is not None else size + -size % ALIGNED)
    return found


@dataclass(slots=True)
class Unpacker:
    """The follower's end.

    Args:
        device: of this rank.
        receive: gives the buffer of so many bytes that the leader broadcasts.
    """

    device: torch.device
    receive: Callable[[int], Tensor]
    tensors: dict[int, Tensor] = field(default_factory=dict)  # by key

    def forget(self, keys: list[int]) -> None:
        for key in keys:
            del self.tensors[key]

    def take(self, sent: list[SentTensor]) -> None:
        """Take the tensors that come with a message."""
        sizes = sizes_of(sent)
        buffer = self.receive(sum(sizes)) if sum(sizes) else None
        at = 0
        for one, size in zip(sent, sizes, strict=True):
            dtype = getattr(torch, one.dtype)
            if one.raw is not None:
                flat = torch.frombuffer(bytearray(one.raw), dtype=dtype) if one.raw else None
            else:
                flat = buffer[at : at + size].view(dtype) if buffer is not None and size else None
            at += size
            place = self.device if one.raw is None else torch.device("cpu")
            made = torch.empty(one.shape, dtype=dtype, device=place)
            if one.stride:
                made = torch.empty_strided(one.shape, one.stride, dtype=dtype, device=place)
            if flat is not None:  # a copy: the buffer goes
                made.copy_(flat[: made.numel()].reshape(one.shape))
            self.tensors[one.key] = made

    def value(self, packed: Any) -> Any:
        """The value that was packed."""
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
