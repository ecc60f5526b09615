"""Part *language*: tokens a second of a language model that pipelines use for prompts.

It runs `generate` of Z-Image's text model (4 billion random weights) with one prompt and with
batches: the possible gain of shared tokens. *Floor*: reading all weights once per token, at the
speed of a copy on this device.
"""

from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_build import Rig, filled
from benchmarks.gpu_records import Rows
from carpool_lab.plan.names import known

TOKENS, PROMPT = 64, 128
WIDTHS = (1, 2, 6, 16)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


def measure(rig: Rig, rows: Rows) -> None:
    config = dict(known()["Z-Image-Turbo"]["components"]["text_encoder"][2])
    with init_empty_weights():  # buffers are computed
        empty = Qwen3ForCausalLM(Qwen3Config(**{**config, **(SMALL if rig.is_tiny else {})}))
    model = filled(empty.eval(), rig.device, rig.dtype)
    n_bytes = sum(weight.nbytes for weight in model.parameters())
    source = torch.ones(1 << 24, device=rig.device)
    floor_s = n_bytes / (2 * source.nbytes / rig.marks.seconds(source.clone))
    for width in WIDTHS:
        rows.measure(f"{width} prompts", partial(_row, rig, model, width, floor_s), needs_s=15)


def _row(rig: Rig, model: Any, width: int, floor_s: float) -> dict[str, Any]:
    tokens = 4 if rig.is_tiny else TOKENS
    ids = torch.randint(0, model.config.vocab_size, (width, PROMPT), device=rig.device)
    write = partial(model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False,
                    min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)  # fmt: skip
    took_s = rig.marks.seconds(write, min_runs=1)
    return {"tokens/s": width * tokens / took_s, "ms a token": 1e3 * took_s / tokens,
            "floor ms": 1e3 * floor_s}  # fmt: skip
