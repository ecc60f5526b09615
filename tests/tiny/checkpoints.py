"""Tiny random checkpoints in diffusers layout, built offline on first use.

One function per family returns a pipeline, one line in `FAMILIES` names it, and one in
`ARGUMENTS` says how to call it; the text encoders and the VAE come from shared parts.
The weights are random but not as the libraries draw them: those leave layers at zero
and signals so faint that a lost prompt goes unnoticed. `drawn` gives every weight the
size that keeps its signal near one, so each argument of a call shows in the image.

Nothing here knows about Carpool.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

VERSION = 1  # raise it when any weight or config changes: it names the cache folder
TOKENIZERS = Path(__file__).parent / "tokenizers"
CLIP_WIDTH = 32

M = TypeVar("M", bound=nn.Module)


def checkpoint(family: str) -> Path:
    """Return the folder of a family's checkpoint, building it the first time.

    Test processes may race: each builds in a folder of its own, and the first to
    finish wins.

    Args:
        family: a key of `FAMILIES`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "carpool" / f"tiny-v{VERSION}" / family
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=folder.parent))
    try:
        build(family).save_pretrained(draft)
        os.replace(draft, folder)
    except OSError:
        if not folder.is_dir():  # if it is, another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def build(family: str) -> DiffusionPipeline:
    """Build a family's pipeline in fp32, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = FAMILIES[family]()
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    return pipeline


def drawn(module: M, *, last: str | None = None, gain: float = 1.0) -> M:
    """Redraw the weights of `module` in place so that every signal stays near one.

    Matrices and kernels get a standard deviation of 1/sqrt(inputs), embeddings of 1.0,
    biases of 0.1; every other parameter stays as its library drew it.

    Args:
        module: any model, or a part of one.
        last: the path of its output layer, to be multiplied by `gain`: below one for
            pixels, which are clamped to -1..1, and for denoisers, whose rounding errors
            (1e-6 for outputs near one) would grow from step to step.
        gain: the factor for `last`.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight.normal_()
            elif isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                part.weight.normal_(std=part.weight[0].numel() ** -0.5)
                if part.bias is not None:
                    part.bias.normal_(std=0.1)
        if last is not None:
            for parameter in module.get_submodule(last).parameters():
                parameter.mul_(gain)
    return module


def clip_tokenizer() -> CLIPTokenizer:
    """Load the tokenizer of every CLIP here."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(TOKENIZERS / "clip")
    return tokenizer


def clip_config() -> CLIPTextConfig:
    """Describe a CLIP text encoder; its pooled vector is `CLIP_WIDTH` wide, projected or not."""
    tokenizer = clip_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=CLIP_WIDTH,
        intermediate_size=37,
        projection_dim=CLIP_WIDTH,
        num_attention_heads=4,
        num_hidden_layers=3,
    )


def clip() -> CLIPTextModel:
    """Draw a CLIP text encoder."""
    return drawn(CLIPTextModel(clip_config()))


def projected_clip() -> CLIPTextModelWithProjection:
    """Draw a CLIP text encoder whose pooled vector is projected."""
    return drawn(CLIPTextModelWithProjection(clip_config()))


def t5_tokenizer() -> T5TokenizerFast:
    """Load the tokenizer of every T5 here."""
    tokenizer: T5TokenizerFast = T5TokenizerFast.from_pretrained(TOKENIZERS / "t5")
    return tokenizer


def t5(width: int) -> T5EncoderModel:
    """Draw a T5 encoder with embeddings `width` wide."""
    config = T5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return drawn(T5EncoderModel(config))


def kl_vae(**config: Any) -> AutoencoderKL:
    """Draw a VAE with 4 latent channels that shrinks each side by 2."""
    vae = AutoencoderKL(
        sample_size=64,
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        **config,
    )
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def flow_vae() -> AutoencoderKL:
    """Draw the VAE of the flow-matching families: shifted latents, no 1x1 convolutions."""
    return kl_vae(
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5
    )


def flux() -> FluxPipeline:
    """Flux.1 dev: guidance is embedded, the text padded to `max_sequence_length`."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=flow_vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=t5_tokenizer(),
        transformer=drawn(
            FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,  # 4 latent channels of 2x2 latent pixels
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=CLIP_WIDTH,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            last="proj_out",
            gain=0.3,
        ),
    )


def sd3() -> StableDiffusion3Pipeline:
    """Stable Diffusion 3: three text encoders, both halves of guidance in one call."""
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_vae(),
        text_encoder=projected_clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=projected_clip(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(2 * CLIP_WIDTH),
        tokenizer_3=t5_tokenizer(),
        transformer=drawn(
            SD3Transformer2DModel(
                sample_size=32,
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                caption_projection_dim=32,
                joint_attention_dim=2 * CLIP_WIDTH,
                pooled_projection_dim=2 * CLIP_WIDTH,
                pos_embed_max_size=32,
            ),
            last="proj_out",
            gain=0.3,
        ),
    )


def unet(**config: Any) -> UNet2DConditionModel:
    """Draw a UNet of two levels, the lower one reading the text."""
    return drawn(
        UNet2DConditionModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            block_out_channels=(4, 8),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=1,
            **config,
        ),
        last="conv_out",
        gain=0.3,
    )


def sdxl() -> StableDiffusionXLPipeline:
    """Stable Diffusion XL: two text encoders, a pooled vector and six sizes per row."""
    sizes_width = 8
    return StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        vae=kl_vae(scaling_factor=0.13),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=projected_clip(),
        tokenizer_2=clip_tokenizer(),
        unet=unet(
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            transformer_layers_per_block=(1, 1),
            addition_embed_type="text_time",
            addition_time_embed_dim=sizes_width,
            projection_class_embeddings_input_dim=6 * sizes_width + CLIP_WIDTH,
            cross_attention_dim=2 * CLIP_WIDTH,
        ),
    )


def sd15() -> StableDiffusionPipeline:
    """Stable Diffusion 1.5: one text encoder, a scheduler with a history, no safety checker."""
    return StableDiffusionPipeline(
        scheduler=PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
        ),
        vae=kl_vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=unet(attention_head_dim=2, cross_attention_dim=CLIP_WIDTH),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


FAMILIES: dict[str, Callable[[], DiffusionPipeline]] = {
    "flux": flux,
    "sd3": sd3,
    "sdxl": sdxl,
    "sd15": sd15,
}

_IMAGE = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "flux": {**_IMAGE, "max_sequence_length": 48},
    "sd3": {**_IMAGE, "max_sequence_length": 32},
    "sdxl": _IMAGE,
    "sd15": _IMAGE,
}
