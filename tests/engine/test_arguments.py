"""What the pipeline's `__call__` takes may be said, and gives what it gives there."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, EulerAncestralDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor

from carpool.engine.model.output_types import only_converts, output_types
from carpool.errors import SizeRejected
from support import isolation, newcomers
from support.engine_driver import called, driving, fresh, gap, plain
from support.isolation import build
from support.newcomers import PICTURE
from support.tiny import ARGUMENTS


def given(family: str, **arguments: Any) -> dict[str, Any]:
    own = {name: value for name, value in ARGUMENTS[family].items() if name != "output_type"}
    return {**own, "prompt": "a cat", **arguments}


def served(pipe: DiffusionPipeline, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What an engine gives for requests that run together, with seeds 0, 1, ..."""
    with driving(pipe) as drive:
        heard = [drive.submit(**one, seed=seed) for seed, one in enumerate(requests)]
        drive.finish()
    for one in heard:
        assert one.error is None, one.error
    return [one.outcome.fields for one in heard]


@pytest.mark.parametrize("output_type", [None, "pil", "np", "pt"])
def test_outputs_have_the_type_and_shape_of_the_plain_pipeline(output_type: str | None) -> None:
    """Wan's own default is "np"."""
    said = {} if output_type is None else {"output_type": output_type}
    arguments = given("wan21_t2v", **said)

    [fields] = served(fresh("wan21_t2v"), arguments)
    expected = called(plain("wan21_t2v"), 0, **arguments).frames

    assert type(fields["frames"]) is type(expected)
    if output_type == "pil":
        assert [one.size for one in fields["frames"][0]] == [one.size for one in expected[0]]
    else:
        assert fields["frames"].shape == expected.shape
        assert fields["frames"].dtype == expected.dtype
        assert np.abs(np.asarray(fields["frames"]) - np.asarray(expected)).max() < 1e-4


@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_pictures_are_checked_and_marked_as_the_class_does_it(output_type: str) -> None:
    """DeepFloyd IF under "pt" would skip its safety checker."""
    arguments = {
        "prompt": "a cat",
        "num_inference_steps": 2,
        "clean_caption": False,
        "output_type": output_type,
    }
    pipe, judge = build(isolation.pixels), build(isolation.pixels)
    assert not only_converts(pipe)

    [fields] = served(pipe, arguments)
    expected = called(judge, 0, **arguments)

    ours, theirs = (np.asarray(one[0]) for one in (fields["images"], expected.images))
    assert np.array_equal(ours, theirs)
    assert fields["nsfw_detected"] == expected.nsfw_detected == [True]
    assert ours[:8, :8].max() == 0  # painted black, but for the mark in the corner


def test_what_a_class_does_with_its_output_type_is_read_from_its_source() -> None:
    assert all(only_converts(fresh(family)) for family in ("flux", "sdxl", "wan21_t2v"))
    assert output_types(type(fresh("flux"))) == ("pil", "np", "pt", "latent")


def test_sources_are_read_once_and_yet_each_pipeline_is_judged_by_its_own_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Marking(VaeImageProcessor):  # type: ignore[misc]
        def postprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super().postprocess(*args, **kwargs)

    pipe, marked = fresh("flux"), fresh("flux")
    marked.image_processor = Marking()
    before = only_converts(pipe), only_converts(marked), output_types(type(pipe))
    monkeypatch.setattr(inspect, "getsource", None)

    assert (only_converts(pipe), only_converts(marked), output_types(type(pipe))) == before
    assert before[:2] == (True, False)


class OddlyWritten:
    """Its source has text at the margin, and a piece that does not parse by itself."""

    template = """from here:
to there"""

    def __call__(self, output_type: str = "pil") -> str:
        return """here:
{}""" if output_type == "html" else output_type  # fmt: skip

    named, other = (lambda self: 1), (lambda self: (
        2))  # fmt: skip


def test_a_class_is_read_however_its_source_is_laid_out() -> None:
    assert output_types(OddlyWritten) == ("pil", "np", "pt", "latent", "html")
    assert not only_converts(OddlyWritten())


