"""The server's own rewriter: a causal language model that rewrites prompts for any pipeline.

It is a component of the pipeline like any other: its tokens are calls in the same loop as denoising
steps. It always takes the likeliest token, so a prompt has one rewriting.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import ModularPipeline
from torch import nn
from transformers import StoppingCriteriaList

from carpool.engine.fiber import current_context
from carpool.engine.foreign_code import all_blocks
from carpool.engine.model.language_models import reader_beside
from carpool.engine.model.text_pipeline import WrittenText
from carpool.errors import InvalidValue, LoadFailed
from carpool.request.enhancement import NAME, REWRITER

TOKENIZER = f"{REWRITER}_tokenizer"
INSTRUCTION = (
    "Rewrite the user's text as one detailed prompt for a model that draws pictures. "
    "Keep everything that the text says. Answer with the prompt only."
)
MOST_TOKENS = 512  # limit of a rewritten prompt, if the model has none
METHODS = (
    "upsample_prompt", "enhance_prompt", "rewire_prompt", "_enhance_prompt_with_pe",
    "expand_prompts", "get_image_caption",
)  # fmt: skip
"""Methods that write prompts: of FLUX.2, Ideogram 4; LTX-2; LongCat-Image; ERNIE-Image;
Kandinsky 6; Qwen-Image-Layered."""


def attach(
    pipe: Any, model: str, dtype: torch.dtype, device: torch.device, undo: ExitStack
) -> None:
    """Load a rewriter and add it to a pipeline as a component.

    Args:
        model: a folder or a hub id of a causal model of transformers with a chat template.
        undo: removes it again.

    Raises:
        LoadFailed: `model` is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder := Path(model).expanduser()).is_dir():
        model = str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        rule = "must be a folder or a hub id of a causal language model of transformers"
        raise LoadFailed(f"rewriter {model!r}: {rule} ({reason:.300})") from error
    if tokenizer.chat_template is None:
        raise LoadFailed(f"rewriter {model!r} has no chat template: take an instructed model")
    attributes = vars(pipe)
    attributes[REWRITER] = network.to(device).eval().requires_grad_(False)
    attributes[TOKENIZER] = tokenizer
    for name in (REWRITER, TOKENIZER):
        undo.callback(attributes.pop, name, None)


def build(pipe: Any, undo: ExitStack) -> None:
    """Build the rewriter of Ideogram 4 now, as a component; diffusers builds it at first use."""
    if (head := getattr(pipe, "prompt_enhancer_head", None)) is not None:
        from diffusers.pipelines.ideogram4.prompt_enhancer import build_prompt_enhancer

        enhancer = build_prompt_enhancer(pipe.text_encoder, head)
        blocks = all_blocks(pipe._blocks) if isinstance(pipe, ModularPipeline) else ()
        for owner in (pipe, *blocks):
            if owner is pipe or hasattr(owner, "_prompt_enhancer"):
                before = vars(owner).get("_prompt_enhancer")
                undo.callback(setattr, owner, "_prompt_enhancer", before)
                owner._prompt_enhancer = enhancer


def instructed(pipe: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the instructions that LTX-2.0 and 2.3 need in order to rewrite a prompt."""
    is_on = arguments.get("enable_prompt_enhancement") and arguments.get("system_prompt") is None
    if is_on and getattr(pipe, "prompt_enhancer", pipe) is None:
        from diffusers.pipelines.ltx2 import utils  # their authors' own

        has_picture = any(arguments.get(name) is not None for name in ("image", "conditions"))
        name = f"{'I' if has_picture else 'T'}2V_DEFAULT_SYSTEM_PROMPT"
        arguments = {**arguments, "system_prompt": getattr(utils, name)}
    return arguments


class TellPrompt(Protocol):
    """Called with the prompt as written so far, and at the end with the whole prompt."""

    def __call__(self, text: str, *, is_whole: bool = False) -> object: ...


def rewrite(pipe: Any, prompt: str, tell: TellPrompt) -> str:
    """Rewrite a prompt in a request's fiber; an empty answer keeps the prompt.

    Raises:
        InvalidValue: the prompt is longer than the model's limit.
    """
    model, tokenizer = getattr(pipe, REWRITER), getattr(pipe, TOKENIZER)
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt",
        enable_thinking=False,
    )  # fmt: skip
    read = inputs["input_ids"].shape[1]
    limit = model.generation_config.max_new_tokens or MOST_TOKENS
    place = getattr(model.config, "max_position_embeddings", None)
    if place is not None and read + limit > place:
        raise InvalidValue(
            f"{NAME}: the prompt is {read} tokens, and the rewriter reads at most "
            f"{place - limit}: shorten it, or send {NAME}=false",
            param=NAME,
        )
    options = watched(tokenizer, tell, {"max_new_tokens": limit, "do_sample": False})
    ids = model.generate(**inputs.to(model.device), **options)
    return answer_in(tokenizer.decode(ids[0, read:], skip_special_tokens=True)) or prompt


def answer_in(text: str) -> str:
    """The answer in a model's output, without its thinking."""
    return text.rpartition("</think>")[2].strip()


def watched(tokenizer: Any, tell: TellPrompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `generate` that report the text as it is written."""
    text = ""

    def add(piece: str, tokens: int, limit: int) -> None:
        nonlocal text
        text += piece
        tell(text)

    criteria = [*(options.get("stopping_criteria") or ()), WrittenText(tokenizer, (), 0, add)]
    return {**options, "stopping_criteria": StoppingCriteriaList(criteria)}


@contextmanager
def noting(pipe: Any, note: Callable[[str], object], tell: TellPrompt) -> Iterator[None]:
    """Record each prompt that a pipeline rewrites by one of its own methods.

    Args:
        tell: called while one of the pipeline's models writes for such a method, or for any block.
    """
    attributes = vars(pipe)
    names = [name for name in METHODS if callable(getattr(pipe, name, None))]
    saved = {name: attributes[name] for name in names if name in attributes}

    def watch(module: nn.Module, options: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = {**pipe.components, **attributes}
        name = next((name for name, part in parts.items() if part is module), "")
        reader = reader_beside(parts, name, module) if name else None
        tokenizer = getattr(reader, "tokenizer", reader)
        return options if tokenizer is None else watched(tokenizer, tell, options)

    for name in names:
        attributes[name] = partial(_noted, getattr(pipe, name), note, watch)
    if isinstance(pipe, ModularPipeline):
        current_context().watch = watch
    try:
        yield
    finally:
        for name in names:
            del attributes[name]
        attributes.update(saved)


def _noted(
    method: Callable[..., Any], note: Callable[[str], object], watch: Any, *args: Any, **kw: Any
) -> Any:
    context = current_context()
    context.watch = watch
    try:
        answer = method(*args, **kw)
    finally:
        context.watch = None
    text = answer[0] if isinstance(answer, (list, tuple)) and answer else answer
    if isinstance(text, str):
        note(text)
    return answer
