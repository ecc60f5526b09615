"""Pipelines of diffusers that write prompts before they draw: pictures as plain diffusers' own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    ErnieImagePipeline,
    Flux2Pipeline,
    Ideogram4Pipeline,
    Kandinsky6TI2VAPipeline,
    LongCatImagePipeline,
    LTX2Pipeline,
)

from carpool.errors import Cancelled
from support.engine_driver import CLOSE, driving, gap
from support.tiny.ernie import ernie
from support.tiny.flux2 import flux2
from support.tiny.ltx2 import ARGUMENTS, ltx2
from support.tiny.newest import components
from support.tiny.parts import gemma_tokenizer, qwen2_tokenizer
from support.tiny.writers import qwen3
from support.watchdog import watching

PROMPTS = ("a cat", "a red circle on a blue background", "two dogs", "a star")
TEMPLATE = """{% set content = messages[-1].content %}\
{{ (content if content is string else content[-1].text)[-32:] }} Output:"""


def reader(tokenizer: Any) -> Any:
    """A tokenizer that stands for a processor, and reads the end of instructions only."""
    tokenizer.chat_template, tokenizer.tokenizer = TEMPLATE, tokenizer
    return tokenizer


def enhancing() -> ErnieImagePipeline:
    tokenizer = reader(qwen2_tokenizer())
    tokenizer.model_max_length = 12  # tokens that it writes
    return ErnieImagePipeline(**{**ernie().components, "pe": qwen3(), "pe_tokenizer": tokenizer})


def upsampling() -> Flux2Pipeline:
    """Its prompts are padded to 2048 tokens."""
    pipe = flux2()
    pipe.tokenizer.tokenizer = pipe.tokenizer
    words = pipe.text_encoder.config.text_config.vocab_size
    pipe.text_encoder.generation_config.eos_token_id = list(range(0, words, 9))
    return pipe


def improving() -> LTX2Pipeline:
    """Its prompts are padded to a multiple of eight tokens, on the left."""
    pipe = ltx2()
    pipe.register_modules(processor=reader(gemma_tokenizer()))
    return pipe


def rewriting() -> LongCatImagePipeline:
    processor = reader(qwen2_tokenizer())
    parts = components("LongCatImagePipeline", without=("text_processor",))
    return LongCatImagePipeline(**parts, text_processor=processor)


def expanding() -> Kandinsky6TI2VAPipeline:
    parts = components("Kandinsky6TI2VAPipeline", without=("tokenizer",))
    return Kandinsky6TI2VAPipeline(**parts, tokenizer=reader(qwen2_tokenizer()))


def captioning() -> Ideogram4Pipeline:
    """Its text encoder writes, too, with a head of its own, in a model that it builds itself."""
    parts = components("Ideogram4Pipeline", without=("tokenizer",))
    parts["text_encoder"].config.text_config.eos_token_id = list(range(0, 727, 9))
    return Ideogram4Pipeline(**parts, tokenizer=reader(qwen2_tokenizer()))


SQUARE = {"height": 64, "width": 64}
MADE: dict[Callable[[], Any], tuple[dict[str, Any], str]] = {
    enhancing: ({"height": 32}, "pe"),
    upsampling: (
        {
            "height": 32, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3),
            "caption_upsample_temperature": 2.0,
        },
        "text_encoder",
    ),
    improving: (
        {
            **ARGUMENTS["ltx2"], "enable_prompt_enhancement": True, "system_prompt": "improve",
            "prompt_max_new_tokens": 12,
        },
        "text_encoder",
    ),
    rewriting: ({**SQUARE, "guidance_scale": 2.0}, "text_encoder"),
    expanding: (
        {
            **SQUARE, "num_frames": 5, "sample_audio": False, "expand_prompts": True,
            "max_sequence_length": 20,
        },
        "text_encoder",
    ),
    captioning: (
        {
            **SQUARE, "guidance_scale": 5.0, "guidance_schedule": None, "prompt_upsampling": True,
            "max_sequence_length": 40, "num_inference_steps": 1,
        },
        "_prompt_enhancer",
    ),
}  # fmt: skip


def drawn(outcome: Any) -> torch.Tensor:
    picture = outcome["images"] if "images" in outcome else outcome["frames"]
    return torch.as_tensor(picture)


@pytest.mark.parametrize("made", MADE)
def test_pictures_of_written_prompts_are_those_drawn_alone(made: Callable[[], Any]) -> None:
    def fresh() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            pipe = made()
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        return pipe

    own, component = MADE[made]
    arguments = {"num_inference_steps": 2, **own, "output_type": "latent"}
    sizes = [{"width": 32 + 32 * (number % 2)} for number in range(4)]
    if "width" in own:
        sizes = [{}] * 4
    with watching(), driving(fresh()) as drive:
        heard = [drive.submit(PROMPTS[i], seed=i, **arguments, **sizes[i]) for i in range(2)]
        given_up = drive.submit("one more", seed=9, request_id="up", **arguments)
        drive.turn(5)
        heard += [drive.submit(PROMPTS[i], seed=i, **arguments, **sizes[i]) for i in (2, 3)]
        drive.turn(2)
        drive.engine.cancel("up")
        drive.finish()

    assert isinstance(given_up.error, Cancelled)
    assert drive.widest(component, "generate") >= 2
    judge = fresh()
    for seed, recorder in enumerate(heard):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        answer = judge(prompt=PROMPTS[seed], generator=generator, **arguments, **sizes[seed])
        assert recorder.error is None
        assert gap(drawn(recorder.outcome.fields), drawn(answer)) < CLOSE
        prompt = recorder.outcome.settings["revised_prompt"]
        assert prompt != PROMPTS[seed]
        assert [event.text for event in recorder.events if event.kind == "prompt"][-1] == prompt
        assert recorder.outcome.warnings == ()