def test_a_size_that_diffusers_rounds_down_is_drawn_smaller_and_its_client_is_told() -> None:
    with driving(fresh("flux")) as drive:
        multiple = drive.engine.loaded.card.size_multiple_px
        sides = 4 * multiple, 5 * multiple
        odd = given("flux", width=sides[0] + 1, height=sides[1] + multiple - 1, output_type="pt")
        even = given("flux", width=sides[0], height=sides[1], output_type="pt")
        heard = [drive.submit(**one, seed=seed) for seed, one in enumerate((odd, even))]
        drive.finish()
        widest = drive.widest("transformer")

    assert widest == 2  # both draw the same size
    for seed, (recorder, arguments) in enumerate(zip(heard, (odd, even), strict=True)):
        expected = called(plain("flux"), seed, **arguments).images
        assert gap(recorder.outcome.fields["images"], expected) < 2e-5
    drawn = f"{sides[0]}x{sides[1]}, multiples of {multiple}"
    told = f"size {odd['width']}x{odd['height']} was rounded down to {drawn}"
    assert [recorder.outcome.warnings for recorder in heard] == [(told,), ()]


@pytest.mark.parametrize(
    ("family", "beyond"), [("flux", None), ("sdxl", 1), ("wan21_t2v", 1), ("sd15", 1)]
)
def test_a_size_that_diffusers_refuses_is_refused(family: str, beyond: int | None) -> None:
    with driving(fresh(family)) as drive:
        multiple = drive.engine.loaded.card.size_multiple_px
        width = multiple - 1 if beyond is None else 4 * multiple + beyond  # FLUX: nothing is left
        with pytest.raises(SizeRejected, match="nearest size"):
            drive.submit(**given(family, width=width))
        with pytest.raises((ValueError, RuntimeError)):
            plain(family)(**given(family, width=width))


def test_none_is_not_the_same_as_leaving_it_out() -> None:
    with_none = given("sana", output_type="pt", complex_human_instruction=None)
    without = given("sana", output_type="pt", complex_human_instruction=["look: "])

    fields = served(fresh("sana"), with_none, without)

    for seed, arguments in enumerate((with_none, without)):
        expected = called(plain("sana"), seed, **arguments).images
        assert gap(fields[seed]["images"], expected) < 2e-5


def test_sigmas_may_be_an_array_as_flux_users_write_them() -> None:
    arguments = given("flux", output_type="pt", sigmas=np.linspace(1.0, 0.25, 4))

    [fields] = served(fresh("flux"), {**arguments, "guidance_scale": np.float32(3.5)})

    assert gap(fields["images"], called(plain("flux"), 0, **arguments).images) < 2e-5


SPANS = {"control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("make", "net", "more"),
    [(newcomers.two_controls, "controlnet", SPANS), (newcomers.two_adapters, "adapter", {})],
)
def test_several_nets_take_lists_of_pictures_and_scales(make: Any, net: str, more: Any) -> None:
    pictures = [PICTURE, newcomers.MASK.convert("RGB")]
    base = given("sdxl", **newcomers.SIZE, output_type="pt", image=pictures, **more)
    requests = [{**base, f"{net}_conditioning_scale": [*pair]} for pair in ((0.5, 1), (1.0, 0))]

    fields = served(build(make), *requests)

    for seed, arguments in enumerate(requests):
        expected = called(build(make), seed, **arguments).images
        assert gap(fields[seed]["images"], expected) < 2e-5


Dress = Callable[[Any], object]
DRESSES: dict[str, tuple[str, Dress]] = {
    "float8 vae": ("sd15", lambda pipe: float8(pipe.vae)),
    "float8 unet": ("sdxl", lambda pipe: float8(pipe.unet)),
    "float8 transformer": ("flux", lambda pipe: float8(pipe.transformer)),
    "tiling": ("sdxl", lambda pipe: pipe.vae.enable_tiling()),
    "slicing": ("sdxl", lambda pipe: pipe.vae.enable_slicing()),
    "fused qkv": ("flux", lambda pipe: pipe.transformer.fuse_qkv_projections()),
    "freeu": ("sd15", lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)),
    "ancestral": ("sd15", lambda pipe: dressed(pipe, EulerAncestralDiscreteScheduler)),
}
QUICK = {"float8 vae", "fused qkv", "ancestral"}


def float8(module: Any) -> None:
    module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def dressed(pipe: Any, scheduler: Any) -> None:
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in DRESSES]
)
def test_modules_in_unusual_dress_give_what_they_give_alone(name: str) -> None:
    family, dress = DRESSES[name]
    pipe, judge = fresh(family), fresh(family)
    for one in (pipe, judge):
        dress(one)
        one.set_progress_bar_config(disable=True)
    requests = [given(family, output_type="pt", num_inference_steps=n) for n in (3, 4)]

    fields = served(pipe, *requests)

    for seed, arguments in enumerate(requests):
        assert gap(fields[seed]["images"], called(judge, seed, **arguments).images) < 5e-5
