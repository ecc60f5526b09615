"""Calls fuse when all that must be equal is; what a table does not cover runs alone."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Interception
from support.fake_models import (
    TOKENS,
    WIDTH,
    Cache,
    Fake,
    X,
    call_on,
    fuse,
    masked_arguments,
    randn,
    run,
)

pytestmark = pytest.mark.usefixtures("fake_specs")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 4)}),
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 3, 1)}),
        ({"x": torch.zeros(1, 3)}, {"x": torch.zeros(1, 3, dtype=torch.float64)}),
        ({"shared": torch.zeros(4)}, {"shared": torch.ones(4)}),
        ({"shared": torch.zeros(4)}, {"shared": torch.zeros(5)}),
        ({"shared": torch.zeros(4)}, {"shared": torch.zeros(2, 2)}),
        ({"shared": torch.zeros(4)}, {"shared": torch.zeros(4, dtype=torch.int32)}),
        ({"shared": torch.zeros(4)}, {"shared": None}), ({"shared": torch.zeros(4)}, {}),
        ({"entries": [torch.zeros(1)]}, {"entries": [torch.zeros(1, dtype=torch.int64)]}),
        ({"entries": [torch.zeros(1)]}, {"entries": [torch.zeros(1, 1)]}),
        ({"time": 1}, {"time": 1.0}), ({"time": torch.tensor(1)}, {"time": torch.tensor(1.0)}),
        ({"time": torch.tensor(1.0)}, {"time": torch.tensor([1.0])}),
        ({"time": torch.tensor(1.0)}, {"time": 1.0}), (TOKENS, {"text": torch.ones(1, 5, 2)}),
        ({**TOKENS, "mask": torch.ones(1, 4)}, TOKENS),
        ({**TOKENS, "mask": torch.ones(1, 4)}, {**TOKENS, "mask": torch.ones(1, 4).bool()}),
        ({"added": None}, {"added": {"ids": torch.zeros(1, 3), "more": None}}),
        ({"layers": [torch.zeros(1, 2)]}, {"layers": [torch.zeros(1, 2)] * 2}),
        ({"layers": [torch.zeros(1, 2)]}, {"layers": [torch.zeros(1, 3)]}),
        ({"patches": torch.zeros(4, 2)}, {"patches": torch.zeros(4, 3)}),
        ({"patches": torch.zeros(4, 2)}, {}), ({"cache": Cache("read")}, {"cache": Cache("skip")}),
        ({"loose_mask": torch.ones(1, 4)}, {"loose_mask": torch.ones(1, 4, dtype=torch.long)}),
        ({"flag": True}, {"flag": 1}), ({"flag": 1}, {"flag": 1.0}), ({"flag": "1"}, {"flag": 1}),
        ({"flag": 0.5}, {"flag": 0.25}), ({"flag": [1, 2]}, {"flag": (1, 2)}),
        ({"flag": {"scale": 1}}, {"flag": {"scale": 2}}),
        ({"flag": {"scale": True}}, {"flag": {"scale": 1}}),
    ],
)  # fmt: skip
def test_calls_that_differ_in_what_must_be_equal_do_not_fuse(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert fuse({**X, **left}, {**X, **left})
    assert fuse({**X, **right}, {**X, **right})
    assert not fuse({**X, **left}, {**X, **right})


def test_equal_token_counts_of_another_geometry_do_not_fuse() -> None:
    def ids(height: int, width: int) -> Tensor:
        return torch.cartesian_prod(torch.arange(height), torch.arange(width))

    assert ids(2, 4).shape == ids(4, 2).shape
    assert not fuse({**X, "shared": ids(2, 4)}, {**X, "shared": ids(4, 2)})
    assert fuse({**X, "shared": ids(2, 4)}, {**X, "shared": ids(2, 4)})


def test_two_components_of_one_class_do_not_fuse() -> None:
    high, low = Interception({"transformer": Fake(), "transformer_2": Fake()}).targets
    fuser = Fuser()

    assert fuser.describe(Call(high, (), X))[0] != fuser.describe(Call(low, (), X))[0]


@pytest.mark.parametrize(
    "odd",
    [
        {"flag": torch.zeros(1)},
        {"flag": {"inner": torch.zeros(1)}},
        {"flag": [torch.zeros(1)]},
        {"flag": object()},
        {"unheard_of": torch.zeros(1)},
        {"added": {"ids": torch.zeros(1, 3), "unheard_of": torch.zeros(1)}},
        {"added": {"ids": torch.zeros(2, 3)}},
        {"entries": [torch.zeros(1)] * 2},
        {"time": torch.zeros(2)},
        {"text": torch.ones(2, 4, 2)},
        {"layers": [torch.zeros(2, 2)]},
        {"cache": Cache("mine")},
    ],
    ids=lambda odd: f"{odd}".partition(" at 0x")[0][:40],  # the same in every process
)
def test_what_the_table_does_not_cover_runs_alone(odd: dict[str, Any]) -> None:
    fuser, model = Fuser(), Fake()
    calls = [call_on(model, **{**X, **odd}) for _ in range(2)]

    (first, rows), (second, _) = [fuser.describe(call) for call in calls]

    assert first != second
    assert rows == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"x": 5}, {"x": [1.0]}, {"shared": "a name"}, {"entries": ["a name"]}, {"entries": []},
        {"text": [[1, 2]]}, {"added": "a name"}, {"layers": torch.zeros(1, 2)}, {"cache": "a name"},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_an_unforeseen_type_run_alone(odd: dict[str, Any]) -> None:
    assert not fuse({**X, **odd}, {**X, **odd})


def test_a_class_without_a_table_runs_alone() -> None:
    class Unknown(Fake):
        pass

    model, fuser = Unknown(), Fuser()
    calls = [call_on(model, **X), call_on(model, **X)]

    keys = {fuser.describe(call)[0] for call in calls}

    assert len(keys) == 2
    assert repr(keys.pop()) == "<alone: model.forward>"
    assert torch.equal(fuser.run(calls[:1], [1])[0], model(**X))


def test_answers_without_names_to_cut_back_by_are_not_padded() -> None:
    short, long = masked_arguments(2), masked_arguments(5)

    assert fuse(short, long)
    assert not fuse(short | {"return_dict": False}, long | {"return_dict": False})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"flag": None}, {}),
        ({"is_short": False}, {}),
        ({"spare": torch.Generator()}, {}),
        ({"shared": torch.zeros(2), "flag": 1}, {"flag": 1, "shared": torch.zeros(2)}),
        ({"patches": torch.zeros(4, 2)}, {"patches": torch.zeros(9, 2)}),
        ({"loose": torch.zeros(1, 4)}, {"loose": torch.zeros(1, 6)}),
        (
            {"loose": torch.zeros(1, 4)},
            {"loose": torch.zeros(1, 6), "loose_mask": torch.ones(1, 6, dtype=torch.long)},
        ),
    ],
    ids=lambda side: ",".join(side),
)
def test_calls_that_mean_the_same_fuse_however_they_are_written(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert fuse({**X, **left}, {**X, **right})


def test_a_shared_number_that_was_expanded_has_a_digest_too() -> None:
    expanded = torch.tensor(2.0).expand(1)  # its stride is 0

    assert fuse({**X, "shared": expanded}, {**X, "shared": torch.tensor([2.0])})


# What is remembered between forwards


def count_digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    blake2b = hashlib.blake2b

    def counting(data: bytes, **options: Any) -> Any:
        counted.append(len(data))
        return blake2b(data, **options)

    monkeypatch.setattr(hashlib, "blake2b", counting)
    return counted


def test_shared_tensors_are_read_once_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = count_digests(monkeypatch)
    fuser, model, ids = Fuser(), Fake(), torch.zeros(4)

    keys = [fuser.describe(call_on(model, **X, shared=ids))[0] for _ in range(5)]
    fuser.describe(call_on(model, **X, shared=ids.clone()))

    assert len(set(keys)) == 1
    assert len(counted) == 2


def test_shared_tensors_are_read_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = count_digests(monkeypatch)
    fuser, model, ids = Fuser(), Fake(), torch.zeros(4)
    before = fuser.describe(call_on(model, **X, shared=ids))[0]

    ids += 1
    after = fuser.describe(call_on(model, **X, shared=ids))[0]

    assert before != after
    assert len(counted) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64])
def test_shared_tensors_of_every_type_can_be_compared(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)

    assert fuse({**X, "shared": zeros}, {**X, "shared": zeros.clone()})
    assert not fuse({**X, "shared": zeros}, {**X, "shared": ones})
    assert fuse({**X, "shared": torch.ones(2, 8)[:, ::2]}, {**X, "shared": torch.ones(2, 4)})


def test_inference_tensors_fuse() -> None:
    fuser, model = Fuser(), Fake()
    with torch.inference_mode():
        parts = [randn(1, WIDTH, seed=seed) for seed in range(2)]

        answers = run(fuser, [call_on(model, x=part) for part in parts])

    assert torch.equal(torch.cat(answers), torch.cat(parts))


def test_a_shared_inference_tensor_runs_alone() -> None:
    with torch.inference_mode():
        ids = torch.zeros(4)

    assert not fuse({**X, "shared": ids}, {**X, "shared": ids})
