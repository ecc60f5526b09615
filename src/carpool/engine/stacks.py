"""Joined tensors kept between forwards: text embeddings are the same objects at every step."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_STACKS = 32  # about ten groups of requests, three constants each
MAX_STACK_BYTES = 512 * 2**20
MAX_PARTS = 128  # sets of parts that were joined once

_Ids = tuple[int, ...]  # ids of the parts


class Stacks:
    """Concatenated tensors, remembered while their parts live and do not change."""

    def __init__(self) -> None:
        self._stacks: dict[_Ids, _Stack] = {}
        # parts that were joined once, as weakrefs without callbacks: mostly latents
        self._parts: dict[_Ids, tuple[tuple[int, ...], list[weakref.ref[Tensor]]]] = {}

    def __len__(self) -> int:
        return len(self._stacks)

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate along the rows, or reuse the earlier result for the same tensors.

        Text embeddings are the same objects at every step, latents never are. So a stack is cached
        from the second time on, and is dropped as soon as one of its parts is freed.
        """
        parts = list(values)
        try:
            ids, versions = tuple(map(id, parts)), tuple([part._version for part in parts])
        except RuntimeError:  # inference-mode tensors have no version counter
            return torch.cat(parts)
        stack = self._stacks.pop(ids, None)
        if stack is None or stack.versions != versions:
            if not self._were_seen(ids, versions, parts):
                return torch.cat(parts)
            forget = _Forget(self._stacks, ids)
            stack = _Stack(versions, [weakref.ref(part, forget) for part in parts])
        if len(self._stacks) >= MAX_STACKS:
            del self._stacks[next(iter(self._stacks))]  # the least recently used stack
        self._stacks[ids] = stack
        joined = stack.joined
        if joined is None or joined._version != stack.joined_version:
            joined = stack.joined = torch.cat(parts)
            stack.joined_version = joined._version
            self._drop_above(MAX_STACK_BYTES)
        return joined

    def _were_seen(self, ids: _Ids, versions: tuple[int, ...], parts: Sequence[Tensor]) -> bool:
        """Whether these very tensors were joined before, unchanged; else they are recorded."""
        before, refs = self._parts.pop(ids, ((), []))
        if before == versions and all(r() is p for r, p in zip(refs, parts, strict=True)):
            return True
        if len(self._parts) >= MAX_PARTS:
            del self._parts[next(iter(self._parts))]
        self._parts[ids] = versions, [weakref.ref(part) for part in parts]
        return False

    @property
    def joined(self) -> list[Tensor]:
        """The cached tensors."""
        return [stack.joined for stack in self._stacks.values() if stack.joined is not None]

    def clear(self) -> None:
        self._stacks.clear()
        self._parts.clear()

    def _drop_above(self, most_bytes: int) -> None:
        entries = ((ids, stack.joined) for ids, stack in self._stacks.items())
        sizes = [(ids, joined.nbytes) for ids, joined in entries if joined is not None]
        total = sum(size for _, size in sizes)
        for ids, size in sizes:  # least recently used first
            if total <= most_bytes:
                return
            del self._stacks[ids]
            total -= size


@dataclass(slots=True)
class _Stack:
    versions: tuple[int, ...]
    parts: list[weakref.ref[Tensor]]  # live weakrefs, so that ids are not reused
    joined: Tensor | None = None
    joined_version: int = 0


class _Forget:
    """Drops a cached stack when one of its parts is freed."""

    def __init__(self, stacks: dict[_Ids, _Stack], ids: _Ids) -> None:
        self._stacks, self._ids = stacks, ids

    def __call__(self, _: object) -> None:
        self._stacks.pop(self._ids, None)


def join_columns(values: Sequence[Any]) -> Any:
    """Lists or tuples of tensors, joined place by place."""
    columns = zip(*values, strict=True)
    return type(values[0])(c[0] if c[0] is None else torch.cat(c) for c in columns)


def expand(value: Any, rows: int, device: torch.device) -> Tensor:
    """One number for each row: a single number is repeated, a vector stays as it is."""
    if isinstance(value, Tensor) and value.ndim == 1 and value.device == device:
        return value  # common case
    number: Tensor = torch.as_tensor(value, device=device)
    return number.reshape(1).expand(rows) if number.ndim == 0 else number
