"""Pipelines of diffusers that write prompts before they draw: pictures as plain diffusers' own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ErnieImagePipeline, Flux2Pipeline

from carpool.errors import Cancelled
from support.engine_driver import CLOSE, driving, gap
from support.tiny.ernie import ernie
from support.tiny.flux2 import flux2
from support.tiny.parts import qwen2_tokenizer
from support.tiny.writers import qwen3

PROMPTS = ("a cat", "a red circle on a blue background", "two dogs", "a star")


def enhancing() -> ErnieImagePipeline:
    tokenizer = qwen2_tokenizer()
    tokenizer.model_max_length = 12  # tokens that it writes
    tokenizer.chat_template = "{{ messages[0].content }} Output:"
    return ErnieImagePipeline(**{**ernie().components, "pe": qwen3(), "pe_tokenizer": tokenizer})


def upsampling() -> Flux2Pipeline:
    """Its prompts are padded to 2048 tokens, so each token runs alone."""
    pipe = flux2()
    pipe.tokenizer.tokenizer = pipe.tokenizer  # it stands for a processor
    words = pipe.text_encoder.config.text_config.vocab_size
    pipe.text_encoder.generation_config.eos_token_id = list(range(0, words, 9))
    return pipe


FLUX2 = {"max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3)}


@pytest.mark.parametrize(
    ("made", "arguments", "component", "is_shared"),
    [
        (enhancing, {}, "pe", True),
        (upsampling, {**FLUX2, "caption_upsample_temperature": 2.0}, "text_encoder", False),
    ],
)
def test_pictures_of_written_prompts_are_those_drawn_alone(
    made: Callable[[], Any], arguments: dict[str, Any], component: str, is_shared: bool
) -> None:
    def fresh() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            pipe = made()
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        return pipe

    arguments = {"height": 32, "num_inference_steps": 2, "output_type": "pt", **arguments}
    sizes = [{"width": 32 + 32 * (number % 2)} for number in range(4)]
    with driving(fresh()) as drive:
        heard = [drive.submit(PROMPTS[i], seed=i, **arguments, **sizes[i]) for i in range(2)]
        given_up = drive.submit("one more", seed=9, request_id="up", **arguments)
        drive.turn(5)
        heard += [drive.submit(PROMPTS[i], seed=i, **arguments, **sizes[i]) for i in (2, 3)]
        drive.turn(2)
        drive.engine.cancel("up")
        drive.finish()

    assert isinstance(given_up.error, Cancelled)
    assert (drive.widest(component, "generate") >= 3) == is_shared
    judge = fresh()
    for seed, recorder in enumerate(heard):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        answer = judge(prompt=PROMPTS[seed], generator=generator, **arguments, **sizes[seed])
        assert gap(recorder.image, answer.images) < CLOSE
        prompt = recorder.outcome.settings["revised_prompt"]
        assert prompt != PROMPTS[seed]
        assert [event.text for event in recorder.events if event.kind == "prompt"][-1] == prompt
        assert recorder.outcome.warnings == ()
