"""Streamed blocks: what they compute, what is loaded when, and what is left afterwards."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.groups import blocks_of
from carpool.engine.weights.residency import Component, plan
from carpool.engine.weights.streaming import Streamer
from carpool.errors import LoadFailed
from support.engine_driver import VirtualClock
from support.streamed import CPU, Profile, Tower, VirtualBus, streamed

X = torch.linspace(-1, 1, 128).reshape(2, 64)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_no_more_than_two_blocks_are_there_at_once(tmp_path: Path) -> None:
    model, loaded = Tower(blocks=6), []
    streamer = streamed(model, tmp_path)
    for block in model.blocks:
        block.on_forward = lambda x: loaded.append(
            sum(not bool(one.linear.weight.isnan().any()) for one in model.blocks)
        )

    model(X)

    assert loaded == [1] * 6
    assert streamer.statistics()["slot_bytes"] == 2 * max(g.n_bytes for g in streamer.groups)
    streamer.remove()


def test_afterwards_the_module_is_as_it_was(tmp_path: Path) -> None:
    model = Tower()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(part.__dict__) for part in model.modules()]
    streamer = streamed(model, tmp_path)
    model(X)

    streamer.remove()

    assert dict.fromkeys(before, True) == {
        name: torch.equal(value, before[name]) for name, value in model.state_dict().items()
    }
    assert [set(part.__dict__) for part in model.modules()] == attributes
    assert not [one for one in threading.enumerate() if one.name.startswith("carpool-weights")]
    assert list(tmp_path.iterdir()) == []


def test_layouts_types_and_buffers_survive(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        count: Any
        short: Any
        flipped: Any
        conv: Any

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)
            self.conv.weight.data = self.conv.weight.to(memory_format=torch.channels_last)
            self.short = nn.Parameter(torch.randn(7).to(torch.bfloat16), requires_grad=False)
            self.register_buffer("count", torch.arange(5))
            self.flipped = nn.Parameter(torch.randn(3, 5).T, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            assert self.conv.weight.is_contiguous(memory_format=torch.channels_last)
            total = self.short.float().sum() + self.count.sum() + self.flipped[0].sum()
            return self.conv(x).mean() + total  # type: ignore[no-any-return]

    model: Any = nn.Module()
    model.blocks = nn.ModuleList(Mixed().requires_grad_(False) for _ in range(3))
    x = torch.randn(1, 4, 8, 8)
    expected = [block(x) for block in model.blocks]
    streamer = streamed(model, tmp_path)

    assert [block(x) for block in model.blocks] == expected
    streamer.remove()


def test_a_weight_that_two_blocks_share_stays_on_the_device() -> None:
    model = Tower()
    model.blocks[1].linear.weight = model.blocks[2].linear.weight

    assert list(blocks_of(model)) == ["blocks.0", "blocks.3"]


def test_weights_that_are_used_outside_of_their_block_are_found_and_right(tmp_path: Path) -> None:
    class Reads(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.blocks[2].linear.weight  # type: ignore

    expected, model = Reads()(X), Reads()
    streamer = streamed(model, tmp_path)

    with streamer.watching("tower"):
        answer = model(X)

    assert torch.equal(answer, expected)
    assert streamer.pins == 1
    assert torch.equal(model(X), expected)
    streamer.remove()


FLUX = [(340 * 256, 1.0)] * 19 + [(141 * 256, 1.0)] * 38  # bytes and seconds of its blocks
EVEN = [(200 * 256, 1.0)] * 40


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])  # copying, of computing
@pytest.mark.parametrize("kept", [0.2, 0.7])  # of the weights, on the device
@pytest.mark.parametrize("blocks", [FLUX, EVEN], ids=["flux", "even"])
def test_a_sweep_takes_as_long_as_the_longer_of_copying_and_computing(
    tmp_path: Path, blocks: list[tuple[int, float]], kept: float, share: float
) -> None:
    sizes = [n for n, _ in blocks]
    budget = int(kept * sum(sizes)) + 2 * max(sizes)
    chosen = plan([Component("t", 0, tuple(sizes), True)], "auto", budget).streamed["t"]
    compute_s = sum(seconds for _, seconds in blocks)
    speed = sum(sizes[i] for i in chosen) / (share * compute_s)
    clock = VirtualClock()
    model, bus = Profile(clock, blocks), VirtualBus(tmp_path, clock, speed)
    paths = [path for i, path in enumerate(blocks_of(model)) if i in chosen]
    streamer = Streamer({"t": model}, {"t": paths}, CPU, bus)

    def steps(count: int) -> float:
        began_s = clock()
        for _ in range(count):
            assert model(X).isfinite().all()
            clock.pass_by(0.05 * compute_s)  # fibers run
        return (clock() - began_s) / count

    steps(2)
    bound_s = max(1.05, share) * compute_s

    assert steps(5) <= bound_s / 0.9
    streamer.remove()


def test_groups_of_the_next_sweep_are_on_their_way_while_fibers_run(tmp_path: Path) -> None:
    clock = VirtualClock()
    model = Profile(clock, [(65536, 1.0)] * 8)
    streamer = streamed(model, tmp_path, VirtualBus(tmp_path, clock, 65536 / 2.0))
    for _ in range(3):
        model(X)
        clock.pass_by(4.0)  # as long as two copies
    began_s = clock()

    model(X)

    assert clock() - began_s == 1.0 + 6 * 2.0 + 1.0  # of eight copies six are seen
    streamer.remove()


def test_an_encoder_is_followed_by_the_denoiser_and_that_mostly_by_itself(tmp_path: Path) -> None:
    clock = VirtualClock()
    encoder = Profile(clock, [(65536, 1.0)] * 4)
    denoiser = Profile(clock, [(65536, 1.0)] * 8)
    bus = VirtualBus(tmp_path, clock, 65536 / 1.0)
    modules = {"text_encoder": encoder, "transformer": denoiser}
    streamer = Streamer(modules, {n: list(blocks_of(m)) for n, m in modules.items()}, CPU, bus)

    def request(steps: int) -> float:
        began_s = clock()
        encoder(X)
        for _ in range(steps):
            denoiser(X)
        return clock() - began_s

    request(4)
    took_s = request(4)

    # only an encoder's first copy is waited for, and the one that it came behind
    assert took_s <= 2.0 + 4 + 4 * 8
    streamer.remove()


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"free, and weights of 9.31e.04GiB are to be streamed"):
        DiskStore(tmp_path, 10**14)


def test_a_list_of_lists_is_not_taken_for_blocks() -> None:
    model = nn.Module()
    model.rows = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))

    assert blocks_of(model) == {}


def test_a_module_with_a_gap_in_a_list_has_no_blocks() -> None:
    model: Any = nn.Module()
    model.rows = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.rows._modules["1"] = None  # as some of diffusers' UNets have

    assert blocks_of(model) == {}


def test_a_pipeline_that_is_offloaded_already_is_refused(tmp_path: Path) -> None:
    from diffusers.hooks import apply_group_offloading

    from carpool.config import EngineSettings
    from carpool.engine.weights.placement import place

    model = Tower()
    apply_group_offloading(model, onload_device=CPU, num_blocks_per_group=1)
    settings = EngineSettings(stream="transformer", stream_dir=str(tmp_path))

    with pytest.raises(LoadFailed, match="transformer is offloaded already"):
        place({"transformer": model}, CPU, settings, None)
