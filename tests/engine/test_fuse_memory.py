"""What is worth remembering between forwards is remembered, and never when it is no longer true."""

import hashlib
from typing import Any

import pytest
import torch

from carpool.engine.fuse import Fuser
from support.fake_models import WIDTH, Fake, X, call_on, fuse, randn, run

pytestmark = pytest.mark.usefixtures("fake_specs")


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
