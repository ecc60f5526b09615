"""The judge of pictures accepts what was drawn and refuses everything else."""

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from training.shapes.draw import (
    PALETTE,
    SHAPES,
    SIZE_PX,
    CaptionStyle,
    Item,
    Scene,
    caption,
    draw,
    is_held_out,
    paint,
    parse,
    prompts,
    sample,
    scenes,
)
from training.shapes.judge import judge, shows, why_not

RED_CIRCLE = parse("a red circle on a blue background")
TWO = parse("a yellow star left of a green square on a black background")
Box = tuple[float, float, float, float]


def picture(background: str, *parts: tuple[str, str, Box]) -> Image.Image:
    """Paint shapes (colour, shape, box) where they are wanted."""
    image = Image.new("RGB", (SIZE_PX * 4, SIZE_PX * 4), PALETTE[background])
    canvas = ImageDraw.Draw(image)
    for colour, shape, (left, top, right, bottom) in parts:
        paint(canvas, shape, (left * 4, top * 4, right * 4, bottom * 4), PALETTE[colour])
    return image.reduce(4)


def damaged(images: list[Image.Image], damage: str, rng: np.random.Generator) -> list[Image.Image]:
    """Pictures as they are, with grain of 8 levels, or softened by 0.6 pixels."""
    if damage == "grain":
        pixels = np.stack([np.asarray(image) for image in images])
        noisy = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
        return [Image.fromarray(image) for image in noisy]
    soft = ImageFilter.GaussianBlur(0.6)
    return [image.filter(soft) for image in images] if damage == "blur" else images


@pytest.mark.parametrize("damage", ["none", "grain", "blur"])
def test_drawn_pictures_are_right(damage: str) -> None:
    rng, grain = random.Random(1), np.random.default_rng(1)
    asked = [*rng.sample(list(scenes(1)), 216), *rng.sample(list(scenes(2)), 84)]
    images = [draw(scene, rng) for scene in asked]
    right = [
        shows(damaged([image], damage, grain)[0], scene)
        for image, scene in zip(images, asked, strict=True)
    ]

    assert sum(right) > 0.995 * len(right)


def test_a_drawn_picture_shows_no_other_scene() -> None:
    rng = random.Random(2)
    asked = rng.sample(list(scenes(1)), 40) + rng.sample(list(scenes(2)), 40)

    for scene, other in zip(asked, asked[1:] + asked[:1], strict=True):
        assert not shows(draw(scene, rng), other)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("a red circle on a green background", "shows a red circle on a green background"),
        ("an orange circle on a blue background", "shows an orange circle on a blue"),
        ("a red square on a blue background", "shows a red square on a blue background"),
        ("a red ring on a blue background", "shows a red ring on a blue background"),
        ("a red circle left of a red circle on a blue background", "shows a red circle left of"),
    ],
)
def test_another_picture_than_asked_for_is_refused(shown: str, reason: str) -> None:
    image = draw(parse(shown), random.Random(3))

    assert why_not(image, RED_CIRCLE).startswith(reason)


@pytest.mark.parametrize(
    "shown",
    [
        "a green square left of a yellow star on a black background",  # the other way round
        "a green star left of a yellow square on a black background",  # colours exchanged
        "a yellow square left of a green star on a black background",  # shapes exchanged
        "a yellow star on a black background",  # one is missing
        "a yellow star left of a green square on a white background",
        "a yellow star left of a green circle on a black background",
    ],
)
def test_a_pair_that_differs_in_anything_is_refused(shown: str) -> None:
    image = draw(parse(shown), random.Random(4))

    assert why_not(image, TWO).startswith("shows ")
    assert shows(image, shown)


def test_a_speck_is_overlooked_but_a_dot_is_not() -> None:
    circle = ("red", "circle", (14.0, 14.0, 44.0, 44.0))
    speck = picture("blue", circle, ("red", "square", (52, 52, 54, 54)))
    dot = picture("blue", circle, ("red", "square", (52, 52, 57, 57)))

    assert shows(speck, RED_CIRCLE)
    assert not shows(dot, RED_CIRCLE)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mangled_shape_is_refused(shape: str) -> None:
    image = picture("blue", ("red", shape, (14, 14, 50, 50)))
    canvas = ImageDraw.Draw(image)
    canvas.rectangle((14, 30, 50, 37), fill=PALETTE["blue" if shape != "cross" else "red"])
    canvas.ellipse((36, 36, 52, 52), fill=PALETTE["red"])

    assert not shows(image, Scene("blue", (Item("red", shape),)))


