"""The models that `gpu.py` measures: their published configs, as far as these say more than the
defaults of diffusers' classes, and what a request for one brings.

Text encoders are left out: requests bring embeddings. The parameter counts are the proof that the
configs are the published ones; `tests/benchmarks/test_benchmark_gpu.py` holds them, with the
operations that a forward takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """What a request draws."""

    width: int  # px
    height: int  # px
    frames: int = 0  # 0: a picture

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}f" if self.frames else "")

    @property
    def parameters(self) -> dict[str, int]:
        size = {"width": self.width, "height": self.height}
        return {**size, "num_frames": self.frames} if self.frames else size


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline to build and the requests to send it."""

    title: str
    billions: float  # parameters of the denoiser, as published
    pipeline: str  # class names are diffusers'
    denoiser: tuple[str, Config]
    vae: tuple[str, Config]
    scheduler: tuple[str, Config]
    texts: Mapping[str, tuple[int, ...]]  # shapes of the embeddings that a request brings
    guided: Config  # parameters for guidance as published
    alone: Config  # parameters that make a step one forward of one row
    sizes: tuple[Size, ...]
    steps: tuple[int, ...] = (4, 6, 8, 10)  # of requests, in turn
    component: str = "transformer"  # the denoiser's name in the pipeline
    has_negative: bool = True  # guidance wants a second set of embeddings
    is_listed: bool = False  # embeddings are lists of tensors without a batch axis
    extra: Config = field(default_factory=dict)  # parameters of every request


SQUARES = (Size(512, 512), Size(1024, 1024))
MANY_STEPS = (8, 12, 16, 20)  # where a forward takes few milliseconds

KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
KL_16 = {**KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
FLUX_VAE = {**KL_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
DEEP = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
SHIFTING = {
    "use_dynamic_shifting": True,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}

MODELS: dict[str, Model] = {
    "flux": Model(
        title="FLUX.1-dev",
        billions=11.90,
        pipeline="FluxPipeline",
        denoiser=("FluxTransformer2DModel", {"guidance_embeds": True}),
        vae=("AutoencoderKL", FLUX_VAE),
        scheduler=("FlowMatchEulerDiscreteScheduler", SHIFTING),
        texts={"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)},
        guided={"guidance_scale": 3.5},
        alone={"guidance_scale": 3.5},
        has_negative=False,
        sizes=SQUARES,
    ),
    "qwen-image": Model(
        title="Qwen-Image",
        billions=20.43,
        pipeline="QwenImagePipeline",
        denoiser=("QwenImageTransformer2DModel", {}),
        vae=("AutoencoderKLQwenImage", {}),
        scheduler=(
            "FlowMatchEulerDiscreteScheduler",
            {**SHIFTING, "shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192}
            | {"shift_terminal": 0.02, "time_shift_type": "exponential"},
        ),
        texts={"prompt_embeds": (1, 128, 3584), "prompt_embeds_mask": (1, 128)},
        guided={"true_cfg_scale": 4.0},
        alone={"true_cfg_scale": 1.0},
        sizes=SQUARES,
    ),
    "z-image": Model(
        title="Z-Image-Turbo",
        billions=6.15,
        pipeline="ZImagePipeline",
        denoiser=("ZImageTransformer2DModel", {}),
        vae=("AutoencoderKL", FLUX_VAE),
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        texts={"prompt_embeds": (128, 2560)},
        guided={"guidance_scale": 0.0},
        alone={"guidance_scale": 0.0},
        has_negative=False,
        is_listed=True,
        sizes=SQUARES,
    ),
    "sana": Model(
        title="SANA-1.5 1.6B",
        billions=1.60,
        pipeline="SanaPipeline",
        denoiser=(
            "SanaTransformer2DModel",
            {"caption_channels": 2304, "qk_norm": "rms_norm_across_heads"},
        ),
        vae=(
            "AutoencoderDC",
            {
                "encoder_block_types": DEEP,
                "decoder_block_types": DEEP,
                "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
                "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
                "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
                "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
                "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "downsample_block_type": "conv",
                "upsample_block_type": "interpolate",
                "scaling_factor": 0.41407,
            },
        ),
        scheduler=(
            "DPMSolverMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
        texts={"prompt_embeds": (1, 300, 2304), "prompt_attention_mask": (1, 300)},
        guided={"guidance_scale": 4.5},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
        extra={"use_resolution_binning": False},
    ),
    "sd35-medium": Model(
        title="SD3.5-medium",
        billions=2.24,
        pipeline="StableDiffusion3Pipeline",
        denoiser=(
            "SD3Transformer2DModel",
            {
                "num_layers": 24,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 2048,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
                # published: 384, a table of 147,456 positions from which the picture's are cut
                "pos_embed_max_size": 64,
            },
        ),
        vae=("AutoencoderKL", {**KL_16, "scaling_factor": 1.5305, "shift_factor": 0.0609}),
        scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        texts={"prompt_embeds": (1, 333, 4096), "pooled_prompt_embeds": (1, 2048)},
        guided={"guidance_scale": 4.5},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
    ),
    "sdxl": Model(
        title="SDXL",
        billions=2.57,
        pipeline="StableDiffusionXLPipeline",
        denoiser=(
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2,
                "up_block_types": ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",),
                "block_out_channels": (320, 640, 1280),
                "transformer_layers_per_block": (1, 2, 10),
                "attention_head_dim": (5, 10, 20),
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        vae=("AutoencoderKL", {**KL, "latent_channels": 4, "scaling_factor": 0.13025}),
        scheduler=(
            "EulerDiscreteScheduler",
            {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
            | {"steps_offset": 1, "timestep_spacing": "leading"},
        ),
        texts={"prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280)},
        guided={"guidance_scale": 5.0},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
        component="unet",
    ),
    "wan": Model(
        title="Wan2.1-1.3B",
        billions=1.42,
        pipeline="WanPipeline",
        denoiser=(
            "WanTransformer3DModel",
            {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        ),
        vae=("AutoencoderKLWan", {}),
        scheduler=(
            "UniPCMultistepScheduler",
            {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
        ),
        texts={"prompt_embeds": (1, 512, 4096)},
        guided={"guidance_scale": 5.0},
        alone={"guidance_scale": 1.0},
        sizes=(Size(832, 480, 17), Size(832, 480, 81)),
        steps=(2, 3, 4),
    ),
}
