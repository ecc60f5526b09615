"""Forwards of any keys, sizes and widths that share a sweep over streamed weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.engine.adapters.hooks import Adapters
from carpool.engine.fiber import in_fiber
from carpool.engine.observe.stats import LoopProgress
from carpool.engine.sweep import Sweeps, free_last
from carpool.engine.weights.streaming import Streamer
from carpool.errors import Cancelled, PipelineFailed, TooLate
from support import engine_driver
from support.lora_files import adapter, dora, weights, write
from support.streamed import CPU, OneEach, Tower, VirtualBus, on_a_slow_bus, streamed
from support.tiny import ARGUMENTS

SIZES = (32, 48, 64)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


Make = Callable[[Tower, engine_driver.VirtualClock, float], Sweeps]


@pytest.fixture
def sweeps_over(tmp_path: Path) -> Iterator[Make]:
    """Makes sweeps over a model whose blocks are loaded at so many bytes a virtual second."""
    made: list[Streamer] = []

    def make(model: Tower, clock: engine_driver.VirtualClock, bytes_per_s: float) -> Sweeps:
        made.append(streamed(model, tmp_path, VirtualBus(tmp_path, clock, bytes_per_s)))
        return Sweeps(made[-1], Adapters(object(), CPU), clock)

    yield make
    for one in made:
        one.remove()


def sent(drive: engine_driver.Drive, seed: int, **parameters: Any) -> engine_driver.Recorder:
    side = SIZES[seed % 3]
    given = {**ARGUMENTS["flux"], "width": side, "height": side, **parameters}
    return drive.submit("a cat", seed=seed, **given)


# The driver


def test_each_block_is_loaded_once_for_all_forwards(sweeps_over: Make) -> None:
    model, clock = Tower(blocks=5), engine_driver.VirtualClock()
    inputs = [torch.randn(rows, 64) for rows in (1, 2, 7)]
    expected = [Tower(blocks=5)(x) for x in inputs]
    sweeps = sweeps_over(model, clock, 1e9)

    answers = sweeps.run([lambda x=x: model(x) for x in inputs])  # type: ignore

    assert all(map(torch.equal, answers, expected))
    assert sweeps.statistics()["loads"] == 5 + 2  # two are on their way for the next sweep
    sweeps.run([lambda x=x: model(x) for x in inputs])  # type: ignore
    assert sweeps.statistics()["loads"] == 5 + 5 + 2


@pytest.mark.parametrize("compute_s", [0.05, 0.34, 2.0], ids=["stream", "even", "compute"])
def test_a_sweep_takes_little_more_than_the_longer_of_copying_and_computing(
    sweeps_over: Make, compute_s: float
) -> None:
    blocks, clock = 12, engine_driver.VirtualClock()
    model = Tower(blocks)
    for block in model.blocks:
        block.on_forward = lambda x: clock.pass_by(compute_s)
    sweeps = sweeps_over(model, clock, 64 * 64 * 4 + 256)  # a second a block
    forwards = [lambda rows=rows: model(torch.zeros(rows, 64)) for rows in (1, 2, 3)]

    for _ in range(10):
        sweeps.run(forwards)

    least_s = 10 * blocks * max(1.0, 3 * compute_s)
    assert least_s / clock() >= 0.9


def test_a_sweep_of_any_length_stalls_only_for_one_block_of_one_forward(sweeps_over: Make) -> None:
    model, clock, stalls = Tower(blocks=5), engine_driver.VirtualClock(), list[float]()
    heartbeat = LoopProgress(clock)
    sweeps = sweeps_over(model, clock, 1e9)
    sweeps._progressed = heartbeat.progressed

    def compute(_: Tensor) -> None:
        clock.pass_by(400.0)
        stalls.append(heartbeat.read()[0])

    for block in model.blocks:
        block.on_forward = compute
    heartbeat.beat(None)  # the first forward of its kind: ten timeouts until a kill
    sweeps.run([lambda: model(torch.zeros(1, 64))] * 3)

    assert len(stalls) == 15
    assert max(stalls) == pytest.approx(400.0, abs=1.0)
    assert heartbeat.read()[1] is None


FLUX, UNET = [36, 36, 15, 15, 15, 15], [10, 20, 40, 40, 20, 10] * 2
UNEQUAL = {  # sizes of blocks, and seconds that they compute; a size is copied in as many seconds
    "as FLUX, few": (FLUX, FLUX),
    "as a UNet": (UNET, UNET),
    # blocks with weights for pictures and weights for text compute less for each byte
    "a small FLUX": (FLUX, [24, 24, 21, 21, 21, 21]),
}


@pytest.mark.parametrize(("sizes", "computes"), UNEQUAL.values(), ids=UNEQUAL)
def test_blocks_of_unequal_sizes_are_copied_as_well_while_others_compute(
    sweeps_over: Make, sizes: list[int], computes: list[int]
) -> None:
    clock, model = engine_driver.VirtualClock(), Tower(len(sizes))
    for block, size, compute_s in zip(model.blocks, sizes, computes, strict=True):
        block.ballast = nn.Parameter(torch.zeros(size * 4096), requires_grad=False)
        block.on_forward = lambda x, s=compute_s: clock.pass_by(s)
    sweeps = sweeps_over(model, clock, 4096 * 4)
    sweeps.run([lambda: model(torch.zeros(1, 64))])
    began_s = clock()

    for _ in range(10):
        sweeps.run([lambda: model(torch.zeros(1, 64))])

    assert 10 * max(sum(sizes), sum(computes)) / (clock() - began_s) >= 0.9
    slot_bytes = sweeps.statistics()["slot_bytes"]
    assert slot_bytes <= 2.1 * 4 * 4096 * max(sizes)  # two buffers, as ever


def test_a_forward_that_fails_in_the_middle_does_not_stop_the_others(sweeps_over: Make) -> None:
    model, clock = Tower(), engine_driver.VirtualClock()
    good, bad = torch.ones(1, 64), torch.full((2, 64), 2.0)
    expected = Tower()(good)

    def refuse(x: Tensor) -> None:
        if len(x) == 2:
            raise ValueError("not this one")

    model.blocks[2].on_forward = refuse
    sweeps = sweeps_over(model, clock, 1e9)

    def caught() -> str:
        try:
            model(bad)
        except ValueError as error:
            return str(error)
        return ""

    assert torch.equal(sweeps.run([lambda: model(good)])[0], expected)
    three: list[Any] = [lambda: model(good), caught, lambda: model(good)]
    answers: list[Any] = sweeps.run(three)
    assert answers[1] == "not this one"
    assert torch.equal(answers[0], expected)
    assert torch.equal(answers[2], expected)
    with pytest.raises(ValueError, match="not this one"):
        sweeps.run([lambda: model(good), lambda: model(bad)])
    assert torch.equal(sweeps.run([lambda: model(good)])[0], expected)


def test_modes_of_one_forward_are_not_those_of_the_next(sweeps_over: Make) -> None:
    model, clock, seen = Tower(), engine_driver.VirtualClock(), []

    def note(x: Tensor) -> None:
        seen.append((len(x), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))

    model.blocks[3].on_forward = note
    sweeps = sweeps_over(model, clock, 1e9)

    def cast() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            return model(torch.zeros(2, 64))  # type: ignore[no-any-return]

    sweeps.run([cast, lambda: model(torch.zeros(1, 64))])

    assert sorted(seen) == [(1, False, False), (2, True, True)]
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_grad_enabled()


def test_who_waits_for_the_others_goes_on_when_they_have_ended(sweeps_over: Make) -> None:
    model, clock, order = Tower(), engine_driver.VirtualClock(), []
    sweeps = sweeps_over(model, clock, 1e9)

    def waits() -> None:
        assert not in_fiber()  # nothing is intercepted here
        free_last(lambda: None)
        order.append("waited")

    def walks() -> None:
        model(torch.zeros(1, 64))
        order.append("walked")

    sweeps.run([waits, walks])

    assert order == ["walked", "waited"]
    free_last(lambda: None)  # outside of a sweep there is nobody to wait for


# The engine


def test_eight_requests_of_three_sizes_move_a_seventh_of_the_bytes(tmp_path: Path) -> None:
    steps = 12
    with engine_driver.driving("flux", stream="transformer", stream_dir=str(tmp_path)) as drive:
        on_a_slow_bus(drive)
        bus = drive.engine.loaded.streamer.bus  # type: ignore[union-attr]
        alone = sent(drive, 0, num_inference_steps=steps)
        drive.finish()
        alone_bytes = bus.moved_bytes / steps
        before = bus.moved_bytes

        together = [sent(drive, seed, num_inference_steps=steps) for seed in range(8)]
        drive.finish()

        each_bytes = (bus.moved_bytes - before) / (8 * steps)
    assert alone.error is None
    assert each_bytes <= alone_bytes / 7
    for seed, one in enumerate(together):
        side = SIZES[seed % 3]
        plain = engine_driver.solo(
            "flux", "a cat", seed=seed, num_inference_steps=steps, width=side, height=side
        )
        assert engine_driver.gap(one.image, plain) < engine_driver.CLOSE


@pytest.mark.parametrize("policy", [engine_driver.InLine(32), OneEach(32)], ids=["wide", "narrow"])
def test_exact_numerics_give_the_bits_of_resident_weights(tmp_path: Path, policy: Any) -> None:
    def images(**settings: Any) -> list[Tensor]:
        with engine_driver.driving("flux", numerics="exact", **settings) as drive:
            if settings:
                on_a_slow_bus(drive, policy)
            heard = [sent(drive, seed, num_inference_steps=8 + seed) for seed in range(6)]
            drive.finish()
            if settings:
                counts = drive.engine.statistics()["streaming"]
                assert counts["forwards"] > counts["sweeps"]
            return [one.image for one in heard]

    resident = images()

    assert all(map(torch.equal, images(stream="transformer", stream_dir=str(tmp_path)), resident))


def test_requests_with_other_adapters_and_sizes_share_a_sweep(tmp_path: Path) -> None:
    needs_weights = dora(weights("flux", 1, std=0.1), "flux", "transformer")
    files = {
        "a": adapter(tmp_path, "flux", 0),
        "b": write(tmp_path / "b.safetensors", needs_weights),
    }
    loras = [None, [{"id": "a"}], [{"id": "b", "scale": 0.5}]]

    def images(together: bool, **settings: Any) -> list[Tensor]:
        found = []
        with engine_driver.driving("flux", **settings) as drive:
            for name, file in files.items():
                drive.engine.add_lora(name, file)
            if settings:
                on_a_slow_bus(drive, OneEach(32))
            for seed in range(6):
                found.append(sent(drive, seed, lora=loras[seed // 2], num_inference_steps=4))
                if not together:
                    drive.finish()
            drive.finish()
        return [one.image for one in found]

    alone = images(together=False)
    shared = images(together=True, stream="transformer", stream_dir=str(tmp_path))

    assert max(map(engine_driver.gap, alone, shared)) < engine_driver.CLOSE
    assert engine_driver.gap(alone[0], alone[3]) > 100 * engine_driver.CLOSE  # the adapters show


def test_a_request_that_fails_in_the_middle_of_a_sweep_fails_alone(tmp_path: Path) -> None:
    pipe = engine_driver.fresh("flux")
    block = pipe.transformer.single_transformer_blocks[0]
    tokens = (SIZES[1] // 4) ** 2

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        states = kwargs.get("hidden_states", args[0] if args else None)
        if states.shape[1] == tokens:
            raise ValueError("not this one")

    block.register_forward_pre_hook(refuse, with_kwargs=True)
    with engine_driver.driving(pipe, stream="transformer", stream_dir=str(tmp_path)) as drive:
        on_a_slow_bus(drive)
        warm = sent(drive, 0, num_inference_steps=2)
        drive.finish()
        heard = [sent(drive, seed, num_inference_steps=4) for seed in range(3)]
        drive.finish()

    assert warm.error is None
    assert isinstance(heard[1].error, PipelineFailed)
    for seed in (0, 2):
        side = SIZES[seed]
        plain = engine_driver.solo(
            "flux", "a cat", seed=seed, num_inference_steps=4, width=side, height=side
        )
        assert engine_driver.gap(heard[seed].image, plain) < engine_driver.CLOSE


@pytest.mark.parametrize("late", [None, TooLate("its deadline has passed")], ids=["cancel", "late"])
def test_who_leaves_in_the_middle_of_a_sweep_ends_after_it_and_who_comes_joins_the_next(
    late: Any, tmp_path: Path
) -> None:
    pipe, heard = engine_driver.fresh("flux"), list[engine_driver.Recorder]()
    block, seen = pipe.transformer.single_transformer_blocks[0], list[int]()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["hidden_states"].shape[1])
        if len(seen) == 3:  # the second forward of the first sweep after the warm-up
            drive.engine.cancel("leaves", late)
            heard.append(sent(drive, 2, num_inference_steps=3))

    with engine_driver.driving(pipe, stream="transformer", stream_dir=str(tmp_path)) as drive:
        on_a_slow_bus(drive)
        warm = sent(drive, 0, num_inference_steps=2)
        drive.finish()
        seen.clear()
        block.register_forward_pre_hook(look, with_kwargs=True)
        heard += [
            sent(drive, 0, num_inference_steps=3),
            sent(drive, 1, num_inference_steps=3, request_id="leaves"),
        ]
        drive.finish()
        counts = drive.engine.statistics()["streaming"]

    stays, leaves, comes = heard
    assert warm.error is None
    assert isinstance(leaves.error, TooLate if late else Cancelled)
    for seed, one in ((0, stays), (2, comes)):
        side = SIZES[seed]
        plain = engine_driver.solo(
            "flux", "a cat", seed=seed, num_inference_steps=3, width=side, height=side
        )
        assert engine_driver.gap(one.image, plain) < engine_driver.CLOSE
    assert seen.count((SIZES[1] // 4) ** 2) < 3  # it stopped
    assert counts["forwards"] > counts["sweeps"]  # who came shared them


def test_a_forward_that_runs_out_of_memory_is_cut_when_the_others_have_ended(
    tmp_path: Path,
) -> None:
    pipe, widths = engine_driver.fresh("flux"), []
    block = pipe.transformer.single_transformer_blocks[0]

    def fill(module: Any, args: Any, kwargs: Any) -> None:
        states = kwargs.get("hidden_states", args[0] if args else None)
        widths.append((len(states), states.shape[1]))
        if len(states) > 1 and states.shape[1] == (SIZES[0] // 4) ** 2:
            raise torch.OutOfMemoryError("no room for two")

    with engine_driver.driving(pipe, stream="transformer", stream_dir=str(tmp_path)) as drive:
        on_a_slow_bus(drive)
        sent(drive, 1, num_inference_steps=1)
        drive.finish()
        # only now: hooks of a user's own would have its table proven first
        block.register_forward_pre_hook(fill, with_kwargs=True)
        heard = [sent(drive, seed, num_inference_steps=1) for seed in (0, 1, 3)]
        drive.finish()

    assert [one.error for one in heard] == [None] * 3
    assert [rows for rows, _ in widths] == [2, 1, 1, 1]
    assert widths[1][1] == (SIZES[1] // 4) ** 2  # the other size ended before the second try
