"""`carpool plan`: what is counted without weights is what the real thing does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from carpool.errors import InvalidValue, LoadFailed
from carpool_lab.plan.command import plan as command
from carpool_lab.plan.predict import WIDTHS, device, forward_s, plan
from carpool_lab.plan.shapes import Stage, Work, build, known, stages
from carpool_lab.simulate.command import simulate
from support.engine_driver import fresh
from support.tiny import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("family", ["flux", "sdxl", "qwen_image"])
def test_a_plan_counts_the_weights_calls_and_flops_of_the_real_pipeline(family: str) -> None:
    model = build(str(checkpoint(family)), torch.float32)
    real: Any = fresh(family)
    real.set_progress_bar_config(disable=True)
    model.call["num_inference_steps"] = 3  # type: ignore[index]
    counted = stages(model, "64x64")
    flops = FlopCounterMode(display=False)
    with flops:
        real(prompt="a plan", width=64, height=64, num_inference_steps=3, output_type="pt")

    assert model.parameters() == {
        name: sum(weight.numel() for weight in module.parameters())
        for name, module in real.components.items()
        if isinstance(module, torch.nn.Module)
    }
    assert sum(one.calls for one in counted if one.phase == "denoise") == 3
    told = {str(op): n for op, n in flops.get_flop_counts()["Global"].items()}
    products = sum(n for op, n in told.items() if "attention" not in op)  # unknown on this CPU
    assert products == sum(
        one.calls * (one.work.flops - one.work.attention_flops) for one in counted
    )


def test_no_module_of_a_plan_has_weights_and_all_are_left_as_they_were() -> None:
    model = build(str(checkpoint("flux")))

    stages(model, "64x64")

    for module in model.modules.values():
        assert all(weight.is_meta for weight in module.parameters())
        assert not {"forward", "encode", "decode"} & vars(module).keys()
    assert type(model.pipe).__module__.startswith("diffusers")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "size", "component", "billions", "teraflops"),
    [
        ("FLUX.1-dev", "512x512", "transformer", 11.90, 21.50),
        ("FLUX.1-dev", "1024x1024", "transformer", 11.90, 74.38),
        ("SDXL", "1024x1024", "unet", 2.57, 13.52),
    ],
)
def test_real_sizes_are_those_that_others_counted(
    name: str, size: str, component: str, billions: float, teraflops: float
) -> None:
    model = build(name)
    [forward] = [one for one in stages(model, size) if one.component == component]

    assert model.parameters()[component] / 1e9 == pytest.approx(billions, abs=0.01)
    assert forward.work.flops / 1e12 == pytest.approx(teraflops, abs=0.01)


def square(n: int, count: int = 1) -> Work:
    work = Work(flops=2 * n**3 * count, operations=count)
    work.products[n, n, n] = count
    return work


def test_a_forward_takes_the_longest_of_computing_launching_and_streaming() -> None:
    on = device("h100")
    computed = forward_s(square(8192), 1, on)

    assert computed == pytest.approx(2 * 8192**3 / (0.8 * on.flops), rel=0.1)
    assert forward_s(square(16, count=1000), 1, on) == pytest.approx(7e-3)
    assert forward_s(square(16, count=1000), 1, on, is_compiled=True) < 7e-3
    assert forward_s(square(8192), 1, on, streamed_bytes=on.link) == pytest.approx(1.0)


def stage(work: Work) -> Stage:
    return Stage("transformer", "forward", 1, work, calls=10)


def test_what_fits_is_resident_and_streamed_weights_make_sharing_pay() -> None:
    work = square(4096)
    small = plan("a", 10, {"transformer": 10**9}, [stage(work)], device("rtx4090"))
    large = plan("a", 10, {"transformer": 40 * 10**9}, [stage(work)], device("rtx4090"))

    assert small.fits
    assert small.weights["transformer"] == 2e9
    assert not large.fits
    assert large.streamed["transformer"] == pytest.approx(80e9 - 22.5e9)
    assert large.knee == WIDTHS[-1]
    assert small.knee < large.knee


def test_quantized_weights_take_their_bits() -> None:
    halved = plan(
        "a",
        1,
        {"transformer": 10**10},
        [stage(square(64))],
        device("rtx4090"),
        bits={"transformer": 8},
    )

    assert halved.weights["transformer"] == 1e10
    assert halved.fits


def test_an_unknown_device_or_model_is_told_with_those_that_are_known() -> None:
    with pytest.raises(InvalidValue, match="device 'h20'; did you mean 'h200'"):
        device("h20")
    with pytest.raises(LoadFailed, match="did you mean 'Qwen-Image'"):
        build("Qwen-Imag")
    assert {"FLUX.1-dev", "Qwen-Image", "SDXL"} <= known().keys()


def test_the_report_names_the_command_line_and_the_simulator_reads_the_curve(
    tmp_path: Path,
) -> None:
    arguments = [str(checkpoint("flux")), "--on", "rtx4090,h200", "--sizes", "64x64"]

    told = CliRunner().invoke(command, arguments, catch_exceptions=False)
    data = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)

    assert "rtx4090 64x64: carpool serve flux --max-batch-size" in told.output
    file = tmp_path / "plan.json"
    file.write_text(data.stdout)
    assert {one["device"] for one in json.loads(data.stdout)["plans"]} == {"rtx4090", "h200"}
    played = CliRunner().invoke(
        simulate, ["--table", str(file), "--num-prompts", "20"], catch_exceptions=False
    )
    assert played.exit_code == 0, played.output
