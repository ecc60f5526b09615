"""Give each call its own part of the answer of a fused forward."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from carpool.engine.per_call import CACHES, PerCall, share
from carpool.engine.specs.rules import Spec


def split(value: Any, rows: Sequence[int], spec: Spec) -> list[Any]:
    """Give each call its part of a fused answer.

    Args:
        value: a tensor with sum(rows) entries on axis 0, or tuples, lists, model outputs and
            latent distributions of such; any other value that covers the whole batch (a
            key-value cache) has no reader and becomes None.
        rows: the number of rows of each call, in the order in which they were stacked.

    Raises:
        ValueError: a tensor's length is not the number of rows.
    """
    total = sum(rows)
    if isinstance(value, PerCall) or type(value).__name__ in CACHES:
        return [share(value, call, rows) for call in range(len(rows))]
    if isinstance(value, Tensor):
        times, rest = divmod(value.shape[0], total) if value.ndim else (0, 0)
        if rest or not times or (times > 1 and not spec.is_inferred):
            raise ValueError(f"output of shape {tuple(value.shape)} has not {total} rows")
        return list(value.split_with_sizes([n * times for n in rows]))  # times: folded frames
    if isinstance(value, list) and spec.returns_list:
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        return [value[end - n : end] for end, n in zip(ends, rows, strict=True)]
    if isinstance(value, Mapping):  # transformers' and diffusers' outputs are ordered dicts
        read = {name: entry for name, entry in value.items() if name not in spec.unread}
        fields = {name: split(entry, rows, spec) for name, entry in read.items()}
        shares = [{name: parts[i] for name, parts in fields.items()} for i in range(len(rows))]
        return [type(value)(**share) for share in shares] if type(value) is not dict else shares
    if isinstance(value, (tuple, list)):
        columns = [split(entry, rows, spec) for entry in value]
        return [type(value)(column[i] for column in columns) for i in range(len(rows))]
    if isinstance(getattr(value, "parameters", None), Tensor):  # DiagonalGaussianDistribution
        parts = split(value.parameters, rows, spec)
        fixed = {n: v for n, v in vars(value).items() if n == "deterministic"}  # Cosmos has none
        return [type(value)(part, **fixed) for part in parts]
    return [value if spec.is_inferred else None] * len(rows)
