"""Any two settings of how a model is prepared: refused, or fused requests equal solos."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline

from carpool.errors import SettingRejected
from support.engine_driver import driving, gap
from support.prepared import alone, drawn, requests_of
from support.tiny import checkpoint

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation:DeprecationWarning",
        "ignore:.*Quant:FutureWarning",
        "ignore::UserWarning:torchao",
    )
]
CLOSE, HALF = 1e-4, 3e-2  # the most that sharing may change a value 0-1, float32 and bfloat16


def ways(family: str) -> dict[str, dict[str, Any]]:
    """Settings by name, each with one value; two of one setting are never paired."""
    denoiser, source = "unet" if family in ("sd15", "sdxl") else "transformer", checkpoint(family)
    return {
        "place": {"place": "vae=cpu"}, "place encoder": {"place": "text_encoder=cpu"},
        "tiles": {"vae_tiling": True}, "stream": {"stream": denoiser},
        "stream encoder": {"stream": "text_encoder"}, "memory": {"memory": "560KiB"},
        "int8": {"quantize": "int8"}, "fp8": {"quantize": "fp8"},
        "quanto": {"quantize": f"{denoiser}=quanto-int8,text_encoder=quanto-int8"},
        "compile": {"compile": True}, "vae": {"component": (f"vae={source}/vae",)},
        "denoiser": {"component": (f"{denoiser}={source}/{denoiser}",)},
        "types": {"dtype": f"float32,{denoiser}=bfloat16"},
        "vae type": {"dtype": "bfloat16,vae=float32"},
        "attention": {"attention_backend": "_native_math"}, "variant": {"variant": "fp16"},
        "warmup": {"warmup": "64x64"}, "exact": {"numerics": "exact"},
    }  # fmt: skip


def together(*some: Mapping[str, Any]) -> dict[str, Any] | None:
    """All of these settings; None where two are of one."""
    names = [name for one in some for name in one]
    if len(names) > len(set(names)):
        return None
    return {name: value for one in some for name, value in one.items()}


def check(family: str, settings: dict[str, Any], folder: Path) -> None:
    """Draw with these settings, together and alone.

    Raises:
        SettingRejected: they do not go together.
    """
    model = checkpoint(family)
    if "variant" in settings:
        model = folder / "variant"
        if not model.exists():
            DiffusionPipeline.from_pretrained(checkpoint(family)).save_pretrained(
                model, variant="fp16"
            )
    wanted = requests_of(family)[:3]
    with driving(model, max_running=8, stream_dir=str(folder), **settings) as drive:
        solos = [alone(drive.engine.loaded.pipe, one) for one in wanted]
        heard = [drive.submit(**one) for one in wanted]
        drive.finish()
    for one, solo in zip(heard, solos, strict=True):
        assert one.error is None, settings
        most = HALF if "dtype" in settings else CLOSE
        assert gap(drawn(one.outcome.fields), solo) <= most, settings


MANY: Iterable[tuple[str, tuple[str, ...]]] = [
    ("flux", ("place", "tiles", "int8", "denoiser", "vae type", "attention", "variant", "warmup")),
    ("flux", ("place encoder", "tiles", "stream", "quanto", "vae", "attention", "variant")),
    ("sdxl", ("place", "tiles", "fp8", "denoiser", "types", "variant", "warmup")),
]


@pytest.mark.parametrize(("family", "names"), MANY)
def test_many_settings_at_once_give_what_requests_get_alone(
    family: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    known = ways(family)
    settings = together(*(known[name] for name in names))

    assert settings is not None
    check(family, settings, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["flux", "sdxl", "qwen_image", "wan21_t2v", "sd15"])
def test_any_two_settings_are_refused_or_give_what_requests_get_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.model.compiling.COMPILER", "eager")  # traced all the same
    known, refused = ways(family), []
    for first, second in itertools.combinations(known, 2):
        settings = together(known[first], known[second])
        if settings is None:
            continue
        try:
            check(family, settings, tmp_path)
        except SettingRejected as error:
            refused.append((first, second, str(error)))

    assert {"stream", "fp8"} in [{first, second} for first, second, _ in refused]
    assert len(refused) < len(known) ** 2 / 4
    for first, second, told in refused:
        assert "leave" in told or "take" in told or "memory" in told, (first, second, told)
