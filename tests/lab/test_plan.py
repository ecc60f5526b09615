"""`carpool plan`: what is counted without weights is what the real thing does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from carpool.engine.weights.placement import components_of
from carpool.engine.weights.residency import plan as residency
from carpool.errors import InvalidValue, LoadFailed, SettingRejected
from carpool.settings.rules import parse_bytes
from carpool_lab.plan.advice import bits_of, commands
from carpool_lab.plan.command import plan as command
from carpool_lab.plan.names import known
from carpool_lab.plan.predict import RESERVED_BYTES, WIDTHS, device, forward_s, plan
from carpool_lab.plan.shapes import build, stages
from carpool_lab.plan.work import CallGroup, Work, work_of
from carpool_lab.simulate.command import simulate
from support.engine_driver import fresh
from support.modular import arguments, modular
from support.tiny import ARGUMENTS, checkpoint

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


@pytest.mark.parametrize("family", ["sd15", "flux2_klein", "ltx2", "ernie", "hunyuan_i2v", "sana"])
def test_pipelines_run_on_shapes_alone_whatever_they_take_of_their_modules(family: str) -> None:
    model = build(str(checkpoint(family)))
    model.call.update({**ARGUMENTS[family], "num_inference_steps": 2})  # type: ignore[attr-defined]

    work = stages(model)

    assert {"encode", "denoise", "decode"} <= {one.phase for one in work}
    assert all(one.work.flops > 0 for one in work if one.phase == "denoise")
    assert model.parameters()["transformer" if "transformer" in model.modules else "unet"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "Flux2KleinBaseModularPipeline",
        "StableDiffusionXLModularPipeline",
        pytest.param("QwenImageModularPipeline", marks=pytest.mark.slow),
        pytest.param("FluxKontextModularPipeline", marks=pytest.mark.slow),
        pytest.param("WanImage2VideoModularPipeline", marks=pytest.mark.slow),
        pytest.param("AnimaModularPipeline", marks=pytest.mark.slow),
        pytest.param("ZImageModularPipeline", marks=pytest.mark.slow),
    ],
)
def test_modular_pipelines_are_planned_of_their_configs_alone(name: str, tmp_path: Path) -> None:
    real: Any = modular(name)
    real.save_pretrained(str(tmp_path / "model"))
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    model = build(str(tmp_path / "model"))
    model.call.update({**arguments(real), "num_inference_steps": 3})  # type: ignore[attr-defined]

    work = stages(model)

    assert model.parameters() == {
        part: sum(weight.numel() for weight in module.parameters())
        for part, module in real.components.items()
        if isinstance(module, torch.nn.Module)
    }
    assert {"encode", "denoise", "decode"} <= {one.phase for one in work}
    denoiser = [one for one in work if one.component in ("transformer", "unet")]
    assert sum(one.calls for one in denoiser) in (3, 6)  # guidance by two calls, for some


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--help"], ["plan", "FLUX.1-dev", "--on", "rtx4091"], ["plan", "nosuch"],
        ["plan", "org/nosuch"], ["plan", "FLUX.1-dev", "--sizes", "3y4"],
        ["plan", "FLUX.1-dev", "--quantize", "int9"], ["check", "nosuch"], ["models", "nosuch"],
    ],
)  # fmt: skip
def test_what_is_asked_is_checked_before_torch_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from carpool.cli.main import main; sys.modules['torch'] = None;"
        f"sys.argv = ['carpool', *{arguments}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode == 0) == ("--help" in arguments)
    assert "torch" not in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_planned_is_told_in_a_line(tmp_path: Path) -> None:
    model = build(str(checkpoint("flux")))
    model.call["num_inference_steps"] = "many"  # type: ignore[index]

    with pytest.raises(LoadFailed, match="flux cannot be run on shapes alone: TypeError"):
        stages(model)
    with pytest.raises(InvalidValue, match="size 'large': write WIDTHxHEIGHT"):
        stages(model, "large")
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    with pytest.raises(LoadFailed, match="diffusers has no pipeline 'NoSuchPipeline'"):
        build(str(tmp_path))


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
        ("Z-Image-Turbo", "512x512", "transformer", 6.15, 13.69),
        ("Z-Image-Turbo", "1024x1024", "transformer", 6.15, 56.58),
        ("SD3.5-medium", "512x512", "transformer", 2.24, 2 * 2.445),
        ("SD3.5-medium", "1024x1024", "transformer", 2.24, 2 * 11.25),
        ("SANA-1.5-1.6B", "1024x1024", "transformer", 1.60, 2 * 2.965),
    ],
)
def test_real_sizes_are_those_that_others_counted(
    name: str, size: str, component: str, billions: float, teraflops: float
) -> None:
    model = build(name)
    [forward] = [one for one in stages(model, size) if one.component == component]

    assert model.parameters()[component] / 1e9 == pytest.approx(billions, abs=0.01)
    assert forward.work.flops / 1e12 == pytest.approx(teraflops, abs=0.01)


class Chain(torch.nn.Module):
    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, *given: Any) -> Any:
        x, *rest = given
        for block in self.blocks:
            x = block(x, *rest)
        return x


class Block(torch.nn.Sequential):
    runs = 0

    def forward(self, x: Any, seen: Any = None) -> Any:
        self.runs += 1
        return torch.nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]


def test_equal_blocks_run_once_and_count_each_but_not_those_that_may_write_to_a_list() -> None:
    with torch.device("meta"):
        x = torch.empty(5, 8)
        every, equal, listing = (
            [Block(torch.nn.Linear(8, w), torch.nn.Linear(w, 8)) for w in (4, 4, 32, 4)]
            for _ in range(3)
        )
    answer, work = work_of(Chain(torch.nn.ModuleList(equal)).forward, (x,), {})
    _, expected = work_of(Chain(every).forward, (x,), {})
    work_of(Chain(torch.nn.ModuleList(listing)).forward, (x, []), {})

    assert answer.shape == x.shape
    assert work == expected
    assert [block.runs for block in equal] == [1, 0, 1, 0]
    assert [block.runs for block in listing] == [1, 1, 1, 1]


def square(n: int, count: int = 1) -> Work:
    work = Work(operations=count)
    work.products[n, n, n] = count
    return work


def test_a_forward_takes_the_longest_of_computing_launching_and_streaming() -> None:
    on = device("h100")
    computed = forward_s(square(8192), 1, on)

    assert computed == pytest.approx(2 * 8192**3 / (0.8 * on.flops), rel=0.1)
    assert forward_s(square(16, count=1000), 1, on) == pytest.approx(7e-3)
    assert forward_s(square(16, count=1000), 1, on, is_compiled=True) < 7e-3
    assert forward_s(square(8192), 1, on, streamed_bytes=on.link) == pytest.approx(1.0)


def stage(work: Work) -> CallGroup:
    return CallGroup("transformer", "forward", 1, work, calls=10)


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
        "a", 1, {"transformer": 10**10}, [stage(square(64))], device("rtx4090"),
        bits={"transformer": 8},
    )  # fmt: skip

    assert halved.weights["transformer"] == 1e10
    assert halved.fits


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_what_is_proposed_for_a_model_that_does_not_fit_is_accepted_by_the_engine(
    quantize: str | None,
) -> None:
    """By the engine's own rules: the settings, and the residency plan of its blocks."""
    model = build(str(checkpoint("flux")))
    work = [one for one in stages(model, "64x64") if one.phase == "denoise"]
    for one in work:
        one.work.peak_bytes = 0
    given = "a", 1, model.parameters(), work
    bits = bits_of(quantize, model)
    taken = sum(plan(*given, device("h200"), bits=bits).weights.values())
    room = RESERVED_BYTES + 0.9 * taken
    planned = plan(*given, replace(device("rtx4090"), memory_bytes=room), bits=bits)
    found = list(commands(model, planned, quantize, is_compiled=True))

    assert not planned.fits
    if quantize == "fp8":  # whose denoiser fits no better streamed
        assert "cannot be streamed: --quantize transformer=int8" in found[0]
        return
    said = found[0].partition("#")[0].split()
    assert "--compile" not in said  # of a streamed denoiser it would be refused
    memory = said[said.index("--memory") + 1]
    budget = parse_bytes("memory", memory)
    assert 0 < budget <= 0.9 * taken
    assert said[-2:] == (["--quantize", quantize] if quantize else ["--memory", memory])
    if quantize is None:
        assert residency(components_of(model.modules), "auto", budget).streamed


