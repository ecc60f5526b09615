"""The models that Carpool is proven with: which tasks, what fuses, what limits it.

A model here names rows of the differential matrix (`tests/support/matrix`), each a task of a tiny
checkpoint of the same pipeline class whose requests, riding together, got what plain diffusers
gives them alone. What was measured there is in `proof.json`, written by `make test-models`. Any
other diffusers pipeline runs too: its unknown modules run alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROOF = Path(__file__).parent / "proof.json"


@dataclass(frozen=True, slots=True)
class Model:
    """One row of the grid."""

    name: str
    hubs: tuple[str, ...]  # ids of such models on the Hugging Face hub, as examples
    cases: tuple[str, ...] = ()  # rows of the matrix that prove it; none: it cannot be had
    limits: str = ""
    mixed_sizes: bool = False  # whether requests of different sizes share a forward
    lora: bool = True  # whether diffusers loads adapters for it


GEOMETRY = "equal size"
VIDEO_GEOMETRY = "equal size and number of frames"

MODELS = (
    Model(
        "FLUX.1",
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
        ("flux-t2i", "flux-i2i", "flux-inpaint", "flux-controlnet"),
        "equal size and max_sequence_length",
    ),
    Model(
        "FLUX.1 Kontext",
        ("black-forest-labs/FLUX.1-Kontext-dev",),
        ("kontext-edit",),
        "equal size of picture and reference",
    ),
    Model(
        "FLUX.2",
        ("black-forest-labs/FLUX.2-dev",),
        ("flux2-t2i", "flux2-edit", "flux2-edit-two"),
        "equal size; edits: equal sizes of all references",
    ),
    Model(
        "FLUX.2 Klein",
        ("black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B"),
        ("flux2-klein-t2i", "flux2-klein-edit"),
        "equal size; edits: equal sizes of all references",
    ),
    Model(
        "FLUX.2 Klein Base",
        ("black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-9B"),
        ("flux2-klein-base-t2i", "flux2-klein-base-edit"),
        "equal size; edits: equal sizes of all references",
    ),
    Model(
        "FLUX.2 Klein KV",
        ("black-forest-labs/FLUX.2-klein-9b-kv",),
        ("flux2-klein-kv-edit",),
        "its denoiser keeps the references' keys and values for one request, and runs alone",
    ),
    Model(
        "Z-Image",
        ("Tongyi-MAI/Z-Image",),
        ("zimage-t2i",),
        mixed_sizes=True,
    ),
    Model(
        "Z-Image Turbo",
        ("Tongyi-MAI/Z-Image-Turbo",),
        ("zimage-turbo-t2i",),
        mixed_sizes=True,
    ),
    Model(
        "GLM-Image",
        ("zai-org/GLM-Image",),
        ("glm-t2i", "glm-t2i-planned", "glm-edit"),
        "equal size and equally long quoted text; its language model generates alone; edits read "
        "their references alone",
        lora=False,
    ),
    Model(
        "Qwen-Image",
        ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
        ("qwen-image-t2i", "qwen-image-i2i", "qwen-image-inpaint"),
        GEOMETRY,
    ),
    Model(
        "Qwen-Image-Edit",
        ("Qwen/Qwen-Image-Edit",),
        ("qwen-image-edit",),
        "equal size of picture and reference",
    ),
    Model(
        "Qwen-Image-Edit-Plus",
        (
            "Qwen/Qwen-Image-Edit-2509",
            "Qwen/Qwen-Image-Edit-2511",
            "FireRedTeam/FireRed-Image-Edit-1.0",
        ),
        ("qwen-image-edit-plus", "qwen-image-edit-plus-two"),
        "equal sizes of picture and all references",
    ),
    Model(
        "Qwen-Image-Layered",
        ("Qwen/Qwen-Image-Layered",),
        ("qwen-image-layered",),
        "equal size and number of layers; RGBA pictures",
    ),
    Model(
        "Stable Diffusion 3, 3.5",
        (
            "stabilityai/stable-diffusion-3-medium-diffusers",
            "stabilityai/stable-diffusion-3.5-medium",
            "stabilityai/stable-diffusion-3.5-large",
        ),
        ("sd3-t2i", "sd3-i2i", "sd3-inpaint"),
        "equal size and max_sequence_length",
    ),
    Model(
        "SANA",
        ("Efficient-Large-Model/Sana_1600M_1024px_diffusers",),
        ("sana-t2i",),
        GEOMETRY,
    ),
    Model(
        "SANA 1.5",
        ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",),
        ("sana15-t2i",),
        GEOMETRY,
    ),
    Model("ERNIE-Image", ("baidu/ERNIE-Image",), ("ernie-t2i",), GEOMETRY),
    Model("ERNIE-Image Turbo", ("baidu/ERNIE-Image-Turbo",), ("ernie-turbo-t2i",), GEOMETRY),
    Model(
        "Stable Diffusion XL",
        ("stabilityai/stable-diffusion-xl-base-1.0",),
        (
            "sdxl-t2i",
            "sdxl-t2i-ancestral",
            "sdxl-i2i",
            "sdxl-inpaint",
            "sdxl-controlnet",
            "sdxl-ip-adapter",
        ),
        GEOMETRY,
    ),
    Model(
        "Stable Diffusion 1.5",
        ("stable-diffusion-v1-5/stable-diffusion-v1-5",),
        ("sd15-t2i", "sd15-i2i", "sd15-inpaint"),
        GEOMETRY,
    ),
    Model(
        "Wan 2.1 T2V",
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        ("wan21-t2v",),
        VIDEO_GEOMETRY,
    ),
    Model(
        "Wan 2.2 T2V A14B",
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
        ("wan22-t2v-a14b",),
        VIDEO_GEOMETRY + "; requests before and after the boundary use different experts",
    ),
    Model(
        "Wan 2.2 TI2V 5B",
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
        ("wan22-ti2v-5b-t2v", "wan22-ti2v-5b-i2v"),
        VIDEO_GEOMETRY,
    ),
    Model(
        "Wan 2.1 I2V",
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        ("wan21-i2v",),
        VIDEO_GEOMETRY,
    ),
    Model(
        "Wan 2.2 I2V A14B",
        ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
        ("wan22-i2v-a14b",),
        VIDEO_GEOMETRY,
    ),
    Model(
        "HunyuanVideo",
        ("hunyuanvideo-community/HunyuanVideo", "FastVideo/FastHunyuan-diffusers"),
        ("hunyuan-t2v",),
        VIDEO_GEOMETRY,
    ),
    Model(
        "HunyuanVideo I2V",
        ("hunyuanvideo-community/HunyuanVideo-I2V",),
        ("hunyuan-i2v", "hunyuan-i2v-33ch"),
        VIDEO_GEOMETRY,
    ),
    Model(
        "LTX-2",
        ("Lightricks/LTX-2",),
        ("ltx2-t2v", "ltx2-i2v"),
        "equal numbers of video and audio tokens",
        mixed_sizes=True,
    ),
    Model(
        "Helios Base",
        ("BestWishYsh/Helios-Base",),
        ("helios-base-t2v", "helios-base-i2v"),
        VIDEO_GEOMETRY,
    ),
    Model(
        "Helios Mid",
        ("BestWishYsh/Helios-Mid",),
        ("helios-mid-t2v",),
        VIDEO_GEOMETRY + "; only within one stage of the pyramid",
    ),
    Model(
        "Helios Distilled",
        ("BestWishYsh/Helios-Distilled",),
        ("helios-distilled-t2v",),
        VIDEO_GEOMETRY + "; only within one stage of the pyramid",
    ),
    Model(
        "FastWan 2.2 TI2V 5B (full attention)",
        ("FastVideo/FastWan2.2-TI2V-5B-FullAttn-Diffusers",),
        ("wan22-ti2v-5b-t2v",),
        "served with Carpool's own three-step sampler (engine/model/dmd.py), tested on random "
        "weights only: never with the real ones",
    ),
    Model(
        "FastWan 2.1 T2V 1.3B",
        ("FastVideo/FastWan2.1-T2V-1.3B-Diffusers",),
        limits="not in diffusers: video sparse attention with gate weights of its own",
    ),
    Model(
        "TurboWan",
        ("TurboDiffusion/TurboWan2.1-T2V-1.3B-480P", "TurboDiffusion/TurboWan2.2-I2V-A14B-720P"),
        limits="not in diffusers: rCM sampler and sparse-linear attention",
    ),
    Model("Hunyuan3D-2", ("tencent/Hunyuan3D-2",), limits="not in diffusers: meshes, not pictures"),
)


@cache
def proof() -> dict[str, Any]:
    """What the last run of the matrix measured, by the case's name."""
    found: dict[str, Any] = json.loads(PROOF.read_text())
    return found


