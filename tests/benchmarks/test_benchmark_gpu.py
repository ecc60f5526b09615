"""The benchmark of a GPU, on a CPU: its models are the published ones, and its parts run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_build import operations, weightless
from benchmarks.gpu_models import MODELS
from benchmarks.gpu_report import Machine, Missing, Run, parsed

pytestmark = pytest.mark.filterwarnings(  # of libraries, at the tiny models' sizes
    "ignore::UserWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning"
)

TFLOP = {  # of one row; counted by others for the same configs
    ("flux", "512x512"): 21.50,
    ("flux", "1024x1024"): 74.38,
    ("qwen-image", "512x512"): 16.65,
    ("qwen-image", "1024x1024"): 70.58,
    ("z-image", "512x512"): 13.69,
    ("z-image", "1024x1024"): 56.58,
    ("sana", "512x512"): 0.84,
    ("sana", "1024x1024"): 2.97,
    ("sd35-medium", "512x512"): 2.44,
    ("sd35-medium", "1024x1024"): 11.25,
    ("sdxl", "512x512"): 1.59,
    ("sdxl", "1024x1024"): 6.76,
    ("wan", "832x480x81f"): 283.0,
}
VAE_MILLIONS = {"AutoencoderKL": 84, "AutoencoderKLQwenImage": 127, "AutoencoderDC": 312}


def run_benchmark(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", *flags])
    gpu.main()


def found_in(output: Path) -> list[Any]:
    return [parsed(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_the_published_one(name: str) -> None:
    model = MODELS[name]
    denoiser, vae = (
        sum(weight.numel() for weight in weightless(part).parameters())
        for part in (model.denoiser, model.vae)
    )

    assert round(denoiser / 1e9, 2) == model.billions
    assert round(vae / 1e6) == VAE_MILLIONS.get(model.vae[0], 127)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*one, marks=[] if one == ("z-image", "512x512") else pytest.mark.slow)
        for one in TFLOP
    ],
)
def test_a_forward_takes_the_operations_that_others_counted(name: str, size: str) -> None:
    sizes = {str(one): one for one in MODELS[name].sizes}

    assert operations(MODELS[name], sizes[size]) / 1e12 == pytest.approx(
        TFLOP[name, size], abs=0.005
    )


def test_every_part_of_a_model_is_measured_and_on_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "page.md"

    run_benchmark(monkeypatch, "--only", "flux", "--parts", "curve,eager,kernels,likeness",
                  "--output", str(output))  # fmt: skip

    _, *records = [one for one in found_in(output) if not isinstance(one, Missing)]
    assert [one.part for one in records] == [
        "curve 64x64",
        *(f"eager 64x64 {one.mode}" for one in records if isinstance(one, Run)),
        "likeness 64x64",
    ]
    alone, *_, together = [one for one in records if isinstance(one, Run)]
    assert (alone.mode, together.mode) == ("off", "continuous")
    assert alone.rows == 1 <= together.rows
    assert alone.forwards == sum((2, 3, 2, 3)) + 4  # a step each, and decoding
    assert min(alone.loop_us, alone.fiber_us, alone.per_s) > 0
    assert alone.p50_s <= alone.p99_s
    assert records[-1].worst_db > 60 > records[-1].others_db
    text = output.read_text()
    assert "a CPU, tiny models: a test" in text
    assert text.count("| FLUX.1-dev | 64x64 |") == len(records)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_no_part_of_any_model_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "page.md"

    run_benchmark(monkeypatch, "--only", name, "--output", str(output))

    missing = [one for one in found_in(output) if isinstance(one, Missing) and one.model != "all"]
    cannot = {"sana", "sd35-medium"}  # diffusers names no blocks of theirs to compile
    assert [one.part for one in missing] == (["compiled"] if name in cannot else [])


def test_without_time_nothing_is_begun_and_everything_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "page.md"

    run_benchmark(monkeypatch, "--only", "sdxl", "--budget-s", "0", "--output", str(output))

    machine, *missing = found_in(output)
    assert isinstance(machine, Machine)
    assert {type(one) for one in missing} == {Missing}
    assert {"curve 64x64", "eager 64x64 off", "likeness 64x64", "compiled"} <= {
        one.part for one in missing
    }


def test_a_mode_that_this_version_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "page.md"

    run_benchmark(monkeypatch, "--only", "sdxl", "--parts", "curve", "--modes", "off,psychic",
                  "--output", str(output))  # fmt: skip

    assert "| all | mode psychic | this carpool has " in output.read_text()


@pytest.mark.parametrize("flags", [["--only", "fluxx"], ["--parts", "curves"]])
def test_an_unknown_model_or_part_is_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_benchmark(monkeypatch, *flags)

    assert f"{flags[1]}: must be of " in capsys.readouterr().err
