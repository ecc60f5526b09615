"""Pipelines that no table was written for: how their denoisers fuse is inferred, and proven."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from support.engine_driver import Drive, driving, fresh, gap
from support.matrix.case import IMAGE, VIDEO
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # diffusers' Euler with numpy 2
    "ignore:.*:FutureWarning",
    "ignore:.*:UserWarning",
)

REQUESTS: tuple[dict[str, Any], ...] = (  # prompts of one length: some models do not pad them
    {"prompt": "a cat", "seed": 1, "num_inference_steps": 8, "negative_prompt": "bad"},
    {"prompt": "a dog", "seed": 2, "num_inference_steps": 9, "negative_prompt": "red"},
    {"prompt": "a cat", "seed": 3, "num_inference_steps": 7, "negative_prompt": "bad"},
    {"prompt": "a dog", "seed": 4, "num_inference_steps": 8, "negative_prompt": "sea"},
    {
        "prompt": "a cat",
        "seed": 5,
        "num_inference_steps": 6,
        "guidance_scale": 1.0,
        "negative_prompt": "bad",
    },
)
FIELDS = ("images", "frames", "audios")

FUSE = {  # its denoiser, how far an answer may be off, whether it is part of `make test`
    "pixart": ("transformer", IMAGE, True),
    "chroma": ("transformer", IMAGE, True),
    "cogview3": ("transformer", IMAGE, False),
    "cogview4": ("transformer", IMAGE, False),
    "bria": ("transformer", IMAGE, True),
    "kandinsky3": ("unet", 5e-5, False),  # last bits of one forward grow to 2.6e-5
    "ovis": ("transformer", IMAGE, False),
    "ltx": ("transformer", VIDEO, False),
    "cogvideox": ("transformer", VIDEO, False),
    "mochi": ("transformer", VIDEO, False),
    "latte": ("transformer", VIDEO, False),
    "stable_audio": ("transformer", VIDEO, False),
}
ALONE = {"lumina2": ("transformer", IMAGE)}  # of which bits do not agree: see docs/numerics.md


def requests_of(family: str) -> list[dict[str, Any]]:
    return [{**ARGUMENTS[family], **one} for one in REQUESTS]


def plain(family: str) -> DiffusionPipeline:
    pipe = fresh(family)
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
    return pipe


def alone(pipe: DiffusionPipeline, arguments: Mapping[str, Any]) -> torch.Tensor:
    given = dict(arguments)
    generator = torch.Generator().manual_seed(given.pop("seed"))
    output = pipe(**given, generator=generator)
    return whole(output)


def whole(output: Mapping[str, Any]) -> torch.Tensor:
    value = next(output[name] for name in FIELDS if name in output)
    return value if isinstance(value, torch.Tensor) else torch.stack(list(value))


def ride(family: str, drive: Drive) -> list[torch.Tensor]:
    """Three together, the others on the way; then once more, with all that was proven known."""
    first, second, third, *others = requests_of(family)
    heard = [drive.submit(**one) for one in (first, second, third)]
    drive.turn_until(lambda: heard[0].step >= 1)
    heard += [drive.submit(**one) for one in others]
    drive.finish()
    for recorder in heard:
        assert recorder.error is None
    return [whole(recorder.outcome.fields) for recorder in heard]


def fuses(drive: Drive, component: str) -> dict[str, str]:
    name = type(drive.engine.loaded.pipe.components[component]).__name__
    report = drive.engine._probation.report()
    return {one["fuses"]: one["why"] for one in report if one["call"].startswith(name)}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if fast else [pytest.mark.slow]) for f, (_, _, fast) in FUSE.items()],
)
def test_a_denoiser_without_a_table_fuses_once_it_has_proven_itself(family: str) -> None:
    component, tolerance, _ = FUSE[family]
    pipe = plain(family)
    expected = [alone(pipe, one) for one in requests_of(family)]

    with driving(fresh(family)) as drive:
        learning = ride(family, drive)
        drive.forwards.clear()
        proven = ride(family, drive)

    for ours in (learning, proven):
        for one, other in zip(ours, expected, strict=True):
            assert gap(one, other) < tolerance
    assert "proven" in fuses(drive, component)
    assert drive.widest(component) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ALONE)
def test_a_denoiser_whose_bits_do_not_agree_runs_alone(family: str) -> None:
    component, tolerance = ALONE[family]
    pipe = plain(family)
    expected = [alone(pipe, one) for one in requests_of(family)]

    with driving(fresh(family)) as drive:
        got = ride(family, drive)

    for one, other in zip(got, expected, strict=True):
        assert gap(one, other) < tolerance
    assert "alone" in fuses(drive, component)
    assert set(drive.widths(component)) == {1}


def test_inference_can_be_turned_off() -> None:
    with driving(fresh("pixart"), infer_specs=False) as drive:
        heard = [drive.submit(**one) for one in requests_of("pixart")[:3]]
        drive.turn_until(lambda: all(one.step >= 1 for one in heard))
        assert not any(one.is_done for one in heard)  # they go side by side
        drive.finish()

    assert set(drive.widths("transformer")) == {1}
    assert drive.widest("text_encoder") == 3  # T5, which has a table


def test_what_was_proven_is_counted_and_shown() -> None:
    with driving(fresh("pixart")) as drive:
        ride("pixart", drive)
        statistics = drive.engine.statistics()["fusing"]

    assert statistics["forwards"]["agreed"] >= 3
    assert statistics["kinds"]["proven"] == 1
