"""The server's own rewriter: a causal language model that writes prompts anew for any pipeline.

It is a component of the pipeline like any other: the tokens that it writes are calls in the same
loop as denoising steps. It takes the likeliest token each time, so a prompt has one rewriting.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from carpool.errors import InvalidValue, LoadFailed
from carpool.request.enhancement import NAME, REWRITER

TOKENIZER = f"{REWRITER}_tokenizer"
INSTRUCTION = (
    "Rewrite the user's text as one detailed prompt for a model that draws pictures. "
    "Keep everything that the text says. Answer with the prompt only."
)
MOST_TOKENS = 512  # of a rewritten prompt, where the model has no limit of its own
METHODS = ("upsample_prompt", "enhance_prompt", "rewire_prompt", "_enhance_prompt_with_pe")
"""Methods of pipelines that write prompts anew: FLUX.2, LTX-2, LongCat-Image, ERNIE-Image."""


def attach(
    pipe: Any, model: str, dtype: torch.dtype, device: torch.device, undo: ExitStack
) -> None:
    """Load a rewriter and make it a component of a pipeline.

    Args:
        model: a folder or a hub id of a causal model of transformers with a chat template.
        undo: takes it away again.

    Raises:
        LoadFailed: it is no such model.
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
    own = vars(pipe)
    own[REWRITER] = network.to(device).eval().requires_grad_(False)
    own[TOKENIZER] = tokenizer
    for name in (REWRITER, TOKENIZER):
        undo.callback(own.pop, name, None)


def rewrite(pipe: Any, prompt: str) -> str:
    """Write a prompt anew, in a request's fiber; one for which the model has no words stays.

    Raises:
        InvalidValue: the prompt is longer than the model reads.
    """
    model, tokenizer = getattr(pipe, REWRITER), getattr(pipe, TOKENIZER)
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": prompt},
    ]
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
    ids = model.generate(**inputs.to(model.device), max_new_tokens=limit, do_sample=False)
    text = tokenizer.decode(ids[0, read:], skip_special_tokens=True)
    return str(text).rpartition("</think>")[2].strip() or prompt


@contextmanager
def noting(pipe: Any, note: Callable[[str], object]) -> Iterator[None]:
    """Note each prompt that a pipeline writes anew by a method of its own."""
    own, names = vars(pipe), [name for name in METHODS if callable(getattr(pipe, name, None))]
    saved = {name: own[name] for name in names if name in own}
    for name in names:
        own[name] = partial(_noted, getattr(pipe, name), note)
    try:
        yield
    finally:
        for name in names:
            del own[name]
        own.update(saved)


def _noted(method: Callable[..., Any], note: Callable[[str], object], *args: Any, **kw: Any) -> Any:
    answer = method(*args, **kw)
    text = answer[0] if isinstance(answer, (list, tuple)) and answer else answer
    if isinstance(text, str):
        note(text)
    return answer
