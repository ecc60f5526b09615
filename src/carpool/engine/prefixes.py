"""Prefix cache: a beginning that several prompts share is computed once.

Enhancers have long fixed instructions, and conversations repeat earlier turns. So the keys and
values of a beginning seen twice are kept in the conditioning cache: within its bounds, under its
sharing rules, dropped when it drops all. A later prompt starts from its longest cached prefix. A
request without company has the bits of plain transformers: it stores prefixes and uses none.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from carpool.engine.conditioning_cache import ConditioningCache
from carpool.engine.containment import Stages
from carpool.engine.execute import Failure, RunCalls
from carpool.engine.language.prompt import BLOCK, PromptReading
from carpool.engine.request import RequestState

MOST_MARKS = 1 << 14  # digests of prefixes; half: a repeated prefix is forgotten sooner


class Prefixes:
    """The cached prefixes of one engine. For its thread."""

    def __init__(self, cache: ConditioningCache, stages: Stages) -> None:
        self._cache, self._stages = cache, stages
        self._is_on = cache.limit > 0 and not cache.is_exact
        self._kept: OrderedDict[bytes, Hashable] = OrderedDict()  # by digest; None: seen once

    def around(self, run: RunCalls) -> RunCalls:
        """Wrap a forward: a prompt's call starts after its cached prefix."""

        def read(states: Sequence[RequestState]) -> list[Any]:
            prompt = states[0].call.kwargs.get("prompt")
            if not isinstance(prompt, PromptReading) or not self._is_on:
                return run(states)
            state, contain = states[0], self._stages.contain
            marks = contain("cache", None, self._marks, state, prompt) or []
            if marks and state.has_company:
                contain("cache", None, self._fill, prompt, marks)
            [answer] = run(states)
            if marks and prompt.read == prompt.tokens and not isinstance(answer, Failure):
                contain("cache", None, self._keep, prompt, marks)
            return [answer]

        return read

    def _marks(self, state: RequestState, prompt: PromptReading) -> list[bytes] | None:
        """Digests of all prefixes of whole blocks that leave at least one token."""
        owner = self._cache.owner(state.call, state.request.tenant)
        if owner is None:
            return None
        columns = [t.reshape(-1, prompt.tokens).cpu() for t in prompt.by_token.values()]
        rows = torch.cat(columns).T.contiguous().numpy()
        digest = hashlib.blake2b(repr((owner, list(prompt.by_token))).encode(), digest_size=16)
        marks = []
        for end in range(BLOCK, prompt.tokens, BLOCK):
            digest.update(rows[end - BLOCK : end].tobytes())
            marks.append(digest.digest())
        return marks

    def _fill(self, prompt: PromptReading, marks: Sequence[bytes]) -> None:
        """Start from the longest cached prefix."""
        read = prompt.read
        for end in range(len(marks) * BLOCK, read, -BLOCK):
            layers = self._cache.kept(self._kept.get(marks[end // BLOCK - 1]))
            if layers is not None:
                prompt.fill([(k[:, :, read:end], v[:, :, read:end]) for k, v in layers])
                self._cache.prefix_tokens += end - read
                return

    def _keep(self, prompt: PromptReading, marks: Sequence[bytes]) -> None:
        """Cache the longest prefix seen before, and drop its shorter prefixes."""
        count = next((i for i, mark in enumerate(marks) if mark not in self._kept), len(marks))
        keys = [self._kept[mark] for mark in marks[:count]]
        end, layers = count * BLOCK, prompt.cache.layers
        is_whole = all(layer.keys.shape[2] == prompt.tokens for layer in layers)
        if count and is_whole and self._cache.kept(keys[-1]) is None:
            key = "prefix", marks[count - 1]
            own = [(layer.keys[:, :, :end], layer.values[:, :, :end]) for layer in layers]
            if self._cache.put(key, [(k.clone(), v.clone()) for k, v in own]):
                for shorter in set(keys) & {("prefix", mark) for mark in marks[: count - 1]}:
                    self._cache.drop(shorter)
                self._kept.update(dict.fromkeys(marks[:count], key))
        for mark in marks:
            self._kept.setdefault(mark, None)
            self._kept.move_to_end(mark)
        while len(self._kept) > MOST_MARKS:
            self._kept.popitem(last=False)
