"""Prefix cache: a beginning that several prompts share is computed once.

Enhancers have long fixed instructions, and conversations repeat earlier turns. So the keys and
values of a beginning seen twice are kept in the conditioning cache: within its bounds, under its
sharing rules, dropped when it drops all. A later prompt starts from its longest cached prefix, and
a prompt that another one in its forward has much in common with waits for that. A request without
company has the bits of plain transformers: it stores prefixes and uses none.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from msgspec import structs

from carpool.engine.conditioning_cache import ConditioningCache
from carpool.engine.containment import Stages
from carpool.engine.execute import Failure, RunCalls
from carpool.engine.intercept import Call
from carpool.engine.language.own_cache import OwnCache, layers_of
from carpool.engine.language.parts import BLOCK
from carpool.engine.language.prompt import PromptReading
from carpool.engine.request import RequestState

MOST_MARKS = 1 << 14  # digests of prefixes; half: a repeated prefix is forgotten sooner


class Prefixes:
    """The cached prefixes of one engine. For its thread."""

    def __init__(self, cache: ConditioningCache, stages: Stages) -> None:
        self._cache, self._stages = cache, stages
        self._is_on = cache.limit > 0 and not cache.is_exact
        self._kept: OrderedDict[bytes, Hashable] = OrderedDict()  # by digest; None: seen once

    def around(self, run: RunCalls) -> RunCalls:
        """Wrap a forward: a prompt whose next tokens are or will be cached has the answer None."""

        def read(states: Sequence[RequestState]) -> list[Any]:
            if not self._is_on or all(_prompt_of(state.call) is None for state in states):
                return run(states)
            contain, ahead = self._stages.contain, list[PromptReading]()
            skip = [contain("cache", False, self._skips, state, ahead) for state in states]
            running = [state for state, skips in zip(states, skip, strict=True) if not skips]
            answers = iter(run(running) if running else ())
            results: list[Any] = [None if skips else next(answers) for skips in skip]
            for state, answer in zip(states, results, strict=True):
                prompt = _prompt_of(state.call)
                if prompt and answer is not None and not isinstance(answer, Failure):
                    contain("cache", None, self._keep, prompt)
            return results

        return read

    def _skips(self, state: RequestState, ahead: list[PromptReading]) -> bool:
        """Whether a prompt does not run now: it was filled, or waits for one of those `ahead`."""
        if (prompt := _prompt_of(state.call)) is None:
            return False
        if prompt.marks is None:
            prompt.marks = self._marks(state, prompt)
        if state.has_company and self._fill(prompt, prompt.marks):
            return True
        at, rest = prompt.read // BLOCK, prompt.tokens - prompt.read
        for other in ahead:
            pairs = zip(prompt.marks[at:], (other.marks or [])[at:], strict=False)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if common and 2 * common * BLOCK >= rest and other.read <= prompt.read:
                self._note(prompt.marks[: at + common])
                return True
        ahead.append(prompt)
        return False

    def _marks(self, state: RequestState, prompt: PromptReading) -> list[bytes]:
        """Digests of all prefixes of whole blocks that leave at least one token."""
        target = replace(state.call.target, module=prompt.module)
        owner = self._cache.owner(structs.replace(state.call, target=target), state.request.tenant)
        if owner is None:
            return []
        columns = [t.reshape(-1, prompt.tokens).cpu() for t in prompt.by_token.values()]
        rows = torch.cat(columns).T.contiguous().numpy()
        digest = hashlib.blake2b(repr((owner, list(prompt.by_token))).encode(), digest_size=16)
        marks = []
        for end in range(BLOCK, prompt.tokens, BLOCK):
            digest.update(rows[end - BLOCK : end].tobytes())
            marks.append(digest.digest())
        return marks

    def _fill(self, prompt: PromptReading, marks: Sequence[bytes]) -> bool:
        """Start from the longest cached prefix; returns whether there is one."""
        read = prompt.read
        for end in range(len(marks) * BLOCK, read, -BLOCK):
            layers = self._cache.kept(self._kept.get(marks[end // BLOCK - 1]))
            if layers is not None:
                prompt.fill([(k[:, :, read:end], v[:, :, read:end]) for k, v in layers])
                self._cache.prefix_tokens += end - read
                return True
        return False

    def _keep(self, prompt: PromptReading) -> None:
        """Cache the longest prefix of a whole prompt seen before, and drop its shorter prefixes."""
        marks = prompt.marks or []
        if not marks or prompt.read < prompt.tokens:
            return
        count = next((i for i, mark in enumerate(marks) if mark not in self._kept), len(marks))
        keys = [self._kept[mark] for mark in marks[:count]]
        end, layers = count * BLOCK, layers_of(prompt.cache)
        is_whole = all(layer.keys.shape[2] == prompt.tokens for layer in layers)
        if count and is_whole and self._cache.kept(keys[-1]) is None:
            key = "prefix", marks[count - 1]
            own = [(layer.keys[:, :, :end], layer.values[:, :, :end]) for layer in layers]
            if self._cache.put(key, [(k.clone(), v.clone()) for k, v in own]):
                for shorter in set(keys) & {("prefix", mark) for mark in marks[: count - 1]}:
                    self._cache.drop(shorter)
                self._kept.update(dict.fromkeys(marks[:count], key))
        self._note(marks)

    def _note(self, marks: Sequence[bytes]) -> None:
        """Record prefixes as seen."""
        for mark in marks:
            self._kept.setdefault(mark, None)
            self._kept.move_to_end(mark)
        while len(self._kept) > MOST_MARKS:
            self._kept.popitem(last=False)


def _prompt_of(call: Call) -> PromptReading | None:
    """The prompt that a call prefills in part."""
    cache = call.kwargs.get("past_key_values")
    return cache.prompt if isinstance(cache, OwnCache) else None
