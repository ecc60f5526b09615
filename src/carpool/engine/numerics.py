"""Exact mode: in a fused forward, operations whose bits depend on the batch run call by call.

The last bits of a matrix product depend on its number of rows, and so do those of convolutions, of
attention, and of vectorised functions, whose scalar remainder rounds differently. `Exact` is a
torch function mode for one fused forward: it tracks the tensors with the batch on axis 0, and
splits the operations of `BY_CALL` along it: each call's part has the shape that it would have
alone, so the library runs the same kernel in the same order. Operations that are exact by IEEE 754
(sums, products, copies) run once for all rows.

Only operations that are known to compute each entry of axis 0 separately are split. All others run
on the whole batch, so that a module that mixes its rows still shows it. The mode also records which
single rows a forward reads (`Exact.suspicion`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from carpool.engine import operations as ops
from carpool.engine.intercept import is_compiled
from carpool.engine.layouts import (
    PERMUTES,
    RESHAPES,
    Layouts,
    as_alone,
    follow,
    join,
    keep,
    layouts_of_parts,
)
from carpool.engine.per_call import PerCall, by_call

# a tensor's mark is a set of bits
ROWS = 1  # axis 0 is the batch, or is folded with it, call after call
ROW = 2  # part of one row: belongs to one call, and is never split
DATA = 4  # more than lengths and masks: control flow must not depend on its values
REPEAT_UNIT = 8  # higher bits count further copies of the batch on axis 0


_PickKey = tuple[str, int, torch.Size, tuple[int, ...]]  # operation; place, shape and strides
_Pick = tuple[_PickKey, Tensor, set[int]]  # picked rows: the tensor itself, and their numbers


class Exact(TorchFunctionMode):
    """Runs the operations of one fused forward with the bits of lone calls.

    Args:
        rows: the number of rows of each call, in the order in which they are stacked.

    Attributes:
        suspicion: why some rows may affect others in the forward; None: no sign of it.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows, self._total = tuple(rows), sum(rows)
        self._marks: dict[str, int] = {}
        # single rows that were read, by operation and tensor; the references prevent a reuse of the
        # tensors' memory
        self._picked: dict[_PickKey, tuple[Tensor, set[int]]] = {}
        self._pick_name = f"_pick_{id(self)}"  # attribute name for a picked row's `_Pick`
        self._reads: str | None = None
        self._has_layouts = False  # whether any tensor has layouts
        self._name = f"_rows_{id(self)}"  # attribute name for a tensor's mark
        self._layouts_name = f"_layouts_{id(self)}"  # attribute name for its calls' layouts

    def mark(self, value: Any, mark: int, parts: Sequence[Any] = ()) -> None:
        """Mark a tensor, or each one in a list or dict, that was joined from the calls' `parts`."""
        if isinstance(value, Tensor):
            if mark:
                setattr(value, self._name, mark)
            if any(isinstance(part, Tensor) and not part.is_contiguous() for part in parts):
                self._keep_layouts(value, layouts_of_parts(value, parts))
        elif isinstance(value, Mapping):
            for name, entry in value.items():
                self.mark(entry, mark, [part[name] for part in parts])
        elif isinstance(value, (list, tuple)):
            for place, entry in enumerate(value):
                self.mark(entry, mark, [part[place] for part in parts])

    @property
    def suspicion(self) -> str | None:
        if self._reads is not None:
            return self._reads
        all_rows = set(range(self._total))
        for (name, _, shape, _), (_, picked) in self._picked.items():
            if picked != all_rows:
                tensor = f"a tensor of shape {tuple(shape)}"
                return f"{name} of {tensor} reads some rows of the batch and not the others"
        return None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ops.HANDLES:
            return func(*args, **kwargs)
        operands = ops.tensors(args, kwargs)
        if any(type(tensor) is PerCall for tensor in operands):
            join = partial(self._joined, mark=ROWS | DATA)
            return by_call(func, args, kwargs, self.rows, self._rows_of, join)
        marks = [self.mark_of(tensor) for tensor in operands]
        union = reduce(or_, marks, 0)
        if not union:
            result = func(*args, **kwargs)
            if name in ops.FACTORIES and getattr(result, "shape", ())[:1] == (self._total,):
                self.mark(result, ROWS)
            return result
        property_of = getattr(func, "__self__", None) if name == "__get__" else None
        if getattr(property_of, "__name__", "") not in ops.FACTS:
            self._note_picks(args, kwargs)
        pick = None
        if union & ROWS:
            pick = self._look(name, args, kwargs)
            if name.rstrip("_") in ops.BY_CALL or name in ops.BY_CALL:
                parts = self._parts(name, args, kwargs)
                if parts is not None:
                    return self._by_call(func, name, args, kwargs, parts)
        elif name in ops.READS and union & DATA:
            self._reads = f"{name} reads values of a row"
        result = func(*args, **kwargs)
        after = self._after(name, args, kwargs, union)
        if pick is not None:
            setattr(result, self._pick_name, pick)
        if isinstance(result, Tensor):
            if after & ROWS:
                self._lay(func, name, args, kwargs, result)
            setattr(result, self._name, after)
        elif isinstance(result, (tuple, list)):
            self.mark(result, after)
        if name == "__setitem__":
            self.mark(args[0], ROWS | union)
        return result

    def _rows_of(self, value: Tensor) -> Sequence[Tensor] | None:
        """Each call's rows of a tensor that is combined with a `PerCall`."""
        if not self.mark_of(value) & ROWS or not value.ndim:
            return None
        times, rest = divmod(value.shape[0], self._total)
        if rest or not times:
            return None
        parts = torch.split(value, [n * times for n in self.rows])
        layouts = self._layouts(value) or (None,) * len(parts)
        return [as_alone(part, layout) for part, layout in zip(parts, layouts, strict=True)]

    def mark_of(self, value: Tensor) -> int:
        return getattr(value, self._name, 0)

    def _lay(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> None:
        """Record the layout that each call's part of a result would have alone."""
        layouts: Layouts | None = None
        if name in RESHAPES or name in PERMUTES:
            before = self._layouts(args[0])
            if before is not None or (1 in self.rows and not args[0].is_contiguous()):
                layouts = follow(func, args, kwargs, result, self.rows, before)
        elif self._has_layouts:
            layouts = keep(func, args, kwargs, result, self.rows, self._layouts, self._has_rows)
        self._keep_layouts(result, layouts)

    def _keep_layouts(self, value: Tensor, layouts: Layouts | None) -> None:
        if layouts is not None or self._has_layouts:
            self._has_layouts |= layouts is not None
            setattr(value, self._layouts_name, layouts)

    def _has_rows(self, value: Tensor) -> bool:
        return bool(self.mark_of(value) & ROWS)

    def _layouts(self, value: Tensor) -> Layouts | None:
        return getattr(value, self._layouts_name, None)

    def _after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], union: int) -> int:
        """The mark of the result of an operation on the whole batch."""
        if union & ROWS:
            if name in ops.CUTS and ops.axis(name, args, kwargs) == 0:
                count = args[1] if len(args) > 1 else kwargs.get("chunks")
                copies, plain = divmod(union, REPEAT_UNIT)
                if copies and name.endswith("chunk") and count == 1 + copies:
                    return plain
                return ROW | (union & DATA)
            is_joined = name in ("cat", "concat") and ops.axis(name, args, kwargs, 1) == 0
            if is_joined and union < REPEAT_UNIT:
                return union | REPEAT_UNIT * (len(args[0]) - 1)
            if name in ops.PICKS and self._is_cut(name, args, kwargs) is not None:
                return ROW | (union & DATA)
            return union
        if name in ops.JOINS:
            return ROWS | (union & DATA)
        return union

    def _note_picks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the use of picked rows: some code picks a row only to read its device."""
        for tensor in ops.tensors(args, kwargs):
            pick: _Pick | None = getattr(tensor, self._pick_name, None)
            if pick is not None:
                key, source, rows = pick
                self._picked.setdefault(key, (source, set()))[1].update(rows)

    def _look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Pick | None:
        """Record reads of values; returns the operation's pick of single rows."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not self.mark_of(first) & ROWS:
            return None
        is_data = self.mark_of(first) & DATA
        if name in ops.READS and is_data:
            self._reads = self._reads or f"{name} reads values of the batch"
        elif name in ops.OVER_ROWS and is_data and 0 in ops.axes(name, args, kwargs, first.ndim):
            self._reads = self._reads or f"{name} goes over the batch"
        elif name in ops.PICKS and first.shape[:1] == (self._total,):
            cut = self._is_cut(name, args, kwargs)
            if cut is not None:
                return (name, first.data_ptr(), first.shape, first.stride()), first, cut
        return None

    def _is_cut(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int] | None:
        """The rows that an index selects, if it selects a part of axis 0."""
        if name != "__getitem__":
            if ops.axis(name, args, kwargs) != 0:
                return None
            if name == "select":
                index = kwargs.get("index", args[2] if len(args) > 2 else 0)
                return {int(index) % self._total}
            return set()
        index = args[1]
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, bool) or first is None or first is Ellipsis:
            return None
        if isinstance(first, int):
            return {first % self._total}
        if isinstance(first, slice):
            rows = set(range(*first.indices(self._total)))
            return None if len(rows) == self._total else rows
        if isinstance(first, Tensor) and first.dtype == torch.bool:
            return None  # a mask over more than rows tests every row
        return None if isinstance(first, Tensor) else set()

    def _parts(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
        """The sizes of axis 0 per call; None: the operation is not split."""
        plain = name.rstrip("_") if not name.startswith("__") else name
        if "out" in kwargs:
            return None
        if plain == "einsum":
            return self._einsum(args)
        operands = (*args, *kwargs.values())
        first = next((value for value in operands if isinstance(value, Tensor)), None)
        batched = [tensor for tensor in ops.tensors(args, kwargs) if self.mark_of(tensor) & ROWS]
        if plain in ops.WEIGHTED:
            if first is None or not self._has_rows(first):
                return None
            if ops.is_unbatched(plain, first, args, kwargs):
                return None
        elif plain in ops.PRODUCTS:
            if len(batched) > 1 and any(tensor.ndim < 3 for tensor in batched):
                return None  # a product of two row tensors mixes rows
            if first is not None and not self.mark_of(first) & ROWS and batched[0].ndim < 3:
                return None
        elif plain in ops.OVER_AXES and (
            first is None or 0 in ops.axes(plain, args, kwargs, first.ndim)
        ):
            return None
        ndim = max(tensor.ndim for tensor in batched)
        sizes = {x.shape[0] for x in batched if x.ndim == ndim and x.shape[0] != 1}
        if len(sizes) != 1:
            return None
        [size] = sizes
        again = 1 + max(self.mark_of(tensor) for tensor in batched) // REPEAT_UNIT
        times, rest = divmod(size, self._total * again)
        return None if rest or not times else [n * times for n in self.rows] * again

    def _einsum(self, args: Sequence[Any]) -> list[int] | None:
        operands = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
        equation = args[0]
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return None
        operand_letters, result_letters = equation.replace(" ", "").split("->")
        letters = {
            term[0]
            for term, operand in zip(operand_letters.split(","), operands, strict=False)
            if self.mark_of(operand) & ROWS
        }
        if len(letters) != 1 or result_letters[:1] not in letters:
            return None
        [letter] = letters
        terms = zip(operand_letters.split(","), operands, strict=False)
        if any(letter in term and not self._has_rows(operand) for term, operand in terms):
            return None
        size = next(operand.shape[0] for operand in operands if self.mark_of(operand) & ROWS)
        times, rest = divmod(size, self._total)
        return None if rest or not times else [n * times for n in self.rows]

    def _by_call(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sizes: list[int],
    ) -> Any:
        total, calls = sum(sizes), len(self.rows)
        changes = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
        with_rows = [tensor for tensor in ops.tensors(args, kwargs) if self.mark_of(tensor) & ROWS]
        ndim = max(tensor.ndim for tensor in with_rows)
        mark = max(self.mark_of(tensor) for tensor in with_rows) // REPEAT_UNIT * REPEAT_UNIT
        mark |= ROWS | (DATA if any(self.mark_of(tensor) & DATA for tensor in with_rows) else 0)
        weighted = name in ops.WEIGHTED

        def is_cut(value: Any, is_first: bool) -> bool:
            if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != total:
                return False
            if self.mark_of(value) & ROWS:
                return is_first or not weighted
            return not weighted and value.ndim == ndim and not isinstance(value, nn.Parameter)

        def cut(value: Any, is_first: bool) -> Any:
            if is_cut(value, is_first):
                parts = torch.split(value, sizes)
                if mark >= REPEAT_UNIT:
                    return [torch.cat(parts[i::calls]) for i in range(calls)]
                if changes:
                    return parts
                layouts = self._layouts(value) or (None,) * calls
                return [as_alone(part, layout) for part, layout in zip(parts, layouts, strict=True)]
            if isinstance(value, (list, tuple)) and any(isinstance(e, Tensor) for e in value):
                columns = [cut(entry, False) for entry in value]
                return [type(value)(row) for row in zip(*columns, strict=True)]
            return (value,) * calls

        operands, plain = (*args, *kwargs.values()), len(args)
        first = next((i for i, value in enumerate(operands) if isinstance(value, Tensor)), None)
        columns = [cut(value, i == first) for i, value in enumerate(operands)]
        results = [
            func(*own[:plain], **dict(zip(kwargs, own[plain:], strict=True)))
            for own in zip(*columns, strict=True)
        ]
        if changes and mark < REPEAT_UNIT:
            return args[0]
        if isinstance(results[0], tuple):
            return tuple(self._joined(column, mark) for column in zip(*results, strict=True))
        return self._joined(results, mark)

    def _joined(self, parts: Sequence[Tensor], mark: int) -> Tensor:
        """Join the parts of the calls into one batch."""
        layouts: Layouts | None
        if mark >= REPEAT_UNIT:
            again = 1 + mark // REPEAT_UNIT
            pieces = [part.chunk(again) for part in parts]
            parts = [chunks[i] for i in range(again) for chunks in pieces]
            joined, layouts = torch.cat(list(parts)), None
        else:
            joined, layouts = join(parts)
        if layouts is not None:
            setattr(joined, self._layouts_name, layouts)
            self._has_layouts = True
        setattr(joined, self._name, mark)
        return joined


def is_followed(module: nn.Module) -> bool:
    """Whether the mode can split a module's operations: those of compiled code bypass it, and
    experts, which have such an attribute in transformers, compute tokens of any rows together."""
    return not any(
        is_compiled(part) or isinstance(part, torch.jit.ScriptModule)
        or hasattr(part, "_is_expert_parallel") for part in module.modules()
    )  # fmt: skip