def rows() -> list[dict[str, Any]]:
    """The grid, as `carpool models --json` prints it."""
    return [_row(model) for model in MODELS]


def _row(model: Model) -> dict[str, Any]:
    proven = [proof()[case] for case in model.cases]
    modules = {name: None for one in proven for name in one["requests_per_forward"]}
    fused = [n for n in modules if any(one["requests_per_forward"].get(n, 1) > 1 for one in proven)]
    return {
        "family": model.name,
        "hub_ids": list(model.hubs),
        "tasks": sorted({one["task"] for one in proven}),
        "pipelines": sorted({one["pipeline"] for one in proven}),
        "fuses": fused,
        "alone": [name for name in modules if name not in fused],
        "mixed_sizes": model.mixed_sizes,
        "lora": bool(model.cases) and model.lora,
        "limits": model.limits,
        "largest_difference": max((one["largest_difference"] for one in proven), default=None),
    }


def table() -> Iterator[str]:
    """The grid as lines of text, for a terminal."""
    head = ("family", "tasks", "fuses", "sizes", "LoRA", "limits")
    body = [
        (
            row["family"],
            ", ".join(row["tasks"]) or "-",
            ", ".join(short(name) for name in row["fuses"]) or "-",
            "mixed" if row["mixed_sizes"] else "equal" if row["tasks"] else "-",
            "yes" if row["lora"] else "no",
            row["limits"],
        )
        for row in rows()
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    for line in (head, *body):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def short(name: str) -> str:
    """A module as people say it: `transformer`, but `vae.decode`."""
    return name.removesuffix(".forward")
