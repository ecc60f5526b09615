"""Pipelines of video whose denoisers have no table: how they fuse is inferred."""

from typing import Any

import diffusers
import numpy as np
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from support.tiny.parts import (
    CLIP_WIDTH,
    clip,
    clip_tokenizer,
    drawn,
    gemma_tokenizer,
    kl_vae,
    t5,
    t5_tokenizer,
)
from support.tiny.sana import gemma

_WIDTH = 32  # of the text's embeddings


def cogvideox() -> diffusers.CogVideoXPipeline:
    """CogVideoX: frames before channels, both halves of guidance in one call."""
    blocks = {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    }
    return diffusers.CogVideoXPipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5(_WIDTH),
        vae=drawn(
            diffusers.AutoencoderKLCogVideoX(
                block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1,
                norm_num_groups=2, temporal_compression_ratio=4, **blocks,
            ),
            last="decoder.conv_out", gain=0.5,
        ),
        transformer=drawn(
            diffusers.CogVideoXTransformer3DModel(
                num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4,
                time_embed_dim=8, text_embed_dim=_WIDTH, num_layers=2, sample_width=2,
                sample_height=2, sample_frames=9, patch_size=2, temporal_compression_ratio=4,
                max_text_seq_length=24,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.DDIMScheduler(),
    )  # fmt: skip


def mochi() -> diffusers.MochiPipeline:
    """Mochi: masked text, positions that are learned."""
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=drawn(diffusers.AutoencoderKLMochi(
            latent_channels=12, encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
        )),
        text_encoder=t5(_WIDTH), tokenizer=t5_tokenizer(),
        transformer=drawn(
            diffusers.MochiTransformer3DModel(
                patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2,
                pooled_projection_dim=16, in_channels=12, qk_norm="rms_norm", text_embed_dim=_WIDTH,
                time_embed_dim=4, max_sequence_length=24,
            ),
            last="proj_out", gain=0.3,
        ),
    )  # fmt: skip


def latte() -> diffusers.LattePipeline:
    """Latte: turns between frames and places, folding each into the rows."""
    return diffusers.LattePipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5(_WIDTH), vae=kl_vae(),
        transformer=drawn(
            diffusers.LatteTransformer3DModel(
                sample_size=16, num_layers=1, patch_size=2, attention_head_dim=8,
                num_attention_heads=3, caption_channels=_WIDTH, in_channels=4,
                cross_attention_dim=24, out_channels=8, num_embeds_ada_norm=1000, video_length=2,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.DDIMScheduler(),
    )  # fmt: skip


def sana_video() -> diffusers.SanaVideoPipeline:
    """SANA-Video: linear attention over a clip, masked text."""
    return diffusers.SanaVideoPipeline(
        tokenizer=gemma_tokenizer(), text_encoder=gemma(),
        vae=drawn(diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )),
        transformer=drawn(
            diffusers.SanaVideoTransformer3DModel(
                in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12,
                num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=12,
                cross_attention_dim=24, caption_channels=_WIDTH, sample_size=8,
                patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
        ),
    )  # fmt: skip


def animatediff() -> diffusers.AnimateDiffPipeline:
    """AnimateDiff: a U-Net of pictures whose rows are folded with frames."""
    widths = (8, 16)
    return diffusers.AnimateDiffPipeline(
        vae=kl_vae(), text_encoder=clip(), tokenizer=clip_tokenizer(),
        unet=drawn(
            diffusers.UNet2DConditionModel(
                block_out_channels=widths, layers_per_block=1, sample_size=16, in_channels=4,
                out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=CLIP_WIDTH,
                norm_num_groups=2, attention_head_dim=4,
            ),
            last="conv_out", gain=0.3,
        ),
        motion_adapter=drawn(diffusers.MotionAdapter(
            block_out_channels=widths, motion_layers_per_block=1, motion_norm_num_groups=2,
            motion_num_attention_heads=4, motion_max_seq_length=16,
        )),
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )  # fmt: skip


def svd() -> diffusers.StableVideoDiffusionPipeline:
    """Stable Video Diffusion: no prompt, a picture; frames are folded into rows and out again."""
    return diffusers.StableVideoDiffusionPipeline(
        vae=drawn(
            diffusers.AutoencoderKLTemporalDecoder(
                block_out_channels=(32, 32),
                down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"), layers_per_block=1,
                sample_size=16,
            ),
            last="decoder.conv_out", gain=0.5,
        ),
        image_encoder=drawn(CLIPVisionModelWithProjection(CLIPVisionConfig(
            hidden_size=_WIDTH, projection_dim=_WIDTH, num_hidden_layers=1, num_attention_heads=4,
            image_size=224, intermediate_size=37, patch_size=56,
        ))),
        unet=drawn(
            diffusers.UNetSpatioTemporalConditionModel(
                block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=8,
                out_channels=4,
                down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                cross_attention_dim=_WIDTH, num_attention_heads=8,
                projection_class_embeddings_input_dim=96, addition_time_embed_dim=32,
            ),
            last="conv_out", gain=0.3,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
            interpolation_type="linear", prediction_type="v_prediction", timestep_spacing="leading",
            timestep_type="continuous", sigma_min=0.02, sigma_max=700.0, steps_offset=1,
            use_karras_sigmas=True,
        ),
        feature_extractor=CLIPImageProcessor(),
    )  # fmt: skip


def picture(seed: int) -> Image.Image:
    """Noise to start from, 32x32."""
    drawn_ = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)
    return Image.fromarray(drawn_)


FAMILIES = {
    "cogvideox": cogvideox, "mochi": mochi, "latte": latte, "sana_video": sana_video,
    "animatediff": animatediff, "svd": svd,
}  # fmt: skip
_SMALL: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cogvideox": {**_SMALL, "num_frames": 8, "max_sequence_length": 24},
    "mochi": {**_SMALL, "height": 32, "width": 32, "num_frames": 7, "max_sequence_length": 24},
    "latte": {**_SMALL, "video_length": 2, "clean_caption": False},
    "sana_video": {
        **_SMALL, "height": 32, "width": 32, "frames": 9, "max_sequence_length": 24,
        "complex_human_instruction": [], "use_resolution_binning": False,
    },
    "animatediff": {**_SMALL, "num_frames": 4},
    "svd": {**_SMALL, "num_frames": 2, "decode_chunk_size": 2},
}  # fmt: skip
