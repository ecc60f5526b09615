"""The conditioning cache: what an encoder gave answers the next equal call of any request.

Text encoders, image encoders and the encoding half of a VAE compute the same for the same
arguments. So an answer is kept by the content of the arguments, the module, and the adapters that
act on it, and equal calls of one forward run once. Callers get copies: pipelines change what they
get.

An answer is kept where nothing else can have come of the call: no draws from the global random
numbers, no changed arguments, no code or hooks that the libraries do not ship, no modes of torch,
no text that is written token by token. A forward that several calls share may have other last bits
than each of them alone (`numerics="fast"`): its answers are given to requests with company only.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from carpool.engine import serialization
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.containment import Stages, TurnStage
from carpool.engine.digests import Digests, Unfusable
from carpool.engine.execute import Failure, RunCalls
from carpool.engine.foreign_code import foreign_parts, is_of_a_library
from carpool.engine.intercept import Call
from carpool.engine.language.parts import WRITING
from carpool.engine.probation.snapshot import shares_memory, tensors_in, versions
from carpool.engine.request import RequestState
from carpool.engine.serialization import Unpackable, copied
from carpool.types import Phase

MOST_MIB, MOST_SHARE = 512.0, 0.02  # the default: of these two the smaller one
_CACHES = "past_key_values"  # of language models; diffusers' pipelines read them seldom


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: Any  # no other code has its tensors
    size: int  # bytes
    is_alone: bool  # it has the bits of a call that runs alone


class ConditioningCache:
    """The kept answers of one engine, the oldest use first. For its thread.

    Args:
        limit: bytes of all answers; 0 switches it off.
        is_by_tenant: requests of different tenants share no answers.
        is_exact: forwards give each call the bits that it gets alone.
        reads_caches: the pipeline may read the key-value caches that its language models give.
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
    ) -> None:
        self._limit, self._adapters, self._digests = limit, adapters, Digests()
        self._is_by_tenant, self._is_exact = is_by_tenant, is_exact
        self._reads_caches, self._stages = reads_caches, stages
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = self._hits = self._misses = self._clearances = 0
        self._unkept: set[tuple[int, str]] = set()  # methods whose answers cannot be
        self.has_news = False  # an answer was kept since the parked calls were looked at

    def source(self, state: RequestState) -> "RequestConditioning | None":
        """What answers the calls of a request; None: the cache is off."""
        return RequestConditioning(self, state) if self._limit else None

    def key(self, call: Call, tenant: str) -> Hashable | None:
        """What equal calls have in common; None: this one has to run."""
        target = call.target
        if target.method in WRITING or target.modes:
            return None
        arguments, module = call.arguments(), target.module
        tensors = list(tensors_in(arguments))
        if (id(module), target.method) in self._unkept:
            return None
        if target.is_exclusive or len(call.args) > len(target.positional):
            return None
        if not is_of_a_library(type(module)) or _is_observed(module):
            return None
        if any(type(t) is not Tensor or t.layout is not torch.strided for t in tensors):
            return None
        try:
            content = self._digests.nested(arguments)
        except Unfusable:
            return None
        adapters, strides = self._adapters, tuple([tensor.stride() for tensor in tensors])
        lora = [
            (name, scale, adapters.digest(name))
            for name, scale in call.lora
            if adapters.acts_on(name, module)
        ]
        owner = tenant if self._is_by_tenant else ""
        place = id(module), target.method, module.training
        return place, content, strides, tuple(lora), owner

    def answer(self, key: Hashable, *, is_lone: bool) -> Any | None:
        """A copy of a kept answer.

        Args:
            is_lone: it goes to a request without company: its bits must be those of one alone.
        """
        entry = self._entries.get(key)
        if entry is None or (is_lone and not entry.is_alone):
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return copied(entry.answer)

    def around(self, run: RunCalls) -> RunCalls:
        """The same forward, in which equal calls run once, and whose answers are kept."""

        def once(states: Sequence[RequestState]) -> list[Any]:
            if states[0].call.target.phase != "encode":
                return run(states)
            keys = [_key_of(state, place) for place, state in enumerate(states)]
            if keys == list(range(len(states))):
                return run(states)
            places: dict[Hashable, int] = {}  # of the calls that run, by key
            for place, key in enumerate(keys):
                places.setdefault(key, place)
            running, clearances = [states[place] for place in places.values()], self._clearances
            answers = dict(zip(places, run(running), strict=True))
            is_alone, copies = self._is_exact or len(running) == 1, dict[Hashable, Any]()
            if clearances == self._clearances:  # else memory is short: perhaps they ran in tiles
                for key, place in places.items():
                    entry = states[place], answers[key], is_alone
                    copies[key] = self._stages.contain("cache", None, self._keep, *entry)
            waiting = [p for p in range(len(states)) if p not in places.values()]
            rest = [p for p in waiting if copies.get(keys[p]) is None]
            answers |= dict(zip(rest, run([states[p] for p in rest]) if rest else [], strict=True))
            self._hits += len(waiting) - len(rest)
            return [
                answers[p] if p in rest else copied(copies[k]) if p in waiting else answers[k]
                for p, k in enumerate(keys)
            ]

        return once

    def _keep(self, state: RequestState, answer: Any, is_alone: bool) -> Any | None:
        """Keep a copy of an answer if that is sure; returns the copy, or None."""
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
        self._put(source.key, _Entry(copy, _size(copy), is_alone))
        return copy

    def _put(self, key: Hashable, entry: _Entry) -> None:
        if entry.size > self._limit:
            return
        before = self._entries.pop(key, None)
        self._entries[key] = entry
        self._bytes += entry.size - (before.size if before is not None else 0)
        self.has_news = True
        while self._bytes > self._limit:
            _, victim = self._entries.popitem(last=False)
            self._bytes -= victim.size

    def clear(self) -> None:
        """Drop all answers: memory is short, or modules may have changed."""
        self._entries.clear()
        self._bytes, self._clearances = 0, self._clearances + 1

    def statistics(self) -> dict[str, int]:
        """Calls that were answered and that ran, and what is kept. From any thread."""
        return {
            "hits": self._hits,
            "misses": self._misses,
            "entries": len(self._entries),
            "bytes": self._bytes,
            "limit_bytes": self._limit,
        }


