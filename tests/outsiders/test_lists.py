"""JSON has lists only: where a pipeline takes tuples, the lists of a body are tuples."""

from typing import Any

import pytest

from carpool.engine.model.signature import parameters_of
from support.engine_driver import driving, fresh, gap
from support.prepared import alone
from support.tiny import ARGUMENTS

SIZES: list[dict[str, Any]] = [
    {"original_size": [96, 64]},
    {"target_size": [96, 64]},
    {"crops_coords_top_left": [8, 8]},
    {"negative_original_size": [32, 32], "negative_target_size": [32, 32], "guidance_scale": 3.0},
]


@pytest.mark.parametrize("words", SIZES)
def test_a_list_alone_draws_what_a_tuple_draws_in_plain_diffusers(words: dict[str, Any]) -> None:
    own = {**ARGUMENTS["sdxl"], "num_inference_steps": 2, "seed": 3}
    tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in words.items()}
    with driving(fresh("sdxl")) as drive:
        recorder = drive.submit("a red circle", **{**own, **words})
        drive.finish()
    assert recorder.error is None

    reference = alone(fresh("sdxl"), {"prompt": "a red circle", **own, **tuples})

    assert gap(recorder.outcome.fields["images"], reference) <= 1e-4


def test_lists_stay_lists_where_a_pipeline_takes_them() -> None:
    kinds = {one.name: one.is_tuple for one in parameters_of(fresh("sdxl"))}

    assert kinds["original_size"]
    assert kinds["crops_coords_top_left"]
    assert not kinds["sigmas"]
    assert not kinds["prompt"]