CIRCLE = ("red", "circle", (14.0, 14.0, 50.0, 50.0))
STAR, SQUARE = ("yellow", "star", (8.0, 20.0, 28.0, 40.0)), ("green", "square", (38, 20, 58, 40))


def rounded(canvas: ImageDraw.ImageDraw) -> None:
    canvas.rounded_rectangle((14, 14, 50, 50), 13, fill=PALETTE["red"])


def two_coloured(canvas: ImageDraw.ImageDraw) -> None:
    canvas.rectangle((22, 32, 42, 44), fill=PALETTE["yellow"])


def between_colours(canvas: ImageDraw.ImageDraw) -> None:
    ImageDraw.floodfill(canvas._image, (32, 32), (190, 42, 118))  # red and purple


def of_two_grounds(canvas: ImageDraw.ImageDraw) -> None:
    canvas.rectangle((0, 0, 63, 10), fill=PALETTE["white"])


@pytest.mark.parametrize(
    ("shapes", "change", "reason"),
    [
        ([], None, "has 0 shapes, not one or two"),
        ([STAR, SQUARE, ("red", "ring", (28, 44, 38, 54))], None, "has 3 shapes, not one or two"),
        ([("yellow", "star", (20, 6, 40, 26)), ("green", "square", (22, 36, 42, 56))], None,
         "has two shapes, but not side by side"),
        ([("red", "circle", (10, 20, 54, 44))], None, "too stretched"),
        ([], rounded, "between"),
        ([CIRCLE], two_coloured, "of its inside"),
        ([CIRCLE], between_colours, "has the colour"),
        ([CIRCLE], of_two_grounds, "of its border"),
    ],
)  # fmt: skip
def test_a_picture_that_is_not_of_clear_shapes_is_refused_and_named(
    shapes: list[tuple[str, str, Box]], change: Any, reason: str
) -> None:
    image = picture("blue", *shapes)
    if change is not None:
        change(ImageDraw.Draw(image))

    assert reason in why_not(image, RED_CIRCLE)


def test_noise_shows_nothing() -> None:
    grain = np.random.default_rng(0).integers(0, 256, (SIZE_PX, SIZE_PX, 3), dtype=np.uint8)

    assert judge(Image.fromarray(grain)).shown is None


def test_a_picture_of_another_size_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="resize it to 64x64"):
        judge(Image.new("RGB", (128, 64)))


def test_a_caption_without_a_background_takes_any() -> None:
    assert shows(draw(RED_CIRCLE, random.Random(5)), "a red circle")
    assert not shows(draw(RED_CIRCLE, random.Random(5)), "a red square")


def test_captions_in_any_style_are_read_back() -> None:
    rng = random.Random(6)
    for _ in range(300):
        scene, text = sample(rng)
        stated = parse(text)
        assert stated.items == scene.items
        assert stated.background in (None, scene.background)


def test_the_right_item_may_be_named_first() -> None:
    text = caption(TWO, CaptionStyle(right_of=True))

    assert text == "a green square right of a yellow star on a black background"
    assert parse(text) == TWO


def test_an_article_suits_its_colour() -> None:
    scene = Scene("blue", (Item("orange", "ring"),))

    assert caption(scene) == "an orange ring on a blue background"
    assert parse("a orange ring on a blue background") == scene


@pytest.mark.parametrize(
    "text", ["", "a cat", "a pink circle", "a red circle on a pink background"]
)
def test_other_text_is_no_caption(text: str) -> None:
    with pytest.raises(ValueError, match="is no caption of shapes"):
        parse(text)


def test_held_out_combinations_are_never_trained_on() -> None:
    rng = random.Random(7)

    assert not any(is_held_out(sample(rng)[0]) for _ in range(500))


def test_the_held_out_prompts_are_100_of_each_kind_and_fixed() -> None:
    chosen = prompts(100)

    assert len(set(chosen)) == 200
    assert all(is_held_out(parse(text)) for text in chosen)
    assert [len(parse(text).items) for text in chosen] == [1] * 100 + [2] * 100
    assert chosen == prompts(100)
    assert chosen[0] == "a white triangle on a green background"
