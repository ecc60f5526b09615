"""A fused forward gives each call what it would have got alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from carpool.engine.fuse import Fuser
from carpool.engine.specs import Spec
from carpool.engine.split import split
from support.fake_models import (
    SPEC,
    WIDTH,
    Cache,
    Fake,
    Half,
    X,
    call_on,
    masked_arguments,
    randn,
    run,
)

pytestmark = pytest.mark.usefixtures("fake_specs")


def arguments(kinds: set[str], rows: int, length: int, seed: int) -> dict[str, Any]:
    """Arguments of these kinds for a call of so many rows, all random."""
    every: dict[str, Any] = {
        "shared": randn(4, seed=99), "entries": [randn(i + 1, seed=seed + i) for i in range(rows)],
        "number": float(seed), "0-d": torch.tensor(float(seed)),
        "vector": randn(rows, seed=seed + 5), "masked": randn(rows, length, 2, seed=seed + 6),
        "text": randn(rows, 4, 2, seed=seed + 6),
        "added": {
            "ids": randn(rows, WIDTH, seed=seed + 7), "more": {"deep": randn(rows, seed=seed + 8)},
        },
        "flag": {"scale": 0.5, "names": ["a", None]}, "spare": torch.Generator(),
        "layers": [randn(rows, 2, seed=seed + 11), randn(rows, 3, seed=seed + 12)],
        "patches": randn(rows * length, 2, seed=seed + 13), "cache": Cache("shared"),
        "loose": randn(rows, length, seed=seed + 14),
    }  # fmt: skip
    names = {"number": "time", "0-d": "time", "vector": "time", "masked": "text"}
    chosen = {names.get(kind, kind): every[kind] for kind in kinds}
    if "masked" in kinds:
        chosen["mask"] = torch.ones(rows, length)
    if "patches" in kinds:
        chosen["counts"] = torch.tensor([length] * rows)
    if "loose" in kinds and seed % 20:  # every other call brings its own
        chosen["loose_mask"] = (torch.arange(length) < 2).long().repeat(rows, 1)
    return {"x": randn(rows, WIDTH, seed=seed + 9), **chosen}


kinds = st.builds(
    lambda others, time, text: {*others, *time, *text},
    st.sets(
        st.sampled_from(
            ["shared", "entries", "added", "flag", "spare", "layers", "patches", "cache", "loose"]
        )
    ),
    st.sampled_from([[], ["number"], ["0-d"], ["vector"]]),
    st.sampled_from([[], ["masked"], ["text"]]),
)
sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5)


@given(kinds, sizes, st.permutations(range(5)))
def test_each_call_gets_what_it_gets_alone(
    kinds: set[str], sizes: list[tuple[int, int]], order: list[int]
) -> None:
    fuser, model = Fuser(), Fake()
    calls = [
        call_on(model, **arguments(kinds, rows, length, seed=10 * i))
        for i, (rows, length) in enumerate(sizes)
    ]
    calls = [calls[i] for i in order if i < len(calls)]

    answers = run(fuser, calls)

    assert len(model.seen) == 1
    for call, answer in zip(calls, answers, strict=True):
        torch.testing.assert_close(answer, model(**call.arguments()))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_splitting_undoes_stacking(rows: list[int]) -> None:
    parts = [randn(n, WIDTH, seed=i) for i, n in enumerate(rows)]

    whole = torch.cat(parts)

    for given_part, back in zip(parts, split(whole, rows, SPEC), strict=True):
        assert torch.equal(given_part, back)


def test_positional_and_named_arguments_are_the_same() -> None:
    model = Fake()
    calls = [
        call_on(model, randn(1, WIDTH), randn(4)),
        call_on(model, x=randn(2, WIDTH, seed=1), shared=randn(4)),
    ]

    answers = run(Fuser(), calls)

    assert [len(answer) for answer in answers] == [1, 2]


def test_answers_come_back_in_the_type_that_the_model_gives() -> None:
    class Sums:
        """As a key-value cache: sums the batch up, no rows to tell apart."""

    rich: list[tuple[Callable[[Tensor, Any], Any], Callable[[Any], Tensor]]] = [
        (lambda total, _: (total,), lambda answer: answer[0]),
        (lambda total, _: [total, total * 2], lambda answer: answer[1] / 2),
        (lambda total, _: (total, (total, None)), lambda answer: answer[1][0]),
        (
            lambda total, _: BaseModelOutputWithPast(
                last_hidden_state=total, hidden_states=(total, total), past_key_values=Sums()
            ),
            lambda answer: answer.hidden_states[1],
        ),
        (
            lambda total, _: AutoencoderKLOutput(
                latent_dist=DiagonalGaussianDistribution(
                    torch.cat([total, total], dim=1).reshape(-1, 2 * WIDTH, 1, 1)
                )
            ),
            lambda answer: answer.latent_dist.mean.reshape(-1, WIDTH),
        ),
    ]
    for answer, read in rich:
        model = Fake(answer)
        calls = [call_on(model, x=randn(rows, WIDTH, seed=rows)) for rows in (1, 2)]

        answers = run(Fuser(), calls)

        for call, fused in zip(calls, answers, strict=True):
            alone = model(**call.arguments())
            assert type(fused) is type(alone)
            torch.testing.assert_close(read(fused), read(alone))
            if isinstance(fused, BaseModelOutputWithPast):
                assert fused.past_key_values is None


def test_a_distribution_samples_for_its_own_rows_alone() -> None:
    def answer(total: Tensor, _: Tensor | None) -> AutoencoderKLOutput:
        parameters = torch.cat([total, total], dim=1).reshape(-1, 2 * WIDTH, 1, 1)
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(parameters))

    model = Fake(answer)
    calls = [call_on(model, x=randn(1, WIDTH, seed=seed)) for seed in range(2)]

    fused = run(Fuser(), calls)

    for call, one in zip(calls, fused, strict=True):
        alone = model(**call.arguments()).latent_dist.sample(torch.Generator().manual_seed(3))
        assert torch.equal(one.latent_dist.sample(torch.Generator().manual_seed(3)), alone)


def test_lists_with_an_entry_a_row_are_split_by_rows() -> None:
    spec = Spec(rows="x", rules={}, returns_list=True)
    images = [torch.zeros(i + 1) for i in range(5)]

    parts = split((images,), [2, 1, 2], spec)

    assert [[len(image) for image in part[0]] for part in parts] == [[1, 2], [3], [4, 5]]


def test_an_answer_without_a_row_for_each_row_is_an_error() -> None:
    model = Fake(lambda total, _: total.sum(dim=0, keepdim=True))

    with pytest.raises(ValueError, match=r"output of shape \(1, 3\) has not 2 rows"):
        run(Fuser(), [call_on(model, **X), call_on(model, **X)])


def test_padding_is_cut_back_from_what_carries_it() -> None:
    model = Fake(
        lambda total, text: BaseModelOutputWithPast(
            last_hidden_state=text, hidden_states=(text, text)
        )
    )

    answers = run(Fuser(), [call_on(model, **masked_arguments(length)) for length in (2, 5, 3)])

    assert model.seen[0]["text"].shape == (3, 5, 2)
    for length, answer in zip([2, 5, 3], answers, strict=True):
        text = randn(1, length, 2, seed=length)
        for value in (answer.last_hidden_state, *answer.hidden_states):
            assert torch.equal(value, text)


def test_a_mask_is_made_only_where_lengths_differ() -> None:
    model = Fake()
    short, long, also_long = (
        call_on(model, **X, loose=randn(1, length, seed=length)) for length in (2, 5, 5)
    )

    run(Fuser(), [long, also_long])
    run(Fuser(), [short, long])

    assert model.seen[0]["loose_mask"] is None
    assert model.seen[1]["loose_mask"].tolist() == [[1, 1, 0, 0, 0], [1] * 5]


@pytest.mark.parametrize("together", [1, 2])
def test_what_the_table_adds_is_said_in_every_call_but_never_over_what_the_caller_says(
    together: int,
) -> None:
    model = Fake()

    run(Fuser(), [call_on(model, **X) for _ in range(together)])
    run(Fuser(), [call_on(model, **X, is_short=False) for _ in range(together)])

    assert [seen["is_short"] for seen in model.seen] == [True, False]


@pytest.mark.parametrize("together", [1, 2])
def test_inputs_are_cast_where_the_table_says_so(together: int) -> None:
    model, x = Half(), torch.ones(1, 2, dtype=torch.float16)

    answers = run(Fuser(), [call_on(model, x=x) for _ in range(together)])

    assert [answer.dtype for answer in answers] == [torch.float64] * together
