"""Pipelines that no table was written for: how their denoisers fuse is inferred, and proven."""

from collections.abc import Mapping
from typing import Any

import diffusers
import pytest
import torch
from transformers import Gemma2Model

from carpool.engine.specs.infer import reads_caches
from support.engine_driver import Drive, called, driving, for_inference, fresh, gap
from support.matrix.case import IMAGE, VIDEO
from support.pictures import picture, png
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
WITHOUT_PROMPT: dict[str, tuple[dict[str, Any], ...]] = {
    "svd": tuple(
        {
            "prompt": None, "image": picture(png(32, 32, seed=seed)), "seed": seed,
            "num_inference_steps": n, **more,
        }
        for seed, n, more in (
            (1, 6, {}), (2, 7, {"motion_bucket_id": 90}), (3, 5, {"fps": 9}),
            (4, 6, {"noise_aug_strength": 0.1}), (5, 5, {"max_guidance_scale": 1.0}),
        )
    )
}  # fmt: skip
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
    "latte": ("transformer", VIDEO, False),
    "stable_audio": ("transformer", VIDEO, False),
    "sana_video": ("transformer", VIDEO, False),
    "animatediff": ("unet", VIDEO, True),
    "svd": ("unet", VIDEO, False),
}


def requests_of(family: str) -> list[dict[str, Any]]:
    requests = WITHOUT_PROMPT.get(family, REQUESTS)
    return [{**ARGUMENTS[family], **one} for one in requests]


def alone(pipe: diffusers.DiffusionPipeline, arguments: Mapping[str, Any]) -> torch.Tensor:
    given = {name: value for name, value in arguments.items() if (name, value) != ("prompt", None)}
    return whole(called(pipe, **given))


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
    report = drive.engine.runner.probation.report()
    return {one["fuses"]: one["why"] for one in report if one["call"].startswith(name)}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if fast else [pytest.mark.slow]) for f, (_, _, fast) in FUSE.items()],
)
def test_a_denoiser_without_a_table_fuses_once_it_has_proven_itself(family: str) -> None:
    component, tolerance, _ = FUSE[family]
    pipe = for_inference(fresh(family))
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
@pytest.mark.parametrize("family", ["animatediff", "sana_video", "svd"])
def test_where_frames_are_rows_exact_numerics_gives_the_bits_of_a_request_alone(
    family: str,
) -> None:
    component, _, _ = FUSE[family]
    solo = []
    with driving(fresh(family), numerics="exact") as drive:
        for one in requests_of(family):
            recorder = drive.submit(**one)
            drive.finish()
            solo.append(whole(recorder.outcome.fields))
        learning = ride(family, drive)
        drive.forwards.clear()
        proven = ride(family, drive)

    for got in (learning, proven):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, solo, strict=True))
    assert "proven" in fuses(drive, component)
    assert drive.widest(component) >= 2


class Untabled(diffusers.Lumina2Transformer2DModel):  # type: ignore[misc]
    """Places each row by the length of its text, which shapes do not tell."""


@pytest.mark.slow
def test_a_denoiser_that_decides_by_the_values_of_its_rows_runs_alone() -> None:
    expected = [alone(for_inference(fresh("lumina2")), one) for one in requests_of("lumina2")]
    pipe = fresh("lumina2")
    pipe.transformer.__class__ = Untabled

    with driving(pipe) as drive:
        got = ride("lumina2", drive)

    for one, other in zip(got, expected, strict=True):
        assert gap(one, other) < IMAGE
    assert "alone" in fuses(drive, "transformer")
    assert set(drive.widths("transformer")) == {1}


@pytest.mark.parametrize(
    ("family", "numerics"),
    [
        ("lumina2", "fast"),
        ("lumina2", "exact"),
        pytest.param("mochi", "fast", marks=pytest.mark.slow),
        pytest.param("mochi", "exact", marks=pytest.mark.slow),
        pytest.param("cogvideox", "fast", marks=pytest.mark.slow),
        pytest.param("cogvideox", "exact", marks=pytest.mark.slow),
    ],
)
def test_a_denoiser_that_reads_a_mask_fuses_by_its_table_whatever_the_lengths_of_its_texts(
    family: str, numerics: str
) -> None:
    words = ("a cat", "a very small red dog by the sea", "a dog", "a cat", "two", "a dog")
    requests = [{**one, "prompt": words[i]} for i, one in enumerate(requests_of(family))]
    pipe = for_inference(fresh(family))
    expected = [alone(pipe, one) for one in requests]

    with driving(fresh(family), numerics=numerics) as drive:
        by_itself = []
        for one in requests[:5] if numerics == "exact" else []:
            by_itself.append(drive.submit(**one))
            drive.finish()
        drive.forwards.clear()
        heard = [drive.submit(**one) for one in requests[:3]]
        drive.turn_until(lambda: heard[0].step >= 1)
        heard += [drive.submit(**one) for one in requests[3:]]
        drive.finish()

    got = [whole(one.outcome.fields) for one in heard]
    for ours, theirs in zip(got, expected, strict=True):
        assert gap(ours, theirs) < (IMAGE if family == "lumina2" else VIDEO)
    for ours, solo in zip(got, by_itself, strict=False):
        assert torch.equal(ours, whole(solo.outcome.fields))
    assert fuses(drive, "transformer").keys() <= {"proven"}
    widest = {("lumina2", "fast"): 5, ("lumina2", "exact"): 3}  # in exact of one length
    assert drive.widest("transformer") == widest.get((family, numerics), 4)


class Reader(Gemma2Model):  # type: ignore[misc]
    """A language model of no table; it gives a key-value cache, which its pipeline never reads."""


def test_a_language_model_fuses_where_its_pipeline_reads_no_cache_of_it() -> None:
    pipe = for_inference(fresh("lumina2"))
    expected = [alone(pipe, one) for one in requests_of("lumina2")]
    reader = Reader(pipe.text_encoder.config)
    reader.load_state_dict(pipe.text_encoder.state_dict())
    pipe.register_modules(text_encoder=reader.eval())

    with driving(pipe) as drive:
        learning = ride("lumina2", drive)
        drive.forwards.clear()
        proven = ride("lumina2", drive)

    for ours in (learning, proven):
        for one, other in zip(ours, expected, strict=True):
            assert gap(one, other) < IMAGE
    assert fuses(drive, "text_encoder").keys() == {"proven"}
    assert drive.widest("text_encoder") >= 3


def test_a_pipeline_reads_caches_if_its_package_names_them_or_nobody_knows() -> None:
    assert not reads_caches(diffusers.Lumina2Pipeline)
    assert reads_caches(diffusers.AudioLDM2Pipeline)
    assert reads_caches(type("Own", (diffusers.Lumina2Pipeline,), {}))


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
