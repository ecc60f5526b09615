"""Pipelines that no table was written for: served as they are, each call alone, and correctly."""

from typing import Any

import pytest
import torch

from support.engine_driver import driving, fresh, gap
from support.matrix.case import IMAGE, VIDEO
from support.tiny import ARGUMENTS

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a photo of a cat", "seed": 1, "num_inference_steps": 4},
    {"prompt": "the moon", "seed": 2, "num_inference_steps": 6, "negative_prompt": "blurry"},
    {"prompt": "a dog in the rain", "seed": 3, "num_inference_steps": 2, "guidance_scale": 1.0},
)


@pytest.mark.parametrize(
    ("family", "field", "tolerance"),
    [("pixart", "images", IMAGE), ("ltx", "frames", VIDEO), ("stable_audio", "audios", VIDEO)],
    ids=["picture", "video", "sound"],
)
def test_a_pipeline_without_a_table_rides_and_its_denoiser_runs_alone(
    family: str, field: str, tolerance: float
) -> None:
    pipe = fresh(family)
    arguments = [{**ARGUMENTS[family], **one} for one in REQUESTS]

    with driving(pipe) as drive:
        heard = [drive.submit(**one) for one in arguments]
        drive.turn_until(lambda: all(one.step >= 1 for one in heard))
        assert not any(one.is_done for one in heard)  # they go side by side
        drive.finish()

    for one, recorder in zip(arguments, heard, strict=True):
        random = torch.Generator().manual_seed(one.pop("seed"))
        assert recorder.error is None
        assert gap(recorder.outcome.fields[field], pipe(**one, generator=random)[field]) < tolerance
    assert set(drive.widths("transformer")) == {1}
    assert drive.widest("text_encoder") == 3  # T5, which has a table
