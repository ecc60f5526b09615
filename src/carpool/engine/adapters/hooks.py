"""Adapters (LoRA) per request: rows of one forward share the weights and add their own parts.

A registered adapter is a set of pairs of small matrices, one pair for a layer of the model. The
first adapter with a part for a layer hooks it, and the hook adds the part (`parts.py`) to the rows
of the running forward that use the adapter. The model's structure does not change, rows without an
adapter are not touched, and one more adapter is one more dict entry.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from carpool.engine.adapters.parts import Part
from carpool.engine.adapters.reader import AdapterParts, AdapterReader, Reading
from carpool.engine.intercept import Call, is_compiled
from carpool.errors import InvalidValue, LoraRejected
from carpool.request.adapter_names import AdapterInfo
from carpool.request.lora import AdapterScales, check_name

log = logging.getLogger("carpool")


class NotByRow(Exception):
    """A layer's input cannot be divided among the rows: the calls run apart."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Consecutive rows with the same adapter and scale."""

    name: str
    scale: float
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters of each row of the running forward."""

    rows: int
    runs: tuple[AdapterRows, ...]
    is_shared: bool  # all rows have the same adapters

    def add(
        self,
        parts: Mapping[str, Part],
        x: Tensor,
        output: Tensor,
        is_even: bool,
        layer: nn.Module | None = None,
    ) -> None:
        """Add the adapters' parts for one layer to its output, in place.

        `x` and `output` are (k * rows, ...) with k entries for each row; if the rows are not even,
        k differs among them.
        """
        for run in self.runs:
            if (part := parts.get(run.name)) is None:
                continue
            if self.is_shared:
                inputs, into = x, output
            else:
                k, rest = divmod(x.shape[0], self.rows)
                if rest or not (k == 1 or is_even):
                    raise NotByRow(f"an input of shape {tuple(x.shape)} for {self.rows} rows")
                inputs, into = (tensor[run.begin * k : run.end * k] for tensor in (x, output))
            part.add(layer, inputs, into, run.scale)


_NO_ADAPTERS = nullcontext()


@lru_cache(maxsize=512)
def plan(
    applied: tuple[AdapterScales, ...], rows: tuple[int, ...], *, is_exact: bool = False
) -> AdapterPlan | None:
    """The adapters of each row of a forward; None if no row has one.

    Each call's adapters are added in its request's order, because DoRA depends on it. `is_exact`:
    each call's rows are computed alone, for the bits of a lone call.
    """
    if not any(applied):
        return None
    if len(set(applied)) == 1:
        runs_of_all = (AdapterRows(name, scale, 0, sum(rows)) for name, scale in applied[0])
        return AdapterPlan(sum(rows), tuple(runs_of_all), is_shared=True)
    names = dict.fromkeys(name for scales in applied for name, _ in scales)
    places = {name: place for place, name in enumerate(names)}
    orders = [[places[name] for name, _ in scales] for scales in applied]
    runs = list[AdapterRows]()
    if is_exact or any(order != sorted(order) for order in orders):
        begin = 0
        for scales, n in zip(applied, rows, strict=True):
            runs += (AdapterRows(name, scale, begin, begin + n) for name, scale in scales)
            begin += n
        return AdapterPlan(sum(rows), tuple(runs), is_shared=False)
    by_row = [dict(scales) for scales, n in zip(applied, rows, strict=True) for _ in range(n)]
    for name in names:
        column = [scale_by_name.get(name) for scale_by_name in by_row]
        begin = 0
        for scale, run in groupby(column):
            end = begin + len(list(run))
            if scale is not None:
                runs.append(AdapterRows(name, scale, begin, end))
            begin = end
    return AdapterPlan(len(by_row), tuple(runs), is_shared=False)


class Adapters:
    """The adapters of one pipeline's modules.

    `add` may be called from any thread and waits for no forward; the rest is for the engine's.
    """

    def __init__(self, pipe: Any, device: torch.device, *, is_exact: bool = False) -> None:
        self._pipe, self._reader = pipe, AdapterReader(pipe, device)
        self._is_exact = is_exact
        self._infos: dict[str, AdapterInfo] = {}
        self.notes: dict[str, str] = {}  # further warnings, by id
        self._identities: dict[str, bytes] = {}
        self._parts: dict[str, Mapping[tuple[str, str], Part]] = {}
        self._lock = threading.Lock()  # one registration at a time
        self._arrived: deque[tuple[str, Mapping[tuple[str, str], Part]]] = deque()
        self._layers: dict[nn.Module, dict[str, Part]] = {}  # keyed by the hooked layer
        self._hooks: list[RemovableHandle] = []
        self._plan: AdapterPlan | None = None  # plan of the running forward
        self._is_even = True

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(map(self._noted, self._infos.values()))

    def _noted(self, info: AdapterInfo) -> AdapterInfo:
        note = self.notes.get(info.id)
        return info if note is None else replace(info, warnings=(*info.warnings, note))

    def add(self, name: str, path: str | Path, names: Sequence[str] = ()) -> None:
        """Read an adapter and offer it to later requests under its id and its aliases.

        With any alias, its trainer's name is one, too.

        Raises:
            LoraRejected: the name or the file is not usable.
        """
        with self._lock:
            check_name(name, list(self._infos))
            try:
                reading = self._reader.read(path, (*names, name))
            except LoraRejected as error:
                raise LoraRejected(f"adapter {name!r}: {error}") from error.__cause__
            targets = tuple(self._take_all(name, reading))
            is_new = names and reading.trainer_name not in (*names, name)
            trainer_name = reading.trainer_name if is_new else ""
            aliases = [alias for alias in (*names, trainer_name) if alias not in (name, "")]
            self._infos[name] = AdapterInfo(
                name,
                tuple(dict.fromkeys(aliases)),
                reading.target,
                targets,
                reading.warnings,
                digest=reading.digest,
                trainer_name=trainer_name,
            )
        for warning in self.warnings(((name, 1.0),)):
            log.warning("%s", warning)

    def _take_all(self, name: str, reading: Reading) -> Iterator[str]:
        """Register an adapter, and its variants for one module each; yields these modules.

        Each of two experts can get the whole adapter, any other module its own part.
        """
        self._take(name, reading.parts, reading.digest)
        parts: AdapterParts | None
        experts = self._reader.experts
        for module in dict.fromkeys((*experts, *(component for component, _ in reading.parts))):
            if reading.target and module in experts:
                parts = self._reader.for_expert(reading.parts, module)
            else:
                parts = {place: p for place, p in reading.parts.items() if place[0] == module}
            if parts:
                self._take(f"{name}@{module}", parts, reading.digest)
                yield module

    def _take(self, name: str, parts: AdapterParts, digest: str) -> None:
        scalings = [part.scaling for part in parts.values()]  # those of PEFT are beside the file
        self._identities[name] = f"{name} {digest} {scalings}".encode()
        self.take(name, parts)

    def check(self, applied: AdapterScales) -> None:
        """Refuse a request whose adapters are missing, as after a restart without them.

        Raises:
            InvalidValue: an adapter is missing; the text names it.
        """
        for name, _ in applied:
            if name not in self._parts:
                rule = "has no adapter of this name that fits the model: see GET /v1/list_loras"
                raise InvalidValue(f"lora has {name!r}: the worker {rule}", param="lora")

    def warnings(self, applied: AdapterScales) -> list[str]:
        """Warnings about the parts of a request's adapters that are not applied."""
        ids = dict.fromkeys(name.partition("@")[0] for name, _ in applied)
        infos = [self._noted(self._infos[id_]) for id_ in ids if id_ in self._infos]
        return [f"adapter {info.id!r}: {text}" for info in infos for text in info.warnings]

    def take(self, name: str, parts: Mapping[tuple[str, str], Part]) -> None:
        """Add an adapter's parts, to be attached to their layers before the next forward."""
        self._parts[name] = {**self._parts.get(name, {}), **parts}
        self._arrived.append((name, parts))

    def parts_of(self, name: str) -> Mapping[tuple[str, str], Part]:
        """The parts of an adapter, by component and path of the layer."""
        return self._parts[name]

    @property
    def running(self) -> tuple[AdapterPlan | None, bool]:
        """The plan of the running forward, and whether its rows have equal sizes."""
        return self._plan, self._is_even

    def digest(self, name: str) -> bytes:
        """The identity of an adapter, to detect another file of the same name."""
        return self._identities.get(name, b"")

    def acts_on(self, name: str, module: nn.Module) -> bool:
        """Whether an adapter has a part for a module of the pipeline."""
        components = {component for component, _ in self._parts.get(name, {})}
        return any(getattr(self._pipe, component) is module for component in components)

    def applied(self, calls: Sequence[Call], rows: Sequence[int]) -> AbstractContextManager[None]:
        """Apply each call's adapters during one forward of these calls."""
        return self._applying(calls, rows) if any(call.lora for call in calls) else _NO_ADAPTERS

    @contextmanager
    def _applying(self, calls: Sequence[Call], rows: Sequence[int]) -> Iterator[None]:
        applied = tuple(call.lora for call in calls)
        self._plan = plan(applied, tuple(rows), is_exact=self._is_exact)
        assert self._plan is not None
        self.settle()
        self._is_even = self._plan.is_shared or is_even(calls, rows)
        try:
            with _uncompiled(call.target.module for call in calls):
                yield
        finally:
            self._plan = None

    def swap(
        self, applied: tuple[AdapterPlan | None, bool] | None
    ) -> tuple[AdapterPlan | None, bool]:
        """Swap in the plan of another forward; None: no adapters. Returns the former one.

        Forwards that share a sweep over streamed weights take turns: see `sweep.py`.
        """
        before = self._plan, self._is_even
        self._plan, self._is_even = applied or (None, True)
        return before

    def remove(self) -> None:
        """Remove the hooks from all layers."""
        while self._hooks:
            self._hooks.pop().remove()
        self._layers.clear()
        self._parts.clear()

    def settle(self) -> None:
        """Attach newly loaded adapters to their layers."""
        while self._arrived:
            name, parts = self._arrived.popleft()
            for (component, layer_path), part in parts.items():
                layer = getattr(self._pipe, component).get_submodule(layer_path)
                if layer not in self._layers:
                    self._layers[layer] = {}
                    hook = self._hook(self._layers[layer])
                    self._hooks.append(layer.register_forward_hook(hook))
                self._layers[layer][name] = part

    def _hook(self, parts: Mapping[str, Part]) -> Callable[..., None]:
        def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if self._plan is not None:
                self._plan.add(parts, inputs[0], output, self._is_even, layer)

        return add


def _uncompiled(modules: Iterable[nn.Module]) -> AbstractContextManager[object]:
    """Run modules eagerly if a part is compiled: compiled code does not notice new hooks."""
    distinct = {id(module): module for module in modules}.values()
    if not any(is_compiled(part) for module in distinct for part in module.modules()):
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def is_even(calls: Sequence[Call], rows: Sequence[int]) -> bool:
    """Whether all rows have equally many entries in every tensor of the calls."""
    sizes: dict[str, set[Any]] = {}
    for call, n in zip(calls, rows, strict=True):
        for name, value in call.arguments().items():
            if isinstance(value, Tensor) and value.ndim:
                sizes.setdefault(name, set()).add(value.shape[0] / n)
            elif isinstance(value, (list, tuple)):
                shapes = (entry.shape for entry in value if isinstance(entry, Tensor))
                sizes.setdefault(name, set()).update(shapes)
    return all(len(sizes_of_rows) == 1 for sizes_of_rows in sizes.values() if sizes_of_rows)
