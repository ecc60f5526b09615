"""Digests of tensors, to compare the content of arguments of different calls."""

import hashlib
from collections.abc import Callable, Hashable, Mapping
from operator import itemgetter  # parts of keys need not be comparable, only names
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from carpool.engine.provenance import parts_of, source_of


class Unfusable(Exception):
    """The call holds a value that its spec does not cover: it has to run alone."""


class Digests:
    """Digests of tensors, each computed once for every object and version."""

    def __init__(self) -> None:
        self._digests = WeakTensorKeyDictionary()

    def of(self, value: Tensor) -> Hashable:
        """A fingerprint of a tensor's content, computed once for every object (and version)."""
        if value.is_inference():
            raise Unfusable  # no version counter: a change would go unseen
        version, version_and_digest = value._version, None
        if value.untyped_storage().resizable():  # else NumPy may write into it, unseen
            version_and_digest = self._digests.get(value)  # type: ignore[no-untyped-call]
        if version_and_digest is None or version_and_digest[0] != version:
            if (made_of := parts_of(value)) is not None:
                axis, parts = made_of
                raw = repr((axis, [self.of(part) for part in parts])).encode()
            else:
                source = source_of(value)
                entries = raw_bytes(value if source is None else source).cpu()
                raw = entries.clone().numpy().tobytes()  # `numpy` marks a storage as shared
            version_and_digest = (version, hashlib.blake2b(raw, digest_size=16).digest())
            self._digests[value] = version_and_digest
        return value.dtype, value.device, tuple(value.shape), version_and_digest[1]

    def content(self, value: Any) -> Hashable:
        """A value that distinguishes arguments by content: a digest of each tensor."""
        if isinstance(value, Tensor):
            return id(value) if value.is_inference() else self.of(value)
        if isinstance(value, Mapping):
            return tuple(
                sorted(((str(n), self.content(v)) for n, v in value.items()), key=itemgetter(0))
            )
        if isinstance(value, (list, tuple)):
            return tuple(self.content(entry) for entry in value)
        return repr(value)


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's entries in order, on its device."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one expanded entry: torch calls that contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def flag(value: Any, of: Callable[[Tensor], Hashable] | None = None) -> Hashable:
    """A plain Python value as part of a key.

    Args:
        of: the part of a tensor among its entries; None: there may be none.
    """
    if of is not None and isinstance(value, Tensor):
        return of(value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value  # True, 1 and 1.0 are equal in Python, but not to a model
    if isinstance(value, (list, tuple)):
        return type(value), tuple(flag(entry, of) for entry in value)
    if isinstance(value, Mapping):
        return tuple(sorted(((str(n), flag(v, of)) for n, v in value.items()), key=itemgetter(0)))
    raise Unfusable
