"""Pipelines of diffusers that write prompts before they draw: pictures as plain diffusers' own."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2VideoCondition
from diffusers.pipelines.ltx2.utils import I2V_DEFAULT_SYSTEM_PROMPT
from PIL import Image

from carpool.config import EngineSettings
from carpool.engine.group.load import load
from carpool.engine.model.rewriter import instructed
from carpool.errors import Cancelled
from carpool.request.enhancement import ALWAYS
from support.engine_driver import CLOSE, driving, for_inference, gap
from support.newcomers import NEWCOMERS
from support.tiny import ARGUMENTS, tiny_pipeline
from support.tiny.builders import gemma_processor
from support.tiny.newest import components
from support.tiny.parts import part, qwen2_tokenizer
from support.tiny.writers import writer
from support.watchdog import watching

PROMPTS = ("a cat", "a red circle on a blue background", "two dogs", "a star")
TEMPLATE = """{% set content = messages[-1].content %}\
{{ (content if content is string else content[-1].text)[-32:] }} Output:"""


def reader(tokenizer: Any) -> Any:
    """A tokenizer that stands for a processor, and reads the end of instructions only."""
    tokenizer.chat_template, tokenizer.tokenizer = TEMPLATE, tokenizer
    return tokenizer


def enhancing() -> diffusers.ErnieImagePipeline:
    tokenizer = reader(qwen2_tokenizer())
    tokenizer.model_max_length = 12  # tokens that it writes
    return diffusers.ErnieImagePipeline(
        **{**tiny_pipeline("ernie").components, "pe": writer(), "pe_tokenizer": tokenizer}
    )


def upsampling() -> diffusers.Flux2Pipeline:
    """Its prompts are padded to 2048 tokens."""
    pipe = tiny_pipeline("flux2")
    pipe.tokenizer.tokenizer = pipe.tokenizer
    words = pipe.text_encoder.config.text_config.vocab_size
    pipe.text_encoder.generation_config.eos_token_id = list(range(0, words, 9))
    return pipe


def improving() -> diffusers.LTX2Pipeline:
    """Its prompts are padded to a multiple of eight tokens, on the left."""
    pipe = tiny_pipeline("ltx2")
    pipe.register_modules(processor=gemma_processor())
    return pipe


def looking(cls: Any = diffusers.LTX2ImageToVideoPipeline) -> Any:
    """Its prompts are of what it sees, by instructions that it has for that."""
    return cls(**{name: part for name, part in improving().components.items() if part is not None})


def looking_at_conditions() -> Any:
    return looking(diffusers.LTX2ConditionPipeline)


def improving_in_context() -> Any:
    return looking(diffusers.LTX2InContextPipeline)


def improving_between_frames() -> Any:
    make, _ = NEWCOMERS["LTX2DFRPipeline"]
    pipe = make()
    pipe.register_modules(processor=gemma_processor())
    return pipe


def rewriting() -> diffusers.LongCatImagePipeline:
    processor = reader(qwen2_tokenizer())
    parts = components("LongCatImagePipeline", without=("text_processor",))
    return diffusers.LongCatImagePipeline(**parts, text_processor=processor)


def expanding() -> diffusers.Kandinsky6TI2VAPipeline:
    parts = components("Kandinsky6TI2VAPipeline", without=("tokenizer",))
    return diffusers.Kandinsky6TI2VAPipeline(**parts, tokenizer=reader(qwen2_tokenizer()))


def captioning() -> diffusers.Ideogram4Pipeline:
    """Its text encoder writes, too, with a head of its own, in a model that it builds itself."""
    parts = components("Ideogram4Pipeline", without=("tokenizer",))
    parts["text_encoder"].config.text_config.eos_token_id = list(range(0, 727, 9))
    return diffusers.Ideogram4Pipeline(**parts, tokenizer=reader(qwen2_tokenizer()))


def blocks_of(pipe: diffusers.ModularPipeline, plain: Any, **others: Any) -> Any:
    """A modular pipeline of another one's components."""
    have = {**plain.components, **others}
    pipe.update_components(**{n: have[n] for n in pipe.pretrained_component_names if n in have})
    return pipe


def always_enhancing() -> Any:
    """Its block for texts in free words, which no argument of a call chooses."""
    plain, pipe = enhancing(), diffusers.ErnieImageModularPipeline()
    pipe._blocks = pipe.blocks.get_execution_blocks(prompt="a", use_pe=True)
    return blocks_of(pipe, plain)


def improving_in_blocks() -> Any:
    return blocks_of(diffusers.LTX2ModularPipeline(), improving(), prompt_enhancer=part("gemma3"))


def looking_in_blocks() -> Any:
    return improving_in_blocks()


