"""Joined tensors kept between forwards: text embeddings are the same objects at every step."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_STACKS = 32  # kept at once: about ten companies of three constants each
MAX_STACK_BYTES = 512 * 2**20


class Stacks:
    """Concatenated tensors, remembered while their parts live and do not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], _Stack] = {}

    def __len__(self) -> int:
        return len(self._known)

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate along the rows, or reuse what the same tensors gave before.

        Text embeddings are the same objects at every step, latents never are. So a stack is only
        kept from the second time on, and is dropped as soon as one of its parts is gone.
        """
        if any(value.is_inference() for value in values):
            return torch.cat(list(values))  # such tensors do not count their versions
        ids = tuple([id(value) for value in values])
        versions = tuple([value._version for value in values])
        known = self._known.pop(ids, None)
        if known is None or known.versions != versions:
            forget = _Forget(self._known, ids)
            self._known[ids] = _Stack(versions, [weakref.ref(v, forget) for v in values])
            return torch.cat(list(values))
        if len(self._known) >= MAX_STACKS:
            del self._known[next(iter(self._known))]  # the one not used for longest
        self._known[ids] = known
        if known.joined is None or known.joined._version != known.joined_version:
            known.joined = torch.cat(list(values))
            known.joined_version = known.joined._version
            joined = known.joined
            self._drop_above(MAX_STACK_BYTES)
            return joined
        return known.joined

    @property
    def joined(self) -> list[Tensor]:
        """The concatenated tensors that are held."""
        return [one.joined for one in self._known.values() if one.joined is not None]

    def clear(self) -> None:
        self._known.clear()

    def _drop_above(self, most_bytes: int) -> None:
        kept = ((ids, one.joined) for ids, one in self._known.items())
        held = [(ids, joined.nbytes) for ids, joined in kept if joined is not None]
        total = sum(size for _, size in held)
        for ids, size in held:  # the one not used for longest first
            if total <= most_bytes:
                return
            del self._known[ids]
            total -= size


@dataclass(slots=True)
class _Stack:
    versions: tuple[int, ...]
    parts: list[weakref.ref[Tensor]]  # alive: their ids still mean them
    joined: Tensor | None = None
    joined_version: int = 0


class _Forget:
    """Drops a remembered stack when one of its parts dies."""

    def __init__(self, stacks: dict[tuple[int, ...], _Stack], ids: tuple[int, ...]) -> None:
        self._stacks, self._ids = stacks, ids

    def __call__(self, _: object) -> None:
        self._stacks.pop(self._ids, None)
