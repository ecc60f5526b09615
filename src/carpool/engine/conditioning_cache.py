"""The conditioning cache: an encoder's answer is reused for equal calls of any request.

Text encoders, image encoders and the encoding half of a VAE return equal answers for equal
arguments. So an answer is cached by the content of the arguments, the module, and the adapters on
it, and equal calls of one forward run once. Callers get copies, because pipelines modify their
answers.

An answer is cached only if the call had no other effect: no draws from the global random numbers,
no changed arguments, no code or hooks outside the known libraries, no modes of torch, no text
generated token by token. A fused forward may differ from a lone call in its last bits
(`numerics="fast"`): its answers are given to requests with company only.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from carpool.engine import serialization
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.containment import Stages, TurnStage
from carpool.engine.digests import Digests, Unfusable, flag
from carpool.engine.execute import Failure, RunCalls
from carpool.engine.foreign_code import foreign_parts, is_of_a_library
from carpool.engine.intercept import Call
from carpool.engine.language.parts import WRITING
from carpool.engine.nested import tensors_in
from carpool.engine.overlay.module_state import TreeState
from carpool.engine.probation.snapshot import shares_memory, versions
from carpool.engine.request import RequestState
from carpool.engine.serialization import Unpackable, copied
from carpool.engine.switches import of_torch
from carpool.types import Phase

MOST_MIB, MOST_SHARE = 512.0, 0.02  # default limit: the smaller of the two
_CACHES = "past_key_values"  # language models' caches; diffusers' pipelines rarely read them
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: Any  # its tensors are private to the cache
    size: int  # bytes
    is_alone: bool  # it has the bits of a lone call


class ConditioningCache:
    """The cached answers of one engine, least recently used first. For its thread.

    Args:
        limit: total bytes of the answers; 0 disables the cache.
        is_by_tenant: tenants share no answers.
        is_exact: fused forwards give the bits of lone calls.
        reads_caches: the pipeline may read its language models' key-value caches.
        has_storages: the weights stay in place; False: they are streamed.
    """

    def __init__(
        self,
        limit: int,
        adapters: Adapters,
        stages: Stages,
        *,
        is_by_tenant: bool,
        is_exact: bool,
        reads_caches: bool,
        has_storages: bool = True,
    ) -> None:
        self.limit, self._adapters, self._digests = limit, adapters, Digests()
        self._is_by_tenant, self.is_exact = is_by_tenant, is_exact
        self._reads_caches, self._has_storages, self._stages = reads_caches, has_storages, stages
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = self._hits = self._misses = self._clearances = 0
        # a module's parts, their code, and whether it is foreign; by the module's id
        self._codes: dict[int, tuple[list[nn.Module], list[Any], bool]] = {}
        self._unkept: set[tuple[int, str]] = set()  # methods whose answers cannot be cached
        self._ran: dict[int, nn.Module] = {}  # modules that ran since `note_modules`, by their ids
        self._states: dict[int, TreeState] = {}  # by module id
        self._switches: list[Any] = []  # torch's, as the states were recorded
        self.prefix_tokens = 0  # prompt tokens not processed again: `prefixes.py`
        self.has_news = False  # an answer was cached since the last check of the parked calls

    def source(self, state: RequestState) -> "RequestConditioning | None":
        """The source for the calls of a request; None: the cache is off."""
        return RequestConditioning(self, state) if self.limit else None

    def key(self, call: Call, tenant: str) -> Hashable | None:
        """The cache key of a call; None: the call has to run."""
        target, arguments = call.target, call.arguments()
        if target.method in WRITING or target.modes or target.is_exclusive:
            return None
        is_unkept = (id(target.module), target.method) in self._unkept
        if is_unkept or len(call.args) > len(target.positional):
            return None
        if (owner := self.owner(call, tenant)) is None:
            return None
        tensors = list(tensors_in(arguments))
        if any(type(t) is not Tensor or t.layout is not torch.strided for t in tensors):
            return None
        try:
            content = flag(arguments, self._digests.of)
        except Unfusable:
            return None
        strides = tuple([tensor.stride() for tensor in tensors])
        return owner, target.method, content, strides

    def owner(self, call: Call, tenant: str) -> Hashable | None:
        """What calls have in common that may share answers; None: this one's are not kept."""
        adapters, module = self._adapters, call.target.module
        if not is_of_a_library(type(module)) or self._is_observed(module):
            return None
        lora = [
            (name, scale, adapters.digest(name))
            for name, scale in call.lora
            if adapters.acts_on(name, module)
        ]
        return id(module), module.training, tuple(lora), tenant if self._is_by_tenant else ""

    def _is_observed(self, module: nn.Module) -> bool:
        """Whether code outside the known libraries observes calls of a module."""
        hooks = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
        entry = self._codes.get(id(module))
        parts = entry[0] if entry else list(module.modules())
        attributes = [*map(vars, parts)]
        code = [
            [*map(type, parts)],
            [(own.get("processor"), own.get("forward")) for own in attributes],
            [*chain.from_iterable([own[n] for own in attributes for n in _HOOKS])],
        ]  # numbers of hooks are never given again
        if entry is None or entry[1] != code:
            is_foreign = next(foreign_parts(module, parts), None) is not None
            entry = self._codes[id(module)] = parts, code, is_foreign
        return any(hooks) or entry[2]

    def answer(self, key: Hashable, *, is_lone: bool) -> Any | None:
        """A copy of a cached answer.

        Args:
            is_lone: the request has no company: it must get the bits of a lone call.
        """
        entry = self._entries.get(key)
        if entry is None or (is_lone and not entry.is_alone):
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return copied(entry.answer)

    def around(self, encode: RunCalls) -> RunCalls:
        """Wrap a forward of an encoder: equal calls run once, and their answers are cached."""

        def once(states: Sequence[RequestState]) -> list[Any]:
            kept = [source.key if (source := source_of(state)) else None for state in states]
            keys = [place if key is None else key for place, key in enumerate(kept)]
            if keys == list(range(len(states))):
                return encode(states)
            places: dict[Hashable, int] = {}  # places of the calls that run
            for place, key in enumerate(keys):
                places.setdefault(key, place)
            running, clearances = [states[place] for place in places.values()], self._clearances
            answers = dict(zip(places, encode(running), strict=True))
            is_alone, copies = self.is_exact or len(running) == 1, dict[Hashable, Any]()
            if clearances == self._clearances:  # else memory is short: perhaps they ran in tiles
                for key, place in places.items():
                    entry = states[place], answers[key], is_alone
                    copies[key] = self._stages.contain("cache", None, self._keep, *entry)
            waiting = [p for p in range(len(states)) if p not in places.values()]
            rest = [p for p in waiting if copies.get(keys[p]) is None]
            answers |= dict(
                zip(rest, encode([states[p] for p in rest]) if rest else [], strict=True)
            )
            self._hits += len(waiting) - len(rest)
            return [
                answers[p] if p in rest else copied(copies[k]) if p in waiting else answers[k]
                for p, k in enumerate(keys)
            ]

        return once

    def _keep(self, state: RequestState, answer: Any, is_alone: bool) -> Any | None:
        """Cache a copy of an answer if that is safe; returns the copy, or None."""
        source, target = source_of(state), state.call.target
        if source is None or source.key is None:
            return None
        self._misses += 1
        if target.is_exclusive or isinstance(answer, Failure) or not source.is_unchanged:
            return None  # it has drawn random numbers, failed, or changed its arguments
        if not self._reads_caches and isinstance(answer, dict) and _CACHES in answer:
            fields = {name: entry for name, entry in answer.items() if name != _CACHES}
            answer = type(answer)(**fields)
        try:
            serialization.size(answer)
            if not _is_apart(answer) or shares_memory(answer, state.call.arguments()):
                raise Unpackable("tensors that share memory")
            copy = copied(answer)
        except Unpackable:
            self._unkept.add((id(target.module), target.method))
            return None
        except torch.OutOfMemoryError:
            self.clear()
            return None
        self.has_news |= self.put(source.key, copy, is_alone=is_alone)
        return copy

    def put(self, key: Hashable, answer: Any, *, is_alone: bool = False) -> bool:
        """Keep an answer whose tensors no other code has; returns whether there is room for it."""
        storages = [tensor.untyped_storage() for tensor in tensors_in(answer)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        if size > self.limit:
            return False
        self.drop(key)
        self._entries[key] = _Entry(answer, size, is_alone)
        self._bytes += size
        while self._bytes > self.limit:
            self.drop(next(iter(self._entries)))
        return True

    def kept(self, key: Hashable) -> Any | None:
        """A kept answer itself, which must not be changed."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def drop(self, key: Hashable) -> None:
        """Keep the answer of a key no longer. Harmless where there is none."""
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.size

    def clear(self) -> None:
        """Drop all answers, because memory is short or modules may have changed."""
        for registry in (self._entries, self._codes, self._unkept, self._states):
            registry.clear()
        self._bytes, self._clearances = 0, self._clearances + 1

    def runs(self, module: nn.Module, phase: Phase) -> None:
        """Note that a module runs: its own forwards may change its state."""
        if phase == "encode" or id(module) in self._states:
            self._ran[id(module)] = module

    def note_modules(self) -> None:
        """Record the state of the modules that ran, as the last request ends."""
        for key, module in self._ran.items() if self._entries else ():
            if key not in self._states or not self._states[key].is_now():
                self._states[key] = TreeState(module, with_storage=self._has_storages)
        self._ran.clear()
        self._switches = of_torch()

    def have_changed(self) -> bool:
        """Whether code outside of requests has changed a module or torch since `note_modules`."""
        is_torch_changed = bool(self._states) and of_torch() != self._switches
        return is_torch_changed or not all(state.is_now() for state in self._states.values())

    def statistics(self) -> dict[str, int]:
        """Hits, misses, and the size of the cache. From any thread."""
        return {
            "hits": self._hits,
            "misses": self._misses,
            "entries": len(self._entries),
            "bytes": self._bytes,
            "limit_bytes": self.limit,
            "prefix_tokens": self.prefix_tokens,
        }


class RequestConditioning:
    """Answers the calls of one request from the cache: see `request.AnswerSource`.

    Attributes:
        key: cache key of the parked call; None: it is not cached.
    """

    stage: ClassVar[TurnStage] = "cache"
    warning: ClassVar[str] = ""
    phases: ClassVar[tuple[Phase, ...]] = ("encode",)

    def __init__(self, cache: ConditioningCache, state: RequestState) -> None:
        self._cache, self._state = cache, state
        self.key: Hashable | None = None
        self._tensors: list[Tensor] = []  # arguments of the parked call
        self._versions: list[int] = []

    def answer(self, call: Call) -> Any | None:
        self.key = self._cache.key(call, self._state.request.tenant)
        if self.key is None:
            return None
        self._tensors = list(tensors_in(call.arguments()))
        self._versions = versions(self._tensors)
        if (answer := self.repeated()) is not None:
            self.ran(call, answer)
        return answer

    def repeated(self) -> Any | None:
        """The cached answer of the parked call, if an equal call has run meanwhile."""
        if self.key is None:
            return None
        return self._cache.answer(self.key, is_lone=not self._state.has_company)

    def ran(self, call: Call, answer: Any) -> None:
        self.key = None
        self._tensors.clear()

    @property
    def is_unchanged(self) -> bool:
        """Whether the arguments have not changed since the call."""
        return versions(self._tensors) == self._versions


def source_of(state: RequestState) -> RequestConditioning | None:
    """The request's conditioning source; None: it has none."""
    return next((s for s in state.sources if isinstance(s, RequestConditioning)), None)


def _is_apart(answer: Any) -> bool:
    """Whether no two tensors of an answer overlap, except equal views."""
    views = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride())
        for t in tensors_in(answer)
    }
    return len({view[0] for view in views}) == len(views) and not any(
        tensor.is_inference() for tensor in tensors_in(answer)
    )
