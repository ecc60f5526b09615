"""Pipelines that write a text before they draw, with tiny language models of many classes.

An `Author` lets its model write one of its texts, with settings of the text's own, and draws a few
steps. Its answer holds the tokens, so that they can be compared with those of plain `generate`.
"""

import copy
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from support.tiny.flux2 import mistral3
from support.tiny.glm import planner, tokenizer
from support.tiny.newest import qwen3_vl
from support.tiny.parts import drawn
from support.tiny.qwen import qwen_vl

_WORDS = 300
_SIZES: dict[str, Any] = {
    "vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def _causal(name: str, config: str = "", **changes: Any) -> Any:
    """Draw a causal model of a family, in small."""
    made = getattr(transformers, f"{name}{config}Config")(**{**_SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(made)


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=_WORDS, n_positions=256, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def _t5() -> Any:
    """Draw a model that reads with an encoder, and writes with a decoder."""
    config = transformers.T5Config(
        vocab_size=_WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> Any:
    """Draw a model whose encoder lies deeper than T5's."""
    config = transformers.BartConfig(
        vocab_size=_WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def _mllama() -> Any:
    """Draw a Llama 3.2 that sees: by layers that attend to pictures alone."""
    text = {**_SIZES, "cross_attention_layers": [1], "bos_token_id": 1, "eos_token_id": 2}
    del text["head_dim"]
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 24, "vision_output_dim": 32, "image_size": 16, "patch_size": 8,
        "intermediate_layers_indices": [0], "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }  # fmt: skip
    parts: dict[str, Any] = {"vision_config": vision, "text_config": text}
    config = transformers.MllamaConfig(**parts, image_token_index=_WORDS - 1)
    return transformers.MllamaForConditionalGeneration(config)


def _glm() -> Any:
    return planner(tokenizer())


_MIXED = ["linear_attention", "linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention"]
_LATENT: dict[str, Any] = {
    "head_dim": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "glm": _glm,  # its positions have three axes, and are kept on the model
    "qwen2.5-vl": qwen_vl,
    "qwen3": partial(_causal, "Qwen3"),
    "qwen3-vl": partial(qwen3_vl, "Qwen3VLForConditionalGeneration", 2),
    "mistral3": mistral3,
    "ministral3": partial(_causal, "Ministral3"),
    "gemma3": partial(  # its window is shorter than its texts
        _causal, "Gemma3", "Text", sliding_window=8, layer_types=[*_SLIDING, _SLIDING[0]],
        query_pre_attn_scalar=8,
    ),
    # like E2B: layers have embeddings of their own, heads of their kind's width, and the last two
    # use the keys and values of those before
    "gemma4": partial(
        _causal, "Gemma4", "Text", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=8,
        layer_types=_SLIDING * 2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=_WORDS,
        global_head_dim=16,
    ),
    "llama": partial(_causal, "Llama"),
    "gpt2": _gpt2,
    "qwen3.5": partial(
        _causal, "Qwen3_5", "Text", layer_types=_MIXED, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "t5": _t5,
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "bart": _bart,
    "deepseek2": partial(_causal, "DeepseekV2", **_LATENT),
    "deepseek3": partial(_causal, "DeepseekV3", **_LATENT),
    "bamba": partial(
        _causal, "Bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=8, attn_rotary_emb=8,
    ),
    "jamba": partial(
        _causal, "Jamba", attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=4, mamba_d_state=8, mamba_dt_rank=4,
    ),
    "mllama": _mllama,
}  # fmt: skip
Text = Mapping[str, Any]


@cache
def _model(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = drawn({**MODELS, **OTHERS}[name]())
    for path, weight in made.named_parameters():
        weight.requires_grad_(False)
        if re.search(r"(q_proj|qkv|\.q|c_attn)\.weight$", path):
            weight.mul_(4.0)  # so that places count: attention picks out few tokens
    return made.eval()


def model(name: str) -> nn.Module:
    """One of `MODELS` or `OTHERS`, with the same weights at every call."""
    made: nn.Module = _model(name)
    return copy.deepcopy(made)


def texts(name: str, count: int = 6) -> list[Text]:
    """Arguments of `generate` for texts of their own lengths, samplers and ends."""
    if name == "glm":
        return [_plan(i) for i in range(count)]
    made: list[Text] = []
    for i in range(count):
        ids = torch.tensor([[5 + (7 * i + 3 * j) % 200 for j in range(4 + 3 * i)]])
        settings: dict[str, Any] = {"do_sample": False}
        if i % 3:
            settings = {"do_sample": True, "temperature": 0.6 + 0.2 * i, "top_k": 4 + 5 * i}
        if i == 4:
            settings |= {"eos_token_id": list(range(0, 200, 5))}  # a word that ends it
        else:
            settings |= {"min_new_tokens": 6 + 4 * i}
        text: Text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name in SEEING and i % 2:
            text = SEEING[name](text, i)
        made.append({**text, "max_new_tokens": 6 + 4 * i, "pad_token_id": 0, **settings})
    return made


def _picture(text: Text, i: int) -> Text:
    """A picture of its own size before a text of Qwen 2.5 VL."""
    config = _model("qwen2.5-vl").config
    high, wide = [(4, 4), (8, 4), (4, 8)][i // 2 % 3]
    count = high * wide // 4
    start, pad, end = (
        config.vision_start_token_id,
        config.image_token_id,
        config.vision_end_token_id,
    )
    ids = torch.cat([torch.tensor([[start, *[pad] * count, end]]), text["input_ids"]], 1)
    patch = 3 * 2 * config.vision_config.patch_size**2
    noise = torch.randn(high * wide, patch, generator=torch.Generator().manual_seed(i))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.eq(ids, pad).long(),
        "pixel_values": noise,
        "image_grid_thw": torch.tensor([[1, high, wide]]),
    }


def _tiles(text: Text, i: int) -> Text:
    """A picture of one or two tiles before a text of Llama 3.2."""
    ids = torch.cat([torch.tensor([[_WORDS - 1]]), text["input_ids"]], 1)
    tiles, shown = 1 + i // 2 % 2, torch.zeros(1, ids.shape[1], 1, 2, dtype=torch.long)
    shown[..., :tiles] = 1
    noise = torch.randn(1, 1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(i))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": noise,
        "aspect_ratio_ids": torch.tensor([[tiles]]),
        "aspect_ratio_mask": shown[:, 0],
        "cross_attention_mask": shown,
    }


SEEING: dict[str, Callable[[Text, int], Text]] = {"qwen2.5-vl": _picture, "mllama": _tiles}


def _plan(i: int) -> Text:
    """A picture of its own size, planned small first, as GLM-Image has it."""
    high, wide = [(4, 4), (2, 4), (4, 2)][i % 3]
    ids = torch.tensor([[130 + j for j in range(3 + i)]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, high, wide], [1, 2, 2]]),
        "images_per_sample": torch.tensor([2]),
        "max_new_tokens": high * wide + 4 + 1,
        "do_sample": True,
    }


class Denoiser(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Draws with a matrix."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x).tanh()
        return y


class Author(DiffusionPipeline):  # type: ignore[misc]
    """Writes a text, then draws; or only draws, where it is asked for none."""

    def __init__(self, text_encoder: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder, transformer=transformer)
        self.texts: list[Text] = []

    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = 3,
        generator: torch.Generator | None = None,
    ) -> dict[str, Any]:
        x = torch.randn(1, 4, generator=generator)
        text = torch.zeros(1, 0, dtype=torch.long)
        if prompt:
            text = self.text_encoder.generate(**self.texts[int(prompt)])
        for _ in range(num_inference_steps):
            x = self.transformer(x)
        return {"images": x, "text": text}


class Exactly(Author):
    """Gives the logits, too, from which its tokens were drawn."""

    def __call__(self, prompt: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        with torch.no_grad():
            text = self.text_encoder.generate(
                **self.texts[int(prompt)], output_logits=True, return_dict_in_generate=True
            )
        return {"images": torch.stack(text.logits), "text": text.sequences}


def author(name: str, count: int = 6) -> Author:
    """A pipeline around one of `MODELS`, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        pipe = Author(model(name), Denoiser().requires_grad_(False).eval())
    pipe.texts = texts(name, count)
    return pipe


@cache
def alone(name: str, number: int, seed: int) -> dict[str, Any]:
    """What plain code gives for a text of a model."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return author(name)(str(number), generator=torch.Generator().manual_seed(seed))
