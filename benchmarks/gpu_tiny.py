"""The same models, as small as the tests' checkpoints, for `gpu_page --tiny` on a CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu_models import MODELS, Config, Model, Size

TESTS = Path(__file__).parents[1] / "tests"
FAMILIES = {
    "flux": "flux",
    "qwen-image": "qwen_image",
    "sdxl": "sdxl",
    "z-image": "zimage",
    "wan": "wan21_t2v",
    "sana": "sana15",
    "sd35-medium": "sd3",
}
TOKENS = 24
TEXT_WIDTHS = (  # the parameters of denoisers that say how wide embeddings are
    "caption_channels", "joint_attention_dim", "cross_attention_dim", "text_dim", "cap_feat_dim",
)  # fmt: skip
STEPS = (2, 3)  # Qwen-Image's scheduler divides by zero at one step


def tiny(name: str) -> Model:
    """A model of `MODELS` with small parts and small requests."""
    model, parts = MODELS[name], _parts()[FAMILIES[name]]
    denoiser, config = parts[model.component]
    return replace(
        model,
        denoiser=(denoiser, config),
        vae=parts["vae"],
        texts={text: _small(text, config, model) for text in model.texts},
        sizes=(Size(32, 32, 5),) if name == "wan" else (Size(64, 64),),
        steps=STEPS,
    )


@cache
def _parts() -> dict[str, dict[str, tuple[str, Config]]]:
    """By family and component: the class and the configuration in the tests' checkpoints."""
    command = [sys.executable, "-m", "support.tiny.configs", *FAMILIES.values()]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    found: dict[str, Any] = json.loads(subprocess.check_output(command, env=environ))
    return found


def _small(text: str, config: Config, model: Model) -> tuple[int, ...]:
    """The shape of an input of a small request."""
    if "mask" in text:
        return 1, TOKENS
    if "pooled" in text:
        sizes_width = 6 * (config.get("addition_time_embed_dim") or 0)  # of SDXL's six sizes
        joined = config.get("projection_class_embeddings_input_dim", 0) - sizes_width
        return 1, config.get("pooled_projection_dim", joined)
    width = next(config[name] for name in TEXT_WIDTHS if name in config)
    return (TOKENS, width) if model.is_listed else (1, TOKENS, width)
