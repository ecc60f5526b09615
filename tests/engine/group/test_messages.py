"""Calls that cross to followers: the same values there, each tensor once, bounded on both sides."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from carpool.engine.adapters.parts import Kronecker, Part, packed, unpacked
from carpool.engine.digests import raw_bytes
from carpool.engine.group import messages, packing
from carpool.engine.group.packing import Packer, Unpacker
from carpool.errors import PipelineFailed

CPU = torch.device("cpu")


class Wire:
    """Both ends, with the broadcasts in between."""

    def __init__(self, most_bytes: int = 2**20, capacity: int = 100) -> None:
        self.packer = Packer(CPU, most_bytes, capacity)
        self.broadcasts = deque[Tensor]()
        self.unpacker = Unpacker(CPU, self._receive)
        self.sent: list[int] = []  # tensors with each call

    def _receive(self, size: int) -> Tensor:
        received = self.broadcasts.popleft()
        assert received.numel() == size
        return received.clone()

    def cross(self, value: Any) -> Any:
        packed, new = self.packer.pack(value, "transformer.forward")
        sent = [packing.described(key, one, CPU) for key, one in new]
        forget = self.packer.forgotten()
        self.broadcasts += [raw_bytes(one) for _, one in new if one.numel()]
        self.sent.append(len(new))
        body = messages.encode(
            messages.RunForward(1, "transformer", packed, sent, forget, None, {})
        )
        message = messages.to_follower(body)
        assert isinstance(message, messages.RunForward)
        self.unpacker.take(message.tensors)
        there = self.unpacker.value(message.arguments)
        self.unpacker.forget(message.forget)
        return there

    @property
    def held(self) -> int:
        return sum(one.nbytes for one in self.unpacker.tensors.values())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        is_laid_out = left.stride() == right.stride() or 0 in left.stride()
        return is_laid_out and left.dtype == right.dtype and bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_every_kind_of_argument_arrives_as_it_was() -> None:
    value = {
        "latents": torch.randn(2, 3, 5), "turned": torch.randn(4, 6).t(),
        "half": torch.randn(7).to(torch.bfloat16), "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]), "wave": torch.randn(3, dtype=torch.complex64),
        "number": torch.tensor(0.5), "nothing": torch.empty(0, 4),
        "expanded": [torch.tensor(7).expand(1), torch.tensor(8).expand(3)],
        "mixed": [1, 2.5, "x", None, True, (1, torch.ones(2))],
        "options": {"scale": 1.0, "return_dict": False}, "type": torch.float16, "place": CPU,
    }  # fmt: skip

    assert same(value, Wire().cross(value))


def test_a_tensor_is_sent_once_as_long_as_it_lives_unchanged() -> None:
    wire, constant = Wire(), torch.randn(100)

    wire.cross([constant, torch.randn(10)])
    wire.cross([constant, torch.randn(10)])
    constant.add_(1.0)
    there = wire.cross([constant])

    assert wire.sent == [2, 1, 1]
    assert same([constant], there)
    del constant
    wire.cross([])
    assert wire.held == 0
    assert wire.packer.kept_bytes == 0


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=30))
def test_both_sides_hold_the_same_and_no_more_than_is_allowed(calls: list[list[int]]) -> None:
    wire = Wire(most_bytes=1000, capacity=4)
    tensors = [torch.full((50 * (1 + n % 3),), float(n)) for n in range(10)]  # 200 to 600 bytes

    for call in calls:
        value = [tensors[n] for n in call]
        assert same(value, wire.cross(value))
        assert wire.held == wire.packer.kept_bytes <= 1000
        assert len(wire.unpacker.tensors) <= 4


def test_what_cannot_be_sent_is_refused_before_anything_is() -> None:
    wire = Wire()

    for strange in (object(), torch.eye(2).to_sparse(), {1: 2}, 2**70):
        with pytest.raises(PipelineFailed, match=r"transformer\.forward is given a"):
            wire.cross([torch.ones(3), strange])

    assert wire.packer.kept_bytes == 0
    assert wire.sent == []


def test_a_tensor_of_the_host_goes_in_the_message_of_a_group_of_accelerators() -> None:
    sent = packing.described(1, torch.arange(3), torch.device("meta"))

    assert sent.raw == torch.arange(3).numpy().tobytes()


def test_layers_of_adapters_arrive_with_their_weights() -> None:
    linear = Part(nn.Linear(6, 2, bias=False), nn.Linear(2, 4), 0.5, torch.float32)
    conv = Part(
        nn.Conv2d(3, 2, 3, stride=2, padding=1, bias=False), nn.Conv2d(2, 5, 1), 2.0, torch.bfloat16
    )
    dora = replace(linear, magnitude=torch.rand(4))
    kronecker = Kronecker(torch.randn(2, 3), torch.randn(5, 4), (2, 7))
    lokr = Part(kronecker, nn.Identity(), 1.0, torch.float32)
    parts = {"a": linear, "b": conv, "c": dora, "d": lokr}

    message = messages.to_follower(
        messages.encode(messages.Adapter("style", "transformer", packed(parts)))
    )
    assert isinstance(message, messages.Adapter)
    there = unpacked(message.parts, CPU)

    assert there.keys() == {"a", "b", "c", "d"}
    flat, deep, wide = torch.randn(2, 6), torch.randn(1, 3, 8, 8), torch.randn(2, 12)
    for name, x in {"a": flat, "b": deep, "c": flat, "d": wide}.items():
        mine = parts[name]
        assert torch.equal(there[name].up(there[name].down(x)), mine.up(mine.down(x)))
        assert (there[name].scaling, there[name].dtype) == (mine.scaling, mine.dtype)
    assert there["c"].magnitude is not None
    assert dora.magnitude is not None
    assert torch.equal(there["c"].magnitude, dora.magnitude)
    assert [name for name, part in there.items() if part.magnitude is None] == ["a", "b", "d"]
