"""The exact mode: inside a fused forward, operations whose bits depend on the batch run by call.

The last bits of a matrix product depend on how many rows it has, and so do those of convolutions,
of attention, and of vectorised functions, whose scalar remainder rounds differently. `Exact` is a
torch function mode for one fused forward: it follows which tensors carry the batch on axis 0, and
splits the operations of `BY_CALL` along it: each call's part has the shape that it would have
alone, so the library takes the same kernel in the same order. Whatever is exact by IEEE 754 (sums,
products, copies) runs once for all rows.

Only operations that are known to compute each entry of axis 0 by itself are split. All others run
on the whole batch, so that a module that mixes its rows still shows it. While it follows the
batch, the mode also notes what a forward reads of single rows (`Exact.suspicion`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from carpool.engine.intercept import is_compiled
from carpool.engine.layouts import PERMUTES, RESHAPES, Layouts, as_alone, follow, join, keep
from carpool.engine.operations import (
    BY_CALL,
    CUTS,
    HANDLES,
    JOINS,
    MADE,
    OVER_AXES,
    OVER_ROWS,
    PICKS,
    PRODUCTS,
    READS,
    WEIGHTED,
    axes,
    axis,
    is_unbatched,
    tensors,
)

# marks of a tensor: bits
ROWS = 1  # axis 0 is the batch, or is folded with it, call after call
ROW = 2  # a part of one row: belongs to one call, and is never split
DATA = 4  # made of more than lengths and masks: no decision may hang on its values
AGAIN = 8  # times this: the batch is on axis 0 so many times more, one after another


class Exact(TorchFunctionMode):
    """Runs the operations of one fused forward with the bits that each call gets alone.

    Args:
        rows: of each call, in the order in which they are stacked.

    Attributes:
        suspicion: why the forward may decide for all rows by some of them; None if it does not.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows, self._total = tuple(rows), sum(rows)
        self._marks: dict[str, int] = {}
        # rows that were read by themselves, by operation and tensor; the tensors are kept, or
        # another one might get the place of one in memory
        self._picked: dict[tuple[str, int, torch.Size], tuple[Tensor, set[int]]] = {}
        self._reads: str | None = None
        self._has_layouts = False  # of any tensor
        self._name = f"_rows_{id(self)}"  # the attribute that a tensor's mark is kept in
        self._laid = f"_laid_{id(self)}"  # ... and its calls' layouts, where they differ

    def mark(self, value: Any, mark: int) -> None:
        """Say what a tensor, or each of a list or dict of them, carries."""
        if isinstance(value, Tensor):
            if mark:
                setattr(value, self._name, mark)
        elif isinstance(value, Mapping):
            for entry in value.values():
                self.mark(entry, mark)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self.mark(entry, mark)

    @property
    def suspicion(self) -> str | None:
        if self._reads is not None:
            return self._reads
        everyone = set(range(self._total))
        for (name, _, shape), (_, picked) in self._picked.items():
            if picked != everyone:
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
        if name in HANDLES:
            return func(*args, **kwargs)
        marks = [self.mark_of(one) for one in tensors(args, kwargs)]
        seen = 0
        for mark in marks:
            seen |= mark
        if not seen:
            made = func(*args, **kwargs)
            if name in MADE and isinstance(made, Tensor) and made.shape[:1] == (self._total,):
                self.mark(made, ROWS)
            return made
        if seen & ROWS:
            self._look(name, args, kwargs)
            if name.rstrip("_") in BY_CALL or name in BY_CALL:
                parts = self._parts(name, args, kwargs)
                if parts is not None:
                    return self._by_call(func, name, args, kwargs, parts)
        elif name in READS and seen & DATA:
            self._reads = f"{name} reads values of a row"
        made = func(*args, **kwargs)
        after = self._after(name, args, kwargs, seen)
        if isinstance(made, Tensor):
            if after & ROWS:
                self._lay(func, name, args, kwargs, made)
            setattr(made, self._name, after)
        elif isinstance(made, (tuple, list)):
            self.mark(made, after)
        if name == "__setitem__":
            self.mark(args[0], ROWS | seen)
        return made

    def mark_of(self, value: Tensor) -> int:
        return getattr(value, self._name, 0)

    def _lay(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Tensor,
    ) -> None:
        """Note how each call's part of what an operation gave would be laid out alone."""
        layouts: Layouts | None = None
        if name in RESHAPES or name in PERMUTES:
            before = self._layouts(args[0])
            if before is not None or (1 in self.rows and not args[0].is_contiguous()):
                layouts = follow(func, args, kwargs, made, self.rows, before)
        elif self._has_layouts:
            layouts = keep(func, args, kwargs, made, self.rows, self._layouts, self._has_rows)
        if layouts is not None or self._has_layouts:
            self._has_layouts |= layouts is not None
            setattr(made, self._laid, layouts)

    def _has_rows(self, value: Tensor) -> bool:
        return bool(self.mark_of(value) & ROWS)

    def _layouts(self, value: Tensor) -> Layouts | None:
        return getattr(value, self._laid, None)

    def _after(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], seen: int) -> int:
        """The mark of what an operation on whole batches gives."""
        if seen & ROWS:
            if name in CUTS and axis(name, args, kwargs) == 0:
                count = args[1] if len(args) > 1 else kwargs.get("chunks")
                if seen >= AGAIN and name.endswith("chunk") and count == 1 + seen // AGAIN:
                    return seen % AGAIN
                return ROW | (seen & DATA)
            if name in ("cat", "concat") and axis(name, args, kwargs, 1) == 0 and seen < AGAIN:
                return seen | AGAIN * (len(args[0]) - 1)
            if name in PICKS and self._is_cut(name, args, kwargs) is not None:
                return ROW | (seen & DATA)
            return seen
        if name in JOINS:
            return ROWS | (seen & DATA)
        return seen

    def _look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note decisions by values, and rows that are read without the others."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not self.mark_of(first) & ROWS:
            return
        is_data = self.mark_of(first) & DATA
        if name in READS and is_data:
            self._reads = self._reads or f"{name} reads values of the batch"
        elif name in OVER_ROWS and is_data and 0 in axes(name, args, kwargs, first.ndim):
            self._reads = self._reads or f"{name} goes over the batch"
        elif name in PICKS and first.shape[:1] == (self._total,):
            cut = self._is_cut(name, args, kwargs)
            if cut is not None:
                key = name, first.data_ptr(), first.shape
                _, picked = self._picked.setdefault(key, (first, set()))
                picked.update(cut)

    def _is_cut(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int] | None:
        """The rows that an index takes, if it is one of axis 0 and not all of it."""
        if name != "__getitem__":
            if axis(name, args, kwargs) != 0:
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
            taken = set(range(*first.indices(self._total)))
            return None if len(taken) == self._total else taken
        if isinstance(first, Tensor) and first.dtype == torch.bool:
            return None  # a mask over the batch and more: every row is asked
        return None if isinstance(first, Tensor) else set()

    def _parts(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
        """How axis 0 of the split tensors divides among the calls; None: the operation is not."""
        plain = name.rstrip("_") if not name.startswith("__") else name
        if "out" in kwargs:
            return None
        if plain == "einsum":
            return self._einsum(args)
        first = next((one for one in args if isinstance(one, Tensor)), None)
        if first is None:
            first = next((one for one in kwargs.values() if isinstance(one, Tensor)), None)
        batched = [one for one in tensors(args, kwargs) if self.mark_of(one) & ROWS]
        if plain in WEIGHTED:
            if (
                first is None
                or not self.mark_of(first) & ROWS
                or is_unbatched(plain, first, args, kwargs)
            ):
                return None
        elif plain in PRODUCTS:
            if len(batched) > 1 and any(one.ndim < 3 for one in batched):
                return None  # rows by rows: that mixes them
            if first is not None and not self.mark_of(first) & ROWS and batched[0].ndim < 3:
                return None
        elif plain in OVER_AXES and (first is None or 0 in axes(plain, args, kwargs, first.ndim)):
            return None
        ndim = max(one.ndim for one in batched)
        sizes = {one.shape[0] for one in batched if one.ndim == ndim and one.shape[0] != 1}
        if len(sizes) != 1:
            return None
        [size] = sizes
        again = 1 + max(self.mark_of(one) for one in batched) // AGAIN
        times, rest = divmod(size, self._total * again)
        return None if rest or not times else [n * times for n in self.rows] * again

    def _einsum(self, args: Sequence[Any]) -> list[int] | None:
        operands = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
        equation = args[0]
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return None
        left, right = equation.replace(" ", "").split("->")
        letters = {
            term[0]
            for term, one in zip(left.split(","), operands, strict=False)
            if self.mark_of(one) & ROWS
        }
        if len(letters) != 1 or right[:1] not in letters:
            return None
        [letter] = letters
        for term, one in zip(left.split(","), operands, strict=False):
            if not self.mark_of(one) & ROWS and letter in term:
                return None
        size = next(one.shape[0] for one in operands if self.mark_of(one) & ROWS)
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
        with_rows = [one for one in tensors(args, kwargs) if self.mark_of(one) & ROWS]
        ndim = max(one.ndim for one in with_rows)
        mark = max(self.mark_of(one) for one in with_rows) // AGAIN * AGAIN
        mark |= ROWS | (DATA if any(self.mark_of(one) & DATA for one in with_rows) else 0)
        weighted = name in WEIGHTED

        def is_cut(one: Any, is_first: bool) -> bool:
            if not isinstance(one, Tensor) or not one.ndim or one.shape[0] != total:
                return False
            if self.mark_of(one) & ROWS:
                return is_first or not weighted
            return not weighted and one.ndim == ndim and not isinstance(one, nn.Parameter)

        def cut(value: Any, is_first: bool) -> Any:
            if is_cut(value, is_first):
                parts = torch.split(value, sizes)
                if mark >= AGAIN:
                    return [torch.cat(parts[i::calls]) for i in range(calls)]
                if changes:
                    return parts
                layouts = self._layouts(value) or (None,) * calls
                return [as_alone(part, own) for part, own in zip(parts, layouts, strict=True)]
            if isinstance(value, (list, tuple)) and any(isinstance(e, Tensor) for e in value):
                columns = [cut(entry, False) for entry in value]
                return [type(value)(row) for row in zip(*columns, strict=True)]
            return (value,) * calls

        first = next((i for i, one in enumerate(args) if isinstance(one, Tensor)), None)
        cut_args = [cut(one, i == first) for i, one in enumerate(args)]
        lead = first is None
        cut_kwargs = {}
        for key, value in kwargs.items():
            cut_kwargs[key] = cut(value, lead and isinstance(value, Tensor))
            lead = lead and not isinstance(value, Tensor)
        made = [
            func(*(one[i] for one in cut_args), **{key: one[i] for key, one in cut_kwargs.items()})
            for i in range(calls)
        ]
        if changes and mark < AGAIN:
            return args[0]
        if isinstance(made[0], tuple):
            return tuple(self._joined(column, mark) for column in zip(*made, strict=True))
        return self._joined(made, mark)

    def _joined(self, parts: Sequence[Tensor], mark: int) -> Tensor:
        """The parts of the calls as one batch."""
        layouts: Layouts | None
        if mark >= AGAIN:
            again = 1 + mark // AGAIN
            pieces = [part.chunk(again) for part in parts]
            parts = [one[i] for i in range(again) for one in pieces]
            joined, layouts = torch.cat(list(parts)), None
        else:
            joined, layouts = join(parts)
        if layouts is not None:
            setattr(joined, self._laid, layouts)
            self._has_layouts = True
        setattr(joined, self._name, mark)
        return joined


def is_followed(module: nn.Module) -> bool:
    """Whether a module's operations pass through the mode: compiled code does not."""
    return not any(
        is_compiled(part) or isinstance(part, torch.jit.ScriptModule) for part in module.modules()
    )
