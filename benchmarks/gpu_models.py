"""The models that the parts of `gpu_page` measure: the planner's configs, and request inputs.

Text encoders are omitted: requests send embeddings. The parameter counts prove that the configs are
the published ones; `tests/benchmarks/test_benchmark_gpu.py` checks them, and the operations of a
forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool_lab.plan.names import known

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a request's output."""

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
    """A pipeline to build, and the inputs of its requests."""

    title: str
    billions: float  # parameters of the denoiser, as published
    pipeline: str  # class names are diffusers'
    denoiser: tuple[str, Config]
    vae: tuple[str, Config]
    scheduler: tuple[str, Config]
    texts: Mapping[str, tuple[int, ...]]  # shapes of a request's embeddings
    guided: Config  # parameters of the published guidance
    alone: Config  # parameters for one row per step
    sizes: tuple[Size, ...]
    steps: tuple[int, ...] = (4, 6, 8, 10)  # steps of requests, in turn
    component: str = "transformer"  # the denoiser's name in the pipeline
    has_negative: bool = True  # guidance needs a second set of embeddings
    is_listed: bool = False  # embeddings are lists of tensors without a batch axis
    extra: Config = field(default_factory=dict)  # parameters of every request


SQUARES = (Size(512, 512), Size(1024, 1024))
MANY_STEPS = (8, 12, 16, 20)  # steps if a forward takes few milliseconds


def _model(title: str, *, component: str = "transformer", **rest: Any) -> Model:
    """A model by its planner name; `more` overrides its denoiser's config."""
    data, overrides = known()[title], rest.pop("more", {})
    parts = {name: tuple(entry[1:]) for name, entry in data["components"].items()}
    name, config = parts[component]
    return Model(
        title=title, pipeline=data["pipeline"], component=component,
        denoiser=(name, {**config, **overrides}), vae=parts["vae"],
        scheduler=parts["scheduler"], **rest,
    )  # fmt: skip


MODELS: dict[str, Model] = {
    "flux": _model(
        "FLUX.1-dev",
        billions=11.90,
        texts={"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)},
        guided={"guidance_scale": 3.5},
        alone={"guidance_scale": 3.5},
        has_negative=False,
        sizes=SQUARES,
    ),
    "qwen-image": _model(
        "Qwen-Image",
        billions=20.43,
        texts={"prompt_embeds": (1, 128, 3584), "prompt_embeds_mask": (1, 128)},
        guided={"true_cfg_scale": 4.0},
        alone={"true_cfg_scale": 1.0},
        sizes=SQUARES,
    ),
    "sdxl": _model(
        "SDXL",
        billions=2.57,
        texts={"prompt_embeds": (1, 77, 2048), "pooled_prompt_embeds": (1, 1280)},
        guided={"guidance_scale": 5.0},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
        component="unet",
    ),
    "z-image": _model(
        "Z-Image-Turbo",
        billions=6.15,
        texts={"prompt_embeds": (128, 2560)},
        guided={"guidance_scale": 0.0},
        alone={"guidance_scale": 0.0},
        has_negative=False,
        is_listed=True,
        sizes=SQUARES,
    ),
    "wan": _model(
        "Wan2.1-T2V-1.3B",
        billions=1.42,
        texts={"prompt_embeds": (1, 512, 4096)},
        guided={"guidance_scale": 5.0},
        alone={"guidance_scale": 1.0},
        sizes=(Size(832, 480, 17), Size(832, 480, 81)),
        steps=(2, 3, 4),
    ),
    "sana": _model(
        "SANA-1.5-1.6B",
        billions=1.60,
        texts={"prompt_embeds": (1, 300, 2304), "prompt_attention_mask": (1, 300)},
        guided={"guidance_scale": 4.5},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
        extra={"use_resolution_binning": False},
    ),
    "sd35-medium": _model(
        "SD3.5-medium",
        billions=2.24,
        texts={"prompt_embeds": (1, 333, 4096), "pooled_prompt_embeds": (1, 2048)},
        guided={"guidance_scale": 4.5},
        alone={"guidance_scale": 1.0},
        sizes=SQUARES,
        steps=MANY_STEPS,
        # published: 384, a table of 147,456 positions that is cropped to the picture
        more={"pos_embed_max_size": 64},
    ),
}
"""Ordered by importance: a lease may end before the last model."""
