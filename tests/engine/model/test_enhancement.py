"""Prompts that a pipeline rewrites when it is asked to: the pictures are plain diffusers' own."""

from typing import Any

import numpy as np
import pytest
import torch

import carpool
from support.tiny.ernie import ernie
from support.tiny.parts import qwen2_tokenizer
from support.tiny.writers import qwen3


@pytest.mark.parametrize("is_asked", [True, False])
def test_ernie_draws_the_prompt_that_it_rewrote_and_tells_it(is_asked: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        pipe = ernie()
    tokenizer = qwen2_tokenizer()
    tokenizer.model_max_length = 12  # tokens that it writes
    pipe.register_modules(pe=qwen3().eval(), pe_tokenizer=tokenizer)
    options: Any = {"width": 32, "height": 32, "num_inference_steps": 2}
    torch.manual_seed(5)
    plain = pipe("a cat", generator=torch.Generator().manual_seed(5), use_pe=is_asked, **options)

    with carpool.load(pipe) as engine:
        [output] = engine.generate(["a cat"], seed=5, enhance_prompt=is_asked, **options)
        writers = [task.name for task in engine.card.writers]

    expected = plain.revised_prompts[0] if is_asked else None
    assert output.settings.get("revised_prompt") == expected
    assert np.abs(np.asarray(output.images[0], int) - np.asarray(plain.images[0], int)).max() <= 1
    assert writers == ["text-generation:pe"]
