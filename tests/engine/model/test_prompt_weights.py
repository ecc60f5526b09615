"""Weighted prompts: the picture is plain diffusers' with embeddings of compel, used by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compel")

from compel import Compel, CompelForSD, CompelForSDXL, ReturnedEmbeddingsType
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file

from carpool.types import Request
from support.engine_driver import CLOSE, Drive, Recorder, driving, fresh, gap, plain
from support.tiny import ARGUMENTS, checkpoint

LONG = ", ".join(["a red circle beside a blue star"] * 9)
PROMPTS = {  # as AUTOMATIC1111 writes them; as compel does; as words
    "a (red:1.5) circle": ("a (red)1.5 circle", "a red circle"),
    "a [red] circle, ((blue) star:1.2)": (
        "a (red)0.9090909 circle, ((blue)1.1 star)1.2",
        "a red circle, blue star",
    ),
    "(red:0.4) on (blue:0)": ("(red)0.4 on (blue)0", "red on blue"),
    r"a \(red\) (circle)": (r"a \(red\) (circle)1.1", "a (red) circle"),
    f"{LONG}, (green:1.4)": (f"{LONG}, (green)1.4", f"{LONG}, green"),
}
NEGATIVE = "(blue:1.3) star", ("(blue)1.3 star", "blue star")


def arguments_of(family: str, **arguments: Any) -> dict[str, Any]:
    usual = {name: value for name, value in ARGUMENTS[family].items() if "prompt" not in name}
    return {**usual, "num_inference_steps": 2, "guidance_scale": 4.0, **arguments}


def by_hand(family: str, prompt: str, negative: str | None, **arguments: Any) -> torch.Tensor:
    """A picture of diffusers', with embeddings that compel makes of its own notation."""
    pipe: Any = plain(family)
    notation, words = PROMPTS[prompt]
    negative_notation, negative_words = NEGATIVE[1] if negative else (None, None)
    if family == "sd15":
        made = CompelForSD(pipe)(notation, negative_prompt=negative_notation or "")
    else:
        made = CompelForSDXL(pipe)(notation, negative_prompt=negative_notation)
        _, _, *pooled = pipe.encode_prompt(words, negative_prompt=negative_words)
        arguments["pooled_prompt_embeds"] = pooled[0]
        arguments["negative_pooled_prompt_embeds"] = pooled[1] if negative else None
    embeds = {"prompt_embeds": made.embeds, "negative_prompt_embeds": made.negative_embeds}
    generator = torch.Generator().manual_seed(3)
    picture = pipe(generator=generator, **embeds, **arguments).images
    assert isinstance(picture, torch.Tensor)
    return picture


def asked(drive: Drive, prompt: str, **parameters: Any) -> Recorder:
    return drive.put(Request(prompt, seed=3, **{"prompt_weights": True, **parameters}))


def picture_of(recorder: Recorder) -> torch.Tensor:
    [outcome] = recorder.outcomes
    if outcome.error is not None:
        raise outcome.error
    image = outcome.fields["images"]
    assert isinstance(image, torch.Tensor)
    return image


@pytest.mark.parametrize("negative", [NEGATIVE[0], None])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_weighted_prompt_is_drawn_as_by_compel_and_the_encoders_calls_are_shared(
    family: str, negative: str | None
) -> None:
    arguments = arguments_of(family)

    with driving(family) as drive:
        asks = {p: asked(drive, p, negative_prompt=negative, **arguments) for p in PROMPTS}
        drive.finish()
        widest = drive.widest("text_encoder"), drive.widest("unet")

    for prompt, recorder in asks.items():
        assert gap(picture_of(recorder), by_hand(family, prompt, negative, **arguments)) < CLOSE
        assert not recorder.outcomes[0].warnings, prompt
        assert recorder.outcomes[0].settings["prompt"] == prompt
        assert recorder.outcomes[0].settings["prompt_weights"] is True
    assert min(widest) >= 3


def test_weights_count_and_without_them_the_picture_is_the_plain_one() -> None:
    arguments = arguments_of("sd15", guidance_scale=1.0)

    with driving("sd15") as drive:
        heavy = asked(drive, "a (red:1.5) circle", negative_prompt="a star", **arguments)
        light = asked(drive, "a red circle", **arguments)
        words = asked(drive, "a red circle", prompt_weights=None, **arguments)
        drive.finish()

    assert gap(picture_of(light), picture_of(words)) < CLOSE
    assert gap(picture_of(heavy), picture_of(words)) > 50 * CLOSE
    assert "negative_prompt had no effect" in heavy.outcomes[0].warnings[0]


def test_the_last_layer_is_skipped_as_by_compel() -> None:
    [prompt, *_], arguments = PROMPTS, arguments_of("sd15")
    pipe: Any = plain("sd15")
    pipe.text_encoder.__dict__["text_model"] = pipe.text_encoder  # as transformers 4 has it
    layer = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NORMALIZED
    compel = Compel(pipe.tokenizer, pipe.text_encoder, returned_embeddings_type=layer)
    embeds = {"prompt_embeds": compel(PROMPTS[prompt][0]), "negative_prompt_embeds": compel("")}

    with driving("sd15") as drive:
        recorder = asked(drive, prompt, clip_skip=1, **arguments)
        drive.finish()

    expected = pipe(generator=torch.Generator().manual_seed(3), **embeds, **arguments).images
    assert gap(picture_of(recorder), expected) < CLOSE


def test_a_word_of_an_embedding_file_has_all_its_vectors(tmp_path: Path) -> None:
    vectors = torch.linspace(-1, 1, 64).reshape(2, 32)
    save_file({"emb_params": vectors}, tmp_path / "zorp.safetensors")
    arguments = arguments_of("sd15")
    by_diffusers: Any = fresh("sd15")
    by_diffusers.load_textual_inversion(vectors, token="zorp")

    with driving(checkpoint("sd15"), embeddings=str(tmp_path)) as drive:
        recorder = asked(drive, "a (zorp:1.3)", **arguments)
        drive.finish()

    made = CompelForSD(by_diffusers)("a (zorp zorp_1)1.3", negative_prompt="")
    embeds = {"prompt_embeds": made.embeds, "negative_prompt_embeds": made.negative_embeds}
    generator = torch.Generator().manual_seed(3)
    expected = by_diffusers(generator=generator, **embeds, **arguments).images
    assert gap(picture_of(recorder), expected) < CLOSE


def test_a_prompt_that_looks_weighted_is_warned_about_where_it_was_not_asked_for() -> None:
    prompt, arguments = "a (red:1.5) circle", arguments_of("sd15")
    with driving("sd15") as drive:
        silent = asked(drive, prompt, prompt_weights=None, **arguments)
        chosen = asked(drive, prompt, prompt_weights=False, **arguments)
        drive.finish()
    own_class = type("Own", (StableDiffusionPipeline,), {})  # it may read weights by itself
    with driving(own_class(**fresh("sd15").components, requires_safety_checker=False)) as drive:
        own = asked(drive, prompt, prompt_weights=None, **arguments)
        drive.finish()

    [warning] = silent.outcomes[0].warnings
    assert warning.startswith('prompt has "(red:1.5)", drawn as words: send prompt_weights=true')
    assert not chosen.outcomes[0].warnings
    assert not own.outcomes[0].warnings
