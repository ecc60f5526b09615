"""The rule for texts of different lengths: padded, masked, and cut back."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from carpool.engine.specs.rule import (
    CallArguments,
    JoinContext,
    KeyContext,
    Rule,
    Test,
    same_tensor,
)
from carpool.engine.specs.rules import STACK


@dataclass(frozen=True, slots=True)
class Pad(Rule):
    """Stack texts of different lengths: zeros fill the shorter ones along `axis`, under a mask.

    The mask, (rows, length) with zeros at positions to ignore, has this rule too, or STACK
    where it holds lengths instead. Calls without a mask fuse only with calls of equal length,
    unless `makes_mask` is set.
    """

    mask: str  # name of the mask argument
    axis: int = 1
    cut: tuple[str, ...] = ()  # output fields with the padded axis as axis 1: cut back
    makes_mask: bool = False  # where lengths differ, a missing mask becomes ones, int64
    places: bool = False  # packed mask: must be equal in exact numerics
    word: ClassVar[str] = "tensor"

    def text(self) -> str:
        return f"pad (with `{self.mask}`)"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        STACK.key(value, context)
        dtype, device, shape = value.dtype, value.device, value.shape[1:]
        if self.places and context.is_exact:
            return context.digests.of(value)
        arguments, lengths = context.arguments, [*shape]
        if self.makes_mask or arguments.get(self.mask) is not None:
            is_tuple = arguments.get("return_dict") is False  # a tuple has no field names for `cut`
            can_pad = not (self.cut and is_tuple) and not context.is_exact
            if can_pad and self.axis and shape[self.axis - 1]:
                lengths[self.axis - 1] = -1  # an empty text stays empty: padding would mask it all
        return dtype, device, tuple(lengths)

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        if not self.makes_mask or self.mask != name or value is None:
            return False
        rows = value.shape[:-1] == (context.rows,)
        return rows and value.dtype in (torch.int64, torch.bool) and not context.is_exact

    def _same(self, value: Any) -> Test:
        if self.places and isinstance(value, Tensor):
            return same_tensor(value)
        return STACK.same(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        length = max(value.shape[self.axis] for value in values)
        after = [0, 0] * (values[0].ndim - 1 - self.axis)  # `pad` counts axes from the last
        return torch.cat(
            [pad(value, [*after, 0, length - value.shape[self.axis]]) for value in values]
        )

    def align(self, name: str, batch: CallArguments, defaults: Mapping[str, Any]) -> None:
        """Where lengths differ, add masks of ones to calls without a mask."""
        if not self.makes_mask or name == self.mask or batch[0].get(name) is None:
            return
        values = [arguments[name] for arguments in batch]
        masks = [arguments.get(self.mask) for arguments in batch]
        if all(mask is None for mask in masks):
            if len({value.shape[self.axis] for value in values}) == 1:
                return  # no mask, as alone: masked kernels round differently
            dtype = torch.int64
        else:
            dtype = next(mask.dtype for mask in masks if mask is not None)
        for arguments, value, mask in zip(batch, values, masks, strict=True):
            if mask is None:
                shape = value.shape[0], value.shape[self.axis]
                mask = torch.ones(shape, dtype=dtype, device=value.device)
            arguments[self.mask] = mask.to(dtype)

    def divide(self, values: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Remove the padding from the output fields with the padded axis."""
        if not self.cut or values[0] is None:
            return answers
        lengths = [value.shape[self.axis] for value in values]
        return [self._cut(answer, n) for answer, n in zip(answers, lengths, strict=True)]

    def _cut(self, answer: Any, length: int) -> Any:
        if not isinstance(answer, Mapping):
            return answer
        fields = {n: _shorten(v, length) if n in self.cut else v for n, v in answer.items()}
        return type(answer)(**fields)


def _shorten(value: Any, length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_shorten(entry, length) for entry in value)
    return value[:, :length]
