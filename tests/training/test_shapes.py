"""The embedded model through the engine: everybody gets their own picture, and it is right."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import carpool
from carpool.models.embedded import MODEL_DIR, VIDEO_MODEL_DIR
from training.shapes.draw import PALETTE, SHAPES, Item, Scene, caption, draw
from training.shapes.judge import shows
from training.shapes.outlined import is_outlined, why_not_outlined

pytestmark = pytest.mark.usefixtures("fusing_is_free")
SIZE = {"width": 64, "height": 64, "max_sequence_length": 16}


def requests() -> list[carpool.Request]:
    """48 with prompts all different, and mixed steps, guidance, seeds; some with true CFG."""
    made = []
    for i, (colour, shape) in enumerate(itertools.product(PALETTE, SHAPES)):
        grounds = [ground for ground in PALETTE if ground != colour]
        scene = Scene(grounds[i % len(grounds)], (Item(colour, shape),))
        extra: dict[str, Any] = (
            {"negative_prompt": "", "true_cfg_scale": 1.5} if i % 12 == 5 else {}
        )
        made.append(carpool.Request(
            caption(scene), seed=1000 + i, num_inference_steps=10 + i % 4,
            guidance_scale=3.0 + i % 3 * 0.5, **extra,
        ))  # fmt: skip
    return made


@pytest.mark.timeout(300)
def test_48_requests_at_once_each_get_their_own_right_picture_as_if_alone() -> None:
    pipe = DiffusionPipeline.from_pretrained(MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    asked = requests()
    alone = [
        pipe(r.prompt, **SIZE, **r.parameters, output_type="pt",
             generator=torch.Generator().manual_seed(r.seed or 0)).images
        for r in asked[5::6]  # with true CFG, and without
    ]  # fmt: skip

    with carpool.load("shapes", max_running=48) as engine:
        together = engine.generate(asked, output_type="pt")
        forwards = engine.statistics()["forwards"]

    assert len({r.prompt for r in asked}) == 48
    for request, solo, output in zip(asked[5::6], alone, together[5::6], strict=True):
        assert (output.images - solo).abs().max() <= 2e-5, request.prompt
    pictures = [to_picture(output.images) for output in together]
    right = [shows(p, str(r.prompt)) for p, r in zip(pictures, asked, strict=True)]
    assert sum(right) >= 46, [r.prompt for r, ok in zip(asked, right, strict=True) if not ok]
    # nobody's picture passes for somebody else's
    assert not any(shows(pictures[i], str(asked[i - 1].prompt)) for i in range(48))
    denoise = [f for f in forwards if f["component"] == "transformer"]
    mean = sum(f["requests"] * f["count"] for f in denoise) / sum(f["count"] for f in denoise)
    assert max(f["requests"] for f in denoise) == 8  # the default's widest
    assert mean > 6


def to_picture(tensor: Any) -> Image.Image:
    array = (tensor[0].permute(1, 2, 0).clamp(0, 1) * 255).round().byte().numpy()
    return Image.fromarray(array)


@pytest.mark.parametrize(("folder", "parts"), [(MODEL_DIR, 6), (VIDEO_MODEL_DIR, 4)])
def test_a_model_is_small_and_says_nothing_of_where_it_was_made(folder: Path, parts: int) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]

    assert sum(file.stat().st_size for file in files) <= 15 * 1024 * 1024
    configs = [file.read_text() for file in files if "config" in file.name]
    assert len(configs) >= parts
    assert not any("_name_or_path" in text or '": "/' in text for text in configs)


def test_the_prompt_decides_the_picture_and_the_seed_its_place() -> None:
    with carpool.load("shapes") as engine:
        red, again, blue, other = engine.generate(
            [
                carpool.Request("a red circle on a white background", seed=1),
                carpool.Request("a red circle on a white background", seed=1),
                carpool.Request("a blue circle on a white background", seed=1),
                carpool.Request("a red circle on a white background", seed=2),
            ],
            num_inference_steps=12,
            output_type="pt",
        )

    def gap(a: carpool.Output, b: carpool.Output) -> float:
        left: Any = a.images
        return float((left - b.images).abs().max())

    assert gap(red, again) < 2e-5
    assert gap(red, blue) > 0.2
    assert gap(red, other) > 0.2


def test_changing_and_filling_pictures_ride_along_and_come_out_right() -> None:
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (8, 8, 56, 56))
    hidden = ~np.asarray(mask).astype(bool)
    rows = list(zip(PALETTE, SHAPES * 2, strict=False))
    before = [Scene("white" if c != "white" else "black", (Item(c, s),)) for c, s in rows]
    after = [
        Scene(scene.background, (Item(colour, shape),))
        for scene, colour, shape in zip(
            before, ("blue", "purple", "orange", "red"), ("star", "ring", "circle", "square"),
            strict=False,
        )
    ]  # fmt: skip
    sources = [draw(scene, random.Random(i)) for i, scene in enumerate(before)]
    asked = [
        carpool.Request(
            caption(scene), seed=i, num_inference_steps=16, image=sources[i],
            **({"mask_image": mask, "strength": 1.0} if is_masked else {"strength": 0.8}),
        )
        for i, scene in enumerate(after)
        for is_masked in (False, True)
    ]  # fmt: skip
    asked.append(carpool.Request("a red circle on a blue background", num_inference_steps=12))

    with carpool.load("shapes") as engine:
        outputs = engine.generate(asked)
        widths = [f["requests"] for f in engine.statistics()["forwards"]
                  if f["component"] == "transformer"]  # fmt: skip

    pictures = [output.images[0] for output in outputs]
    assert [shows(p, str(r.prompt)) for p, r in zip(pictures, asked, strict=True)] == [True] * 9
    for i, source in enumerate(sources[:4]):  # what was not to be changed is as it was
        change = np.abs(np.asarray(pictures[2 * i + 1]).astype(int) - np.asarray(source))
        assert change[hidden].mean() < 6
    assert max(widths) >= 8


def test_the_picture_shows_who_rode_with_the_adapter_and_who_did_not() -> None:
    grounds = itertools.cycle(("black", "white", "yellow"))
    scenes = [
        Scene(next(grounds), (Item(colour, shape),))
        for colour, shape in zip(("red", "blue", "purple", "green") * 3, SHAPES * 2, strict=True)
    ]
    asked = [
        carpool.Request(caption(scene), seed=i, lora=[{"id": "outlined", "scale": 0.9}] * (i % 2))
        for i, scene in enumerate(scenes)
    ]

    with carpool.load("shapes", max_batch_size=12) as engine:
        outputs = engine.generate(asked, num_inference_steps=16)
        forwards = engine.statistics()["forwards"]

    drawn = [output.images[0] for output in outputs]
    assert [is_outlined(picture) for picture in drawn[1::2]] == [True] * 6
    right = [why_not_outlined(p, s) == "" for p, s in zip(drawn[1::2], scenes[1::2], strict=True)]
    assert sum(right) >= 5
    assert [shows(p, s) for p, s in zip(drawn[::2], scenes[::2], strict=True)] == [True] * 6
    assert max(f["requests"] for f in forwards if f["component"] == "transformer") == 12