def test_what_quantizers_leave_as_it_is_keeps_its_sixteen_bits() -> None:
    model = build(str(checkpoint("sdxl")))
    unet = model.modules["unet"]
    linear = sum(m.weight.numel() for m in unet.modules() if isinstance(m, torch.nn.Linear))
    every = model.parameters()["unet"]

    bits = bits_of("nf4", model)

    assert set(bits) == {"unet"}
    assert bits["unet"] * every == pytest.approx(4 * linear + 16 * (every - linear))
    assert 4 < bits["unet"] < 16  # convolutions stay
    assert bits_of('{"unet": {"quant_backend": "quanto"}}', model)["unet"] < 16


@pytest.mark.parametrize(
    ("quantize", "told"),
    [
        ("vae=fp8", "only denoisers can store weights as float8"),
        ("transformer=int8", "the model has no component 'transformer'"),
        ("int9", "'int9' is unknown; did you mean 'int8'"),
    ],
)
def test_what_the_engine_refuses_to_quantize_is_not_planned(quantize: str, told: str) -> None:
    with pytest.raises(SettingRejected, match=told):
        bits_of(quantize, build(str(checkpoint("sdxl"))))


def test_what_does_not_fit_even_streamed_is_said_with_the_least() -> None:
    model = build(str(checkpoint("flux")))
    work = [stage(square(64))]
    tiny = replace(device("rtx4090"), memory_bytes=RESERVED_BYTES + 1000)
    planned = plan("a", 1, model.parameters(), work, tiny)

    assert "not even streamed" in next(commands(model, planned, None, is_compiled=False))


