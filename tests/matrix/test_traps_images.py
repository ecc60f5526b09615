"""Calls that look alike and are not, or look different and may still share a forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import IPAdapterScaleCutoffCallback
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

from support import torchvision_cpu
from support.engine_driver import CLOSE, Drive, driving, fresh, gap
from support.matrix.control import with_adapter
from support.matrix.glm import PLANS, edit_of
from support.matrix.stable import PICTURES
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)
needs_torchvision = pytest.mark.skipif(
    not torchvision_cpu.IS_THERE, reason="its processor needs torchvision"
)
LONG = "an astronaut riding a horse on the moon in the rain, with a red balloon"


def ride(
    family: str,
    *requests: dict[str, Any],
    adapt: Callable[[DiffusionPipeline], DiffusionPipeline] = lambda pipe: pipe,
) -> Drive:
    """Run requests together, and assert that each gets what the same pipeline gives it alone."""
    pipe = adapt(fresh(family))
    arguments = [{**ARGUMENTS[family], "num_inference_steps": 2, **one} for one in requests]
    with driving(pipe) as drive:
        heard = [drive.submit(**one, seed=seed) for seed, one in enumerate(arguments)]
        drive.finish()
    for seed, (one, recorder) in enumerate(zip(arguments, heard, strict=True)):
        alone = pipe(**one, generator=torch.Generator().manual_seed(seed)).images
        assert gap(recorder.image, alone) < CLOSE
    return drive


def test_zimage_sizes_share_a_forward() -> None:
    drive = ride(
        "zimage",
        {"prompt": "a cat", "width": 32, "height": 32},
        {"prompt": "a dog", "width": 64, "height": 32},
        {"prompt": LONG, "width": 32, "height": 64},
        {"prompt": "the moon", "width": 64, "height": 64, "guidance_scale": 0.0},
    )

    assert drive.widest("transformer") == 4
    assert drive.widest("vae", "decode") == 1


def test_ernie_texts_of_all_lengths_share_a_forward() -> None:
    drive = ride(
        "ernie",
        {"prompt": "a cat"},
        {"prompt": LONG, "negative_prompt": "blurry"},
        {"prompt": "", "negative_prompt": LONG},
    )

    assert drive.widths("transformer") == [3, 3]
    assert drive.widest("text_encoder") == 3  # one prompt a call, and no mask


def test_sana_texts_of_all_lengths_share_a_forward() -> None:
    drive = ride(
        "sana",
        {"prompt": LONG, "max_sequence_length": 8},
        {"prompt": LONG, "max_sequence_length": 24},
        {"prompt": "", "max_sequence_length": 16},
    )

    assert drive.widths("transformer") == [3, 3]
    assert drive.widest("text_encoder") == 3


def test_flux_of_equal_token_count_and_other_sides_shares_no_forward() -> None:
    shared = {"prompt": "a cat", "control_image": PICTURES[0], "control_mode": 0}
    drive = ride(
        "flux_control", {**shared, "width": 64, "height": 32}, {**shared, "width": 32, "height": 64}
    )

    assert drive.widths("controlnet") == drive.widths("transformer") == [1] * 4
    assert drive.widest("text_encoder") == 2


@pytest.mark.parametrize(
    ("other", "widths"),
    [
        ({"controlnet_conditioning_scale": 0.9}, [2, 2]),  # each answer times its own
        ({"guess_mode": True, "guidance_scale": 1.0}, [1] * 4),
    ],
    ids=["scale", "guess_mode"],
)
def test_what_is_said_to_a_controlnet_is_never_mixed(
    other: dict[str, Any], widths: list[int]
) -> None:
    first = {"prompt": "a cat", "image": PICTURES[0], "controlnet_conditioning_scale": 1.0}
    drive = ride("sdxl_control", first, {**first, "image": PICTURES[1], **other})

    assert drive.widths("controlnet") == widths
    assert drive.widths("unet") == [2, 2]  # what it answers is


def test_the_modes_of_a_union_of_controlnets_follow_their_rows() -> None:
    drive = ride(
        "flux_control",
        *({"prompt": "a cat", "control_image": PICTURES[0], "control_mode": m} for m in range(3)),
    )

    assert drive.widths("controlnet") == drive.widths("transformer") == [3, 3]


def test_the_pictures_of_an_adapter_follow_their_rows() -> None:
    seen = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(5))
    drive = ride(
        "sdxl_adapter",
        {"prompt": "a cat", "ip_adapter_image": PICTURES[0]},
        {"prompt": "a cat", "ip_adapter_image": PICTURES[1], "guidance_scale": 1.0},
        {"prompt": "a cat", "ip_adapter_image_embeds": [seen]},
        adapt=with_adapter,
    )

    assert drive.widest("unet") == 3
    assert drive.widths("image_encoder") == [2]


def test_the_scale_that_a_request_gives_to_an_adapter_reaches_no_other() -> None:
    """It is written into lists of the attention processors, which all requests share."""
    own = {"callback_on_step_end": IPAdapterScaleCutoffCallback(None, cutoff_step_index=0)}
    pictures: list[dict[str, Any]] = [
        {"prompt": "a cat", "ip_adapter_image": picture} for picture in PICTURES[:3]
    ]
    drive = ride("sdxl_adapter", *pictures, pictures[0] | own, adapt=with_adapter)

    assert drive.widths("unet") == [4, 1, 1, 3]  # the last request runs again, alone


def with_flux_adapter(pipe: Any) -> DiffusionPipeline:
    model, text = pipe.transformer, pipe.transformer.config.joint_attention_dim
    torch.manual_seed(0)
    processors = {
        name: own if "single" in name else FluxIPAdapterAttnProcessor(model.inner_dim, text)
        for name, own in model.attn_processors.items()
    }
    model.set_attn_processor(processors)
    model.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(8, text)])
    return pipe


def test_pictures_of_flux_adapters_stay_apart_in_one_dict_of_attention_kwargs() -> None:
    kwargs = {"scale": 1.0}  # the pipeline writes the picture into it
    seen = [[torch.full((1, 1, 8), number)] for number in (0.1, 1.0)]
    pictures = [{f"{n}ip_adapter_image_embeds": s for n in ("", "negative_")} for s in seen]
    ride(
        "flux",
        *({"prompt": "a cat", "joint_attention_kwargs": kwargs, **one} for one in pictures),
        adapt=with_flux_adapter,
    )


@needs_torchvision
def test_what_glm_quotes_shares_a_forward_with_its_own_length_only() -> None:
    prompts = ("a sign that says 'cat'", "a 'dog' in the rain", "an 'astronaut'", LONG)
    drive = ride(
        "glm",
        *(
            {"prompt": prompt, "prior_token_ids": plan, "guidance_scale": 1.0}
            for prompt, plan in zip(prompts, PLANS, strict=True)
        ),
    )

    assert sorted(drive.widths("transformer")) == [1, 1, 1, 1, 2, 2]
    assert drive.widest("text_encoder") == 4  # of lengths that are masked


@needs_torchvision
def test_glm_shares_all_but_what_writes_a_picture() -> None:
    drive = ride(
        "glm",
        {"prompt": "a 'cat'", "prior_token_ids": PLANS[0], **edit_of(0)},
        {"prompt": "a 'dog'", "prior_token_ids": PLANS[1], **edit_of(1)},
        {"prompt": "a 'cat'", "prior_token_ids": PLANS[2]},
    )

    # each edit writes its picture once, and reads it at both steps: with its own keys and values
    assert 2 <= drive.widths("transformer").count(1) < 6
    assert drive.widest("transformer") >= 2


@needs_torchvision
@pytest.mark.slow
def test_glm_writes_each_plan_from_the_seed_of_its_request() -> None:
    drive = ride("glm", {"prompt": "a cat"}, {"prompt": "a dog"}, {"prompt": "a dog"})

    assert drive.widest("vision_language_encoder", "generate") == 3  # tokens of all plans