class RequestConditioning:
    """Answers the calls of one request from the cache: see `request.AnswerSource`.

    Attributes:
        key: of the call that it waits with; None: that is not kept.
    """

    stage: ClassVar[TurnStage] = "cache"
    warning: ClassVar[str] = ""
    phases: ClassVar[tuple[Phase, ...]] = ("encode",)

    def __init__(self, cache: ConditioningCache, state: RequestState) -> None:
        self._cache, self._state = cache, state
        self.key: Hashable | None = None
        self._tensors: list[Tensor] = []  # of that call's arguments
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
        """The answer of the call that it waits with, if an equal one has got it meanwhile."""
        if self.key is None:
            return None
        return self._cache.answer(self.key, is_lone=not self._state.has_company)

    def ran(self, call: Call, answer: Any) -> None:
        self.key = None
        self._tensors.clear()

    @property
    def is_unchanged(self) -> bool:
        """Whether the arguments are as they were when the call was made."""
        return versions(self._tensors) == self._versions


def source_of(state: RequestState) -> RequestConditioning | None:
    """What answers a request's calls from the cache; None: nothing does."""
    sources = (source for source in state.sources if isinstance(source, RequestConditioning))
    return next(sources, None)


def _key_of(state: RequestState, place: int) -> Hashable:
    """The key of a call, or its place in the forward where it has none."""
    source = source_of(state)
    return place if source is None or source.key is None else source.key


def _is_observed(module: nn.Module) -> bool:
    """Whether code that the libraries do not ship sees each call of a module."""
    hooks = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    return any(hooks) or next(foreign_parts(module), None) is not None


def _is_apart(answer: Any) -> bool:
    """Whether no tensor of an answer lies in a part of another one, but for equal views."""
    views = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride())
        for t in tensors_in(answer)
    }
    return len({view[0] for view in views}) == len(views) and not any(
        tensor.is_inference() for tensor in tensors_in(answer)
    )


def _size(answer: Any) -> int:
    """The bytes of an answer's tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(answer)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
