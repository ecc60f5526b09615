"""What is worth remembering between forwards is remembered, and never when it is no longer true."""

import gc
import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from carpool.engine.fuse import Fuser
from support.fake_models import WIDTH, Fake, Half, X, call_on, fuse, randn, run

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


class Fellows:
    """Two calls that ride together step by step, with constants as their only argument."""

    def __init__(self) -> None:
        self.fuser, self.model = Fuser(), Fake()
        self.constants = [randn(1, WIDTH, seed=seed) for seed in range(2)]

    def step(self) -> Tensor:
        """The stack that the model saw."""
        run(self.fuser, [call_on(self.model, x=constant) for constant in self.constants])
        stacked = self.model.seen.pop()["x"]
        assert isinstance(stacked, Tensor)
        return stacked


def test_stacked_constants_are_kept_while_the_same_calls_ride() -> None:
    fellows = Fellows()
    first = fellows.step()

    second, third, fourth = fellows.step(), fellows.step(), fellows.step()

    assert first is not second  # what is seen once, as latents are, is not kept
    assert second is third is fourth
    assert torch.equal(first, second)


def test_stacks_of_other_company_are_others() -> None:
    fellows = Fellows()
    kept = [fellows.step() for _ in range(3)][-1]

    fellows.constants.reverse()
    turned = [fellows.step() for _ in range(3)][-1]

    assert torch.equal(turned, kept.flip(0))


def test_a_stack_is_dropped_when_a_source_dies() -> None:
    fellows = Fellows()
    kept = [fellows.step() for _ in range(3)][-1]
    del kept
    assert fellows.fuser.stacks

    del fellows.constants[0]
    gc.collect()

    assert not fellows.fuser.stacks


def test_a_stack_is_made_again_when_a_source_changes() -> None:
    fellows = Fellows()
    before = [fellows.step() for _ in range(3)][-1]

    fellows.constants[0] += 1

    for _ in range(3):
        after = fellows.step()
        assert after is not before
        assert torch.equal(after, torch.cat(fellows.constants))


def test_a_stack_is_made_again_when_the_model_spoils_it() -> None:
    fellows = Fellows()
    kept = [fellows.step() for _ in range(3)][-1]

    kept.zero_()

    for _ in range(3):
        assert torch.equal(fellows.step(), torch.cat(fellows.constants))


def test_latents_leave_nothing_behind() -> None:
    fuser, model = Fuser(), Fake()

    for step in range(5):
        run(fuser, [call_on(model, x=randn(1, WIDTH, seed=step + i)) for i in range(3)])
    model.seen.clear()
    gc.collect()

    assert not fuser.stacks


def test_constants_are_told_from_as_many_latents_as_forwards_of_others_make_between() -> None:
    fellows, others = Fellows(), Fake()
    fellows.step()
    for step in range(0, 300, 3):
        run(fellows.fuser, [call_on(others, x=randn(1, WIDTH, seed=step + i)) for i in range(3)])
    others.seen.clear()

    assert fellows.step() is fellows.step()


def test_what_a_module_computes_in_is_asked_once_while_its_weights_are_of_one_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, fuser, asked = Half(), Fuser(), list[torch.dtype]()

    def dtype(self: Half) -> torch.dtype:
        asked.append(self.weight.dtype)
        return self.weight.dtype

    monkeypatch.setattr(Half, "dtype", property(dtype), raising=False)
    for stored in (torch.float16, torch.float32):
        model.to(stored)
        for step in range(3):
            run(fuser, [call_on(model, x=randn(1, WIDTH, seed=step + i)) for i in range(2)])

    assert asked == [torch.float16, torch.float32]


def test_inference_tensors_fuse_without_being_remembered() -> None:
    fuser, model = Fuser(), Fake()
    with torch.inference_mode():
        parts = [randn(1, WIDTH, seed=seed) for seed in range(2)]

        for _ in range(3):
            answers = run(fuser, [call_on(model, x=part) for part in parts])

    assert torch.equal(torch.cat(answers), torch.cat(parts))
    assert not fuser.stacks


def test_a_shared_inference_tensor_runs_alone() -> None:
    with torch.inference_mode():
        ids = torch.zeros(4)

    assert not fuse({**X, "shared": ids}, {**X, "shared": ids})


operations = st.lists(
    st.tuples(
        st.sampled_from(["ride", "ride", "ride", "change", "replace", "spoil"]),
        st.lists(st.integers(0, 3), min_size=2, max_size=3, unique=True),
    ),
    max_size=25,
)


@given(operations)
def test_whatever_happened_before_a_stack_holds_its_sources(
    operations: list[tuple[str, list[int]]],
) -> None:
    fuser, model = Fuser(), Fake()
    constants = [randn(1, WIDTH, seed=i) for i in range(4)]
    for turn, (operation, chosen) in enumerate(operations):
        if operation == "ride":
            run(fuser, [call_on(model, x=constants[i]) for i in chosen])
            assert torch.equal(model.seen[-1]["x"], torch.cat([constants[i] for i in chosen]))
            del model.seen[:-1]
        elif operation == "change":
            constants[chosen[0]] += 1
        elif operation == "replace":
            constants[chosen[0]] = randn(1, WIDTH, seed=100 + turn)
        elif model.seen:
            model.seen[-1]["x"].zero_()


def test_stacks_are_bounded_in_bytes_and_dropped_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.engine.stacks.MAX_STACK_BYTES", 3 * 2 * 1000 * 4)
    fuser = Fuser()
    companies = [[torch.ones(1, 1000), torch.ones(1, 1000)] for _ in range(6)]
    for values in companies:
        for _ in range(2):  # kept from the second time on
            fuser.stacks.join(values)

    assert len(fuser.stacks.joined) == 3
    assert fuser.stacks.join(companies[5]) is fuser.stacks.join(companies[5])
    fuser.forget()
    assert not fuser.stacks