def captioning_in_blocks() -> Any:
    return blocks_of(diffusers.Ideogram4ModularPipeline(), captioning())


WRITTEN = {
    "enable_prompt_enhancement": True, "system_prompt": "improve", "prompt_max_new_tokens": 12,
}  # fmt: skip
SQUARE = {"height": 64, "width": 64}
CAPTION = {**SQUARE, "prompt_upsampling": True, "max_sequence_length": 40, "num_inference_steps": 1}
SLOW = {improving, improving_in_blocks, captioning_in_blocks}
SLOW |= {looking_in_blocks, looking_at_conditions, improving_in_context}
SEEN = Image.linear_gradient("L").resize((40, 32)).convert("RGB")
MADE: dict[Callable[[], Any], tuple[dict[str, Any], str]] = {
    enhancing: ({"height": 32}, "pe"),
    upsampling: (
        {
            "height": 32, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3),
            "caption_upsample_temperature": 2.0,
        },
        "text_encoder",
    ),
    improving: ({**ARGUMENTS["ltx2"], **WRITTEN}, "text_encoder"),
    rewriting: ({**SQUARE, "guidance_scale": 2.0}, "text_encoder"),
    expanding: (
        {
            **SQUARE, "num_frames": 5, "sample_audio": False, "expand_prompts": True,
            "max_sequence_length": 20,
        },
        "text_encoder",
    ),
    captioning: (
        {**CAPTION, "guidance_scale": 5.0, "guidance_schedule": None}, "_prompt_enhancer"
    ),
    always_enhancing: ({"height": 32}, "pe"),
    captioning_in_blocks: ({**CAPTION, "guidance_schedule": (5.0,)}, "_prompt_enhancer"),
}  # fmt: skip


MADE[looking] = {**MADE[improving][0], "image": SEEN, "image_crf": 0}, "text_encoder"
del MADE[looking][0]["system_prompt"]
MADE[improving_in_context] = MADE[improving]
MADE[improving_between_frames] = ({**NEWCOMERS["LTX2DFRPipeline"][1], **WRITTEN}, "text_encoder")
seen: dict[str, Any] = {"conditions": [LTX2VideoCondition(SEEN, 0, 1.0, 0)]}
MADE[looking_at_conditions] = {**MADE[improving][0], **seen}, "text_encoder"
MADE[improving_in_blocks] = dict(MADE[improving][0]), "prompt_enhancer"
del MADE[improving_in_blocks][0]["spatio_temporal_guidance_blocks"]
seen = {"image": SEEN, "image_crf": 0}
MADE[looking_in_blocks] = {**MADE[improving_in_blocks][0], **seen}, "prompt_enhancer"


def drawn(outcome: Any) -> torch.Tensor:
    names = ("images", "frames", "videos")
    return torch.as_tensor(next(outcome[name] for name in names if name in outcome))


def drawn_alone(judge: Any, **arguments: Any) -> torch.Tensor:
    answer = judge(**arguments)
    return drawn(answer.values if isinstance(judge, diffusers.ModularPipeline) else answer)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "made", [pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in MADE]
)
def test_pictures_of_written_prompts_are_those_drawn_alone(made: Callable[[], Any]) -> None:
    def fresh() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            pipe = made()
        return for_inference(pipe)

    own, component = MADE[made]
    steps = {} if made is improving_between_frames else {"num_inference_steps": 2}
    arguments = {**steps, **own, "output_type": "latent"}
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
        given = {**arguments, **sizes[seed], "prompt": PROMPTS[seed], "generator": generator}
        if made is looking:
            given = instructed(judge, given)
            assert given["system_prompt"] == I2V_DEFAULT_SYSTEM_PROMPT
        assert recorder.error is None
        assert gap(drawn(recorder.outcome.fields), drawn_alone(judge, **given)) < CLOSE
        prompt = recorder.outcome.settings["revised_prompt"]
        assert prompt != PROMPTS[seed]
        assert [event.text for event in recorder.events if event.kind == "prompt"][-1] == prompt
        assert recorder.outcome.warnings == ()


@pytest.mark.parametrize(
    ("pipe", "expected"),
    [
        (improving_in_blocks, "enable_prompt_enhancement"),
        (lambda: blocks_of(diffusers.LTX2ModularPipeline(), improving()), ""),  # no enhancer
        (always_enhancing, ALWAYS),
        (lambda: blocks_of(diffusers.ErnieImageModularPipeline(), enhancing()), ""),
    ],
)
def test_blocks_rewrite_prompts_as_their_card_says(pipe: Callable[[], Any], expected: str) -> None:
    assert load(pipe(), EngineSettings(device="cpu")).card.enhancer == expected
