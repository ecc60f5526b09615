"""Weights by the names of original code, as most files that people trade have them: the inverse of
diffusers' converters, for Stable Diffusion, Wan and LTX-2."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from support.prepared import own_weights

UNET = "model.diffusion_model."
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
_WAN = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn", "attn2": "cross_attn", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
    ".to_out.0.": ".o.", ".to_q.": ".q.", ".to_k.": ".k.", ".to_v.": ".v.",
    "proj_out": "head.head",
}  # fmt: skip
_LTX2 = {
    "transformer": {
        "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
        "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
        "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
        "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
        "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
        "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
        "time_embed": "adaln_single", "proj_in": "patchify_proj",
        "norm_q": "q_norm", "norm_k": "k_norm",
    },
    "connectors": {
        "video_connector": "video_embeddings_connector", "norm_q": "q_norm", "norm_k": "k_norm",
        "audio_connector": "audio_embeddings_connector",
        "transformer_blocks": "transformer_1d_blocks",
    },
    "vae": {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
        "down_blocks.0.downsamplers.0": "down_blocks.1",
        "encoder.mid_block": "encoder.down_blocks.8",
        "up_blocks.0.resnets": "up_blocks.2.resnets", "decoder.mid_block": "decoder.up_blocks.0",
        "up_blocks.0.upsamplers.0": "up_blocks.1", "resnets": "res_blocks",
    },
    "audio_vae": {
        "latents_mean": "per_channel_statistics.mean-of-means",
        "latents_std": "per_channel_statistics.std-of-means",
    },
    "vocoder": {
        "conv_in": "conv_pre", "conv_out": "conv_post", "upsamplers": "ups", "resnets": "resblocks",
    },
}  # fmt: skip
_ATTENTION = {
    "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
}  # fmt: skip
_OPEN_CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def unet(model: Any) -> dict[str, Tensor]:
    """A UNet's weights, with the prefix of a whole model's file."""
    step = model.config.layers_per_block + 1
    named = {}
    for key, weight in own_weights(model).items():
        head, _, tail = key.rpartition(".")
        if head in _UNET:
            name = f"{_UNET[head]}.{tail}"
        else:
            name = _block(key, step, has_attention=model.up_blocks)
        named[f"model.diffusion_model.{name}"] = weight
    return named


def _block(key: str, step: int, has_attention: Any) -> str:
    if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.*)", key):
        kind, i, rest = match.groups()
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(i)}.{_inner(kind, rest)}"
    match = re.fullmatch(r"(down|up)_blocks\.(\d)\.(\w+)\.(\d)\.(.*)", key)
    assert match is not None
    side, block, kind, i, rest = match.groups()
    where = "input" if side == "down" else "output"
    if kind == "downsamplers":
        return f"input_blocks.{step * (int(block) + 1)}.0.{rest.replace('conv', 'op')}"
    if kind == "upsamplers":
        has_both = hasattr(has_attention[int(block)], "attentions")
        return f"output_blocks.{step * int(block) + step - 1}.{2 if has_both else 1}.{rest}"
    place = step * int(block) + int(i) + (1 if side == "down" else 0)
    return f"{where}_blocks.{place}.{0 if kind == 'resnets' else 1}.{_inner(kind, rest)}"


def _inner(kind: str, rest: str) -> str:
    head, _, tail = rest.rpartition(".")
    return f"{_RESNET[head]}.{tail}" if kind == "resnets" else rest


def wan(model: Any) -> dict[str, Tensor]:
    """The denoiser of Wan 2.1."""
    named = {}
    for key, weight in own_weights(model).items():
        name = key
        for old, new in _WAN.items():
            name = name.replace(old, new)
        name = name.replace(
            "scale_shift_table", "modulation" if "blocks" in name else "head.modulation"
        )
        named[re.sub(r"norm[23]", lambda m: {"norm2": "norm3"}.get(m[0], "norm2"), name)] = weight
    return named


def vae(model: Any, prefix: str = "first_stage_model.") -> dict[str, Tensor]:
    """An autoencoder's weights."""
    blocks, named = len(model.config.block_out_channels), {}
    for key, weight in own_weights(model).items():
        name = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(
            r"up_blocks\.(\d)\.(resnets|upsamplers\.0)",
            lambda m: f"up.{blocks - 1 - int(m[1])}.{'block' if m[2] == 'resnets' else 'upsample'}",
            name,
        )
        if "mid_block.attentions" in name:
            head, inner = name.split("mid_block.attentions.0.")
            layer, _, tail = inner.rpartition(".")
            name = f"{head}mid.attn_1.{_ATTENTION[layer]}.{tail}"
            weight = weight[:, :, None, None] if weight.ndim == 2 else weight
        named[prefix + name] = weight
    return named


def clip(model: Any, prefix: str) -> dict[str, Tensor]:
    """A text encoder of CLIP, whose original names are those of transformers before 5."""
    weights = own_weights(model)
    return {f"{prefix}text_model.{k.removeprefix('text_model.')}": w for k, w in weights.items()}


def open_clip(model: Any, prefix: str) -> dict[str, Tensor]:
    """A text encoder of OpenCLIP, whose queries, keys and values are one matrix."""
    own = {key.removeprefix("text_model."): w for key, w in own_weights(model).items()}
    named = {
        "token_embedding.weight": own.pop("embeddings.token_embedding.weight"),
        "positional_embedding": own.pop("embeddings.position_embedding.weight"),
        "ln_final.weight": own.pop("final_layer_norm.weight"),
        "ln_final.bias": own.pop("final_layer_norm.bias"),
        "text_projection": own.pop("text_projection.weight").T.contiguous(),
        "logit_scale": torch.tensor(4.6),
    }
    for key, weight in own.items():
        name = key.replace("encoder.layers.", "transformer.resblocks.")
        if match := re.fullmatch(r"(.*)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [own[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            named[f"{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in _OPEN_CLIP.items():
                name = name.replace(old, new)
            named[name] = weight
    return {prefix + name: weight for name, weight in named.items()}


def whole(components: Mapping[str, Any]) -> dict[str, Tensor]:
    """A whole model of Stable Diffusion 1.5 or SDXL, as one file has it."""
    weights = unet(components["unet"]) | vae(components["vae"])
    if components.get("text_encoder_2") is None:
        return weights | clip(components["text_encoder"], "cond_stage_model.transformer.")
    return (
        weights
        | clip(components["text_encoder"], "conditioner.embedders.0.transformer.")
        | open_clip(components["text_encoder_2"], "conditioner.embedders.1.model.")
    )


def ltx2(components: Mapping[str, Any]) -> dict[str, Tensor]:
    """A whole model of LTX-2: connectors have the denoiser's prefix, but for their projection."""
    weights = {}
    for part, names in _LTX2.items():
        prefix = {"transformer": UNET, "connectors": UNET}.get(part, f"{part}.")
        for key, weight in components[part].state_dict().items():
            name = prefix + key
            for new, old in names.items():
                name = name.replace(new, old)
            name = name.replace(f"{UNET}text_proj_in", "text_embedding_projection.aggregate_embed")
            weights[name] = weight.contiguous().clone()
    return weights


def assert_same(pipe: Any, own: Any, *names: str) -> None:
    """Compare the weights of components, bit by bit."""
    for name in names:
        held = getattr(pipe, name).state_dict()
        for key, weight in getattr(own, name).state_dict().items():
            assert torch.equal(held[key], weight), f"{name}.{key}"