def test_an_unknown_device_or_model_is_told_with_those_that_are_known() -> None:
    with pytest.raises(InvalidValue, match="device 'h20'; did you mean 'h200'"):
        device("h20")
    with pytest.raises(LoadFailed, match="did you mean 'Qwen-Image'"):
        build("Qwen-Imag")
    assert {"FLUX.1-dev", "Qwen-Image", "SDXL"} <= known().keys()


def test_the_command_names_every_model_that_it_knows() -> None:
    told = " ".join((command.help or "").split())

    assert all(f"{name}," in told or f"{name})" in told for name in known())


def test_a_model_is_known_by_its_hub_id_which_can_be_served() -> None:
    assert build("stabilityai/stable-diffusion-xl-base-1.0").name == "SDXL"
    assert build("SDXL").model_id == "stabilityai/stable-diffusion-xl-base-1.0"


def test_the_report_names_the_command_line_and_the_simulator_reads_the_curve(
    tmp_path: Path,
) -> None:
    arguments = [str(checkpoint("flux")), "--on", "rtx4090,h200", "--sizes", "64x64"]

    told = CliRunner().invoke(command, arguments, catch_exceptions=False)
    data = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)

    folder = checkpoint("flux")
    lines = told.output.splitlines()
    assert lines[2] == "rtx4090, 64x64: fits"
    assert lines[3].startswith(f"  carpool serve {folder} --max-batch-size")
    assert "Predicted" in told.output
    file = tmp_path / "plan.json"
    file.write_text(data.stdout)
    assert {one["device"] for one in json.loads(data.stdout)["plans"]} == {"rtx4090", "h200"}
    played = CliRunner().invoke(
        simulate, ["--table", str(file), "--num-prompts", "20"], catch_exceptions=False
    )
    assert played.exit_code == 0, played.output


@pytest.mark.parametrize(
    ("model", "billions", "steps"),
    [("tencent/Hunyuan3D-2", 1.1, 50), ("Hunyuan3D-2-turbo", 1.1, 5),
     ("tencent/Hunyuan3D-2mini", 0.6, 50), ("Hunyuan3D-2mini-turbo", 0.6, 5)],
)  # fmt: skip
def test_shapes_are_planned_without_their_package_and_their_surface_counts(
    model: str, billions: float, steps: int
) -> None:
    shapes = build(model)
    calls = {(group.component, group.method): group for group in stages(shapes)}

    assert round(shapes.parameters()["model"] / 1e9, 1) == billions
    assert calls["model", "forward"].calls == steps
    assert (calls["vae", "geo_decoder"].calls, calls["vae", "geo_decoder"].phase) == (
        7134,
        "decode",
    )
    assert calls["vae", "geo_decoder"].work.flops > 0
    with pytest.raises(InvalidValue, match="have none: leave it out"):
        stages(shapes, "512x512")
