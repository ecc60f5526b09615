"""Keys and values of several texts side by side: each text keeps its own."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from carpool.engine.language import rows
from carpool.engine.language.own_cache import OwnCache, PackedCache
from support.engine_driver import driving
from support.language import author

companies = st.lists(st.integers(0, 3), min_size=1, unique=True)
turns = st.lists(st.tuples(companies, st.integers(1, 3), st.booleans()), max_size=12)
lengths = st.lists(st.integers(1, 9), min_size=4, max_size=4)


@given(lengths, turns, st.sampled_from([1, rows.ROOM]), st.sampled_from([0, 9, 99]))
def test_a_text_keeps_its_keys_and_values_in_any_company(
    lengths: list[int], turns: list[Any], room: int, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "ROOM", room)
        keep(lengths, turns, window)


def keep(lengths: list[int], turns: list[Any], window: int) -> None:
    caches = [DynamicCache() for _ in lengths]
    for cache in caches if window else ():
        cache.layers = [DynamicSlidingWindowLayer(window)]
    for cache, length in zip(caches, lengths, strict=True):
        cache.update(*torch.randn(2, 1, 2, length, 3), 0)
    expected = [cache.layers[0].keys for cache in caches]

    for company, attempts, has_trial in turns:
        texts = [OwnCache(caches[text]) for text in company]
        for _ in range(attempts):  # all but the last fail
            added = written(texts)
        if has_trial:
            written([text.copied() for text in texts])
        for text, row in zip(company, added, strict=True):
            expected[text] = torch.cat([expected[text], row[None]], dim=2)

    for cache, keys in zip(caches, expected, strict=True):
        assert cache.get_seq_length() == keys.shape[2]
        assert torch.equal(cache.layers[0].keys, keys[:, :, -window + 1 if window else 0 :])


def written(texts: list[OwnCache]) -> Tensor:
    """The keys of a token of each text, after a forward that is to attend to all of its own."""
    together, added = PackedCache(texts, "sdpa", pads=True), torch.randn(len(texts), 2, 1, 3)
    keys, _ = together.update(added, added, 0)
    owns = together.own(keys) if isinstance(keys, Tensor) else keys
    for text, own in zip(texts, owns, strict=True):
        kept = text.cache.layers[0].keys
        assert torch.equal(own[:, :, -kept.shape[2] :], kept)
    return added


def test_tokens_of_several_texts_attend_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, plain, widths = author("llama"), functional.scaled_dot_product_attention, list[int]()

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        widths.append(len(query))
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    with driving(pipe) as drive:
        heard = [drive.submit(str(number), seed=number) for number in range(len(pipe.texts))]
        drive.finish()

    assert not any(recorder.error for recorder in heard)
    layers = pipe.text_encoder.config.num_hidden_layers
    forwards = Counter(drive.widths("text_encoder", "generate"))
    calls = Counter({width: layers * count for width, count in forwards.items() if width > 1})
    wide = Counter(width for width in widths if width > 1)
    assert max(wide) > 2
    assert wide <= calls
    assert wide.total() > 0.9 * calls.total()  # all but prompts in the same forward
