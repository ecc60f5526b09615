"""FLUX.2, Kontext and Qwen-Image: calls that look as if they could share a forward."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from support import torchvision_cpu
from support.engine_driver import CLOSE, Drive, driving, gap, plain, served, solo
from support.fake_models import fuse
from support.matrix.qwen import shrunk
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.slow
CAT, LONG = "a photo of a cat", "an astronaut riding a horse on the moon in the rain"
TWO_TO_ONE = {"height": 32, "width": 64}
ONE_TO_TWO = {"height": 64, "width": 32}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def pipeline_of(family: str) -> DiffusionPipeline:
    """A family's pipeline for engines; where it has to be shrunk, so is the plain one."""
    if "edit" not in family:
        return served(family)
    if not torchvision_cpu.IS_THERE:
        pytest.skip("its processor needs torchvision: `make test-models` installs it")
    shrunk(plain(family))
    return shrunk(served(family))


def ride(family: str, *requests: dict[str, Any]) -> Drive:
    """Run requests together, and see that each gets what it gets alone."""
    with driving(pipeline_of(family)) as drive:
        heard = [drive.submit(**{**ARGUMENTS[family], **one}) for one in requests]
        drive.finish()
    for recorder, one in zip(heard, requests, strict=True):
        assert gap(recorder.image, solo(family, **one)) <= CLOSE
    return drive


def calls(family: str, **request: Any) -> list[dict[str, Any]]:
    """What plain diffusers passes to the transformer, call by call."""
    pipeline_of(family)
    seen: list[dict[str, Any]] = []
    handle = plain(family).transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    try:
        solo(family, **request)
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("family", "left", "right"),
    [
        pytest.param("flux2", TWO_TO_ONE, ONE_TO_TWO, id="flux2-sizes"),
        pytest.param("flux2_klein", TWO_TO_ONE, ONE_TO_TWO, id="klein-sizes"),
        pytest.param(
            "flux2", {"image": [picture(64, 128)]}, {"image": [picture(128, 64)]},
            id="flux2-references",
        ),
        pytest.param(
            "flux2", {"image": [picture(64, 128)]},
            {"image": [picture(64, 64), picture(64, 64, seed=1)]}, id="flux2-one-reference-and-two",
        ),
        pytest.param(
            "flux2", {"image": [picture(64, 64)]}, {"height": 128}, id="flux2-reference-and-none",
        ),
        pytest.param(
            "kontext", {"image": picture(32, 64)}, {"image": picture(64, 32)},
            id="kontext-references",
        ),
        pytest.param(
            "qwen_image", {"height": 64, "width": 16}, {"height": 32, "width": 32}, id="qwen-sizes",
        ),
        pytest.param(
            "qwen_edit", {"image": picture(64, 128)}, {"image": picture(128, 64)},
            id="qwen-edit-references",
        ),
        pytest.param(
            "qwen_edit_plus", {"image": [picture(64, 128)]}, {"image": [picture(128, 64)]},
            id="qwen-edit-plus-references",
        ),
    ],
)  # fmt: skip
def test_as_many_tokens_in_another_geometry_never_share_a_forward(
    family: str, left: dict[str, Any], right: dict[str, Any]
) -> None:
    pair = [{"prompt": CAT, "seed": 1, **left}, {"prompt": CAT, "seed": 2, **right}]
    shapes = {calls(family, **one)[0]["hidden_states"].shape for one in pair}
    assert len(shapes) == 1, "the trap is none: the token counts differ"

    drive = ride(family, *pair)

    assert drive.widest("transformer") == 1
    assert drive.widest("text_encoder") == 2  # they did meet


def test_one_reference_and_two_share_the_text_encoder_but_not_the_transformer() -> None:
    one, two = {"image": [picture(64, 64)]}, {"image": [picture(64, 64), picture(64, 64, seed=1)]}

    drive = ride(
        "qwen_edit_plus", {"prompt": CAT, "seed": 1, **one}, {"prompt": LONG, "seed": 2, **two}
    )

    assert drive.widths("text_encoder") == [2]
    assert drive.widest("transformer") == 1


@pytest.mark.parametrize("family", ["flux2", "flux2_klein"])
@pytest.mark.parametrize("name", ["txt_ids", "img_ids"])
def test_positions_fuse_when_equal_in_content(family: str, name: str) -> None:
    call, *_ = calls(family, prompt=CAT)
    moved = {**call, name: call[name] + 1}
    model = plain(family).transformer

    assert fuse(call, {**call, name: call[name].clone()}, module=model)
    assert not fuse(call, moved, module=model)
    with torch.no_grad():
        assert gap(model(**call)[0], model(**moved)[0]) > 100 * CLOSE  # and they are read


def test_prompts_of_different_length_fuse_with_a_mask_that_qwen_image_does_not_pass() -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "seed": seed} for seed, prompt in enumerate([CAT, LONG, ""])
    ]
    lengths = set()
    for one in requests:
        for call in calls("qwen_image", **one):
            assert call["encoder_hidden_states_mask"] is None
            lengths.add(call["encoder_hidden_states"].shape[1])
    assert len(lengths) == 3

    drive = ride("qwen_image", *requests)

    assert drive.widths("text_encoder") == [3]
    assert drive.widths("transformer") == [3, 3, 3]


def test_keys_and_values_of_references_stay_with_their_request() -> None:
    drive = ride(
        "flux2_klein_kv",
        {"prompt": CAT, "seed": 1, "image": [picture(64, 64)]},
        {"prompt": CAT, "seed": 2, "image": [picture(64, 64, seed=1)]},
        {"prompt": CAT, "seed": 3},
        {"prompt": LONG, "seed": 4},
    )

    assert drive.widths("transformer") == [2] * 6  # two with references, two without
