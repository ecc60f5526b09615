"""Make the masks that hide the padding of calls whose lengths differ."""

from collections.abc import Sequence
from typing import Any

import torch

from carpool.engine.specs import Pad, Spec


def make_masks(spec: Spec, batch: Sequence[dict[str, Any]]) -> None:
    """Where lengths differ, add a mask of ones to calls without a mask, in place."""
    for name, rule in spec.rules.items():
        if not isinstance(rule, Pad) or not rule.makes_mask or name == rule.mask:
            continue
        if batch[0].get(name) is None:
            continue
        values = [arguments[name] for arguments in batch]
        masks = [arguments.get(rule.mask) for arguments in batch]
        if all(mask is None for mask in masks):
            if len({value.shape[rule.axis] for value in values}) == 1:
                continue  # no mask, as alone: other kernels are not as exact
            dtype = torch.int64
        else:
            dtype = next(mask.dtype for mask in masks if mask is not None)
        for arguments, value, mask in zip(batch, values, masks, strict=True):
            shape = (value.shape[0], value.shape[rule.axis])
            arguments[rule.mask] = (
                torch.ones(shape, dtype=dtype, device=value.device)
                if mask is None
                else mask.to(dtype)
            )
