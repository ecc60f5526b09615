"""FastWan's sampler: a few fixed noise levels, the request's own noise in between."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

from carpool.engine.model.dmd import LEVELS, DMDScheduler
from support.engine_driver import driving, gap
from support.tiny import ARGUMENTS, checkpoint

CLEAN = torch.linspace(-1, 1, 24).reshape(1, 2, 3, 2, 2)


@pytest.fixture
def fastwan(tmp_path: Path) -> Path:
    """A checkpoint in FastWan's layout: Wan's parts under a class that diffusers lacks."""
    folder = tmp_path / "fastwan"
    shutil.copytree(checkpoint("wan22_ti2v_5b"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = "WanDMDPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def alone(folder: Path, seed: int, **arguments: Any) -> torch.Tensor:
    """Plain diffusers with this scheduler, its noise from the request's own generator."""
    pipe = WanPipeline.from_pretrained(folder, scheduler=DMDScheduler())
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.generator = torch.Generator().manual_seed(seed)
    arguments = ARGUMENTS["wan22_ti2v_5b"] | {"guidance_scale": 1.0} | arguments
    frames = pipe(**arguments, generator=pipe.scheduler.generator).frames
    assert isinstance(frames, torch.Tensor)
    return frames


def test_a_perfect_model_gives_the_clean_sample_at_every_number_of_steps() -> None:
    for steps in (1, 2, 3):
        scheduler = DMDScheduler()
        scheduler.set_timesteps(steps)
        sample = torch.randn(CLEAN.shape, generator=torch.Generator().manual_seed(0))
        for timestep in scheduler.timesteps:
            velocity = (sample - CLEAN) / (float(timestep) / 1000)  # noise minus clean
            [sample] = scheduler.step(velocity, timestep, sample, return_dict=False)

        torch.testing.assert_close(sample, CLEAN)


def test_between_steps_the_clean_sample_is_noised_to_the_next_level() -> None:
    scheduler = DMDScheduler()
    scheduler.set_timesteps(3)
    scheduler.generator.manual_seed(7)

    after = scheduler.step(-CLEAN, 1000, torch.zeros_like(CLEAN)).prev_sample

    noise = torch.randn(CLEAN.shape, generator=torch.Generator().manual_seed(7))
    sigma = LEVELS[1] / 1000
    torch.testing.assert_close(after, (1 - sigma) * CLEAN + sigma * noise)


def test_more_steps_than_the_model_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="num_inference_steps=4: the model was distilled to 3"):
        DMDScheduler().set_timesteps(4)


def test_a_fastwan_checkpoint_is_served_with_it_and_each_request_has_its_own_noise(
    fastwan: Path,
) -> None:
    given = {n: v for n, v in ARGUMENTS["wan22_ti2v_5b"].items() if n != "num_inference_steps"}
    given.pop("guidance_scale", None)

    with driving(fastwan) as drive:
        heard = [drive.submit("a cat", seed=seed, **given) for seed in (1, 2)]
        drive.turn_until(lambda: heard[0].is_done or heard[0].step >= 1)
        assert not heard[0].is_done, heard[0].error
        heard.append(drive.submit("a dog", seed=3, num_inference_steps=2, **given))
        drive.finish()

    whole = [recorder.outcome.fields["frames"] for recorder in heard]
    for video, seed in zip(whole[:2], (1, 2), strict=True):
        expected = alone(fastwan, seed, prompt="a cat", num_inference_steps=3)
        assert gap(video, expected) <= 1e-4
    assert gap(whole[2], alone(fastwan, 3, prompt="a dog", num_inference_steps=2)) <= 1e-4
    assert gap(whole[0], whole[1]) > 1e-2
    assert drive.widest("transformer") == 3
