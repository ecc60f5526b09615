"""Previews look like what they announce, come in time, and change nothing."""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from carpool.engine.model.latent_colours import colours
from carpool.engine.model.preview import DenoisedEstimate, PreviewDecoder, moments
from carpool.models import embedded
from carpool.request.parameters import check
from carpool.types import Event, Request
from support.engine_driver import Drive, Recorder, driving, fresh, served
from support.tiny import ARGUMENTS

DRAW = {"num_inference_steps": 12, "seed": 3}
RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), np.uint8))


def submit(drive: Drive, previews: int, prompt: str | None, **parameters: Any) -> Recorder:
    recorder = Recorder()
    job = check(drive.engine.loaded.card, Request(prompt, **parameters))
    drive.engine.submit(replace(job, previews=previews), recorder)
    return recorder


def shown(recorder: Recorder) -> list[Event]:
    return [event for event in recorder.events if event.kind == "preview"]


def pixels(recorder: Recorder) -> NDArray[np.uint8]:
    """The picture that came of a request."""
    [image] = recorder.outcome.fields["images"]
    return np.asarray(image)


def likeness_db(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio."""
    error = np.mean((left.astype(float) - right.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / error))


def test_previews_resemble_the_picture_they_announce_and_no_other() -> None:
    with driving(embedded.MODEL_DIR) as drive:
        prompts = ("a red circle on a blue background", "a yellow square on a black background")
        one, other = (submit(drive, 3, prompt, **DRAW) for prompt in prompts)
        drive.finish()

    for preview in shown(one):
        assert preview.picture.shape == pixels(one).shape == (64, 64, 3)
        assert likeness_db(preview.picture, pixels(one)) > 13
        assert likeness_db(preview.picture, pixels(other)) < 9
    for preview in shown(other):
        assert likeness_db(preview.picture, pixels(other)) > 10
        assert likeness_db(preview.picture, pixels(one)) < 9


def test_previews_come_in_order_at_even_steps_and_before_the_answer() -> None:
    with driving("flux") as drive:
        recorder = submit(drive, 3, "a cat", **{**ARGUMENTS["flux"], "num_inference_steps": 8})
        drive.finish()

    assert [(event.step, event.steps) for event in shown(recorder)] == [(2, 8), (4, 8), (6, 8)]
    assert recorder.kinds[-1] == "finished"


def test_a_request_with_previews_draws_the_very_same_picture() -> None:
    with driving("flux") as drive:
        watched = submit(drive, 3, "a cat", seed=5, **ARGUMENTS["flux"])
        drive.finish()
        alone = drive.submit("a cat", seed=5, **ARGUMENTS["flux"])
        drive.finish()

    assert shown(watched)
    assert not shown(alone)
    assert torch.equal(watched.image, alone.image)


@pytest.mark.parametrize(
    "family",
    ["sd15", "sdxl", "sd3", "sana", "zimage", "ernie", "kontext", "flux2", "glm", "qwen_image"],
)
def test_every_family_shows_previews_of_the_size_of_its_picture(family: str) -> None:
    arguments: Mapping[str, Any] = {"prompt": "a cat", **ARGUMENTS[family]}
    with driving(family) as drive:
        recorder = submit(drive, 2, **{**arguments, "num_inference_steps": 4})
        drive.finish()

    assert len(shown(recorder)) == 2
    assert {event.picture.shape for event in shown(recorder)} == {
        (*recorder.image.shape[2:], 3)  # (1, 3, height, width)
    }


def test_a_request_that_starts_from_a_picture_counts_its_own_steps() -> None:
    changing = {"image": PICTURE, "strength": 0.5, "num_inference_steps": 8}
    with driving("flux") as drive:
        recorder = submit(drive, 1, "a cat", **{**ARGUMENTS["flux"], **changing})
        drive.finish()

    assert [(event.step, event.steps) for event in shown(recorder)] == [(6, 8)]


def test_a_watched_request_leaves_nothing_behind() -> None:
    with driving("flux") as drive:
        submit(drive, 1, "a cat", **ARGUMENTS["flux"])
        drive.turn(4)
        [state] = drive.engine.running.states
        scheduler, hook = weakref.ref(state.view.scheduler), state.preview_hook
        assert hook is not None
        drive.finish()
        del state, hook

    assert scheduler() is None


class Smaller(nn.Module):
    """An autoencoder that only makes pictures smaller, so that its latents are colours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def encode(self, pictures: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(latent=nn.functional.avg_pool2d(pictures, 4))


def test_colours_are_found_where_they_are_known() -> None:
    factors, scale_px = colours(Smaller())

    assert scale_px == 4
    expected = torch.cat([torch.eye(3) / 2, torch.full((1, 3), 0.5)])  # from -1..1 to 0..1
    torch.testing.assert_close(factors, expected)


def test_a_model_without_a_usual_autoencoder_has_no_previews(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not PreviewDecoder(object()).fit()
    assert "no previews" in caplog.text

    pipe = fresh("flux")
    del pipe.vae.encoder  # nobody can ask it for colours
    with driving(pipe) as drive:
        recorder = submit(drive, 3, "a cat", **ARGUMENTS["flux"])
        drive.finish()

    assert recorder.error is None
    assert not shown(recorder)


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((1, 16, 64), None),  # packed, and nothing says where what lies
        ((1, 16, 64), [[(1, 3, 5)]]),  # for another number of places
        ((1, 7, 8, 8), None),  # of other channels
        ((2, 4, 8, 8), None),  # of two pictures
        ((1, 4, 2, 8, 8), None),  # layers
    ],
)
def test_latents_of_an_unknown_layout_give_no_picture(shape: tuple[int, ...], places: Any) -> None:
    previews = PreviewDecoder(served("flux"))
    assert previews.fit()

    assert (
        previews.picture(DenoisedEstimate(torch.zeros(shape), places, 1, 2), lambda it: it) is None
    )


@given(st.integers(1, 3), st.integers(1, 200))
def test_moments_are_even_and_leave_the_last_step_to_the_answer(wanted: int, steps: int) -> None:
    found = sorted(moments(wanted, steps))

    assert len(found) == min(wanted, steps - 1)
    assert all(0 < moment < steps for moment in found)
    gaps = [after - before for before, after in zip([0, *found], [*found, steps], strict=True)]
    assert max(gaps) - min(gaps) <= 1
