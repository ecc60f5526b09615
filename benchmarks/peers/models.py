"""The models of the comparison: small enough for a CPU, in diffusers layout, for any server.

FLUX's text has 512 tokens and its picture 256; Qwen-Image calls its denoiser twice a step, for
guidance. Text encoders and VAEs are those of the tests' tiny checkpoints; the denoisers are wider,
so that a forward takes some ms. The embedded model is what the simulator is held against.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.models.embedded import MODEL_DIR

ROOT = Path(__file__).parents[2]
SIZE = "64x64"
STRENGTHS = (1.0, 0.75, 1.25)  # of guidance, where it is mixed
WIDER: Mapping[str, Mapping[str, Any]] = {  # so that a forward takes some ms, as on a device
    "flux": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
    "qwen-image": {
        "num_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
}


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A model, and how it is asked for a picture."""

    name: str
    family: str  # of the tests' checkpoints; empty: the embedded model
    guidance: str  # the field that says how strong it is
    strength: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 8
    mixed: tuple[int, ...] = (4, 8, 12)  # steps
    abandoned: int = 150  # steps

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator is held against its Poisson loads."""
        return not self.family

    def body(self, number: int, steps: int | None = None, strength: float = 1.0) -> dict[str, Any]:
        """A request of the OpenAI API, with the fields that diffusers adds; no two are equal."""
        return {
            "prompt": f"a red circle on a blue background, number {number}",
            "seed": number,
            "num_inference_steps": steps or self.steps,
            self.guidance: self.strength * strength,
            "response_format": "b64_json",
            **self.fields,
        }

    def burst(self, mix: str, count: int, first: int = 0) -> list[dict[str, Any]]:
        """Requests that are `equal` but for prompt and seed, or mix `steps` or `steps+guidance`."""
        bodies = []
        for number in range(count):
            steps = self.steps if mix == "equal" else self.mixed[number % len(self.mixed)]
            strength = STRENGTHS[number // len(self.mixed) % 3] if "guidance" in mix else 1.0
            bodies.append(self.body(first + number, steps, strength))
        return bodies

    def checkpoint(self) -> Path:
        """The folder of the model, made the first time."""
        if not self.family:
            return MODEL_DIR
        folder = ROOT / "build" / "peers" / self.name
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(dir=folder.parent))
            config = json.dumps(WIDER[self.name])
            command = [sys.executable, "-m", "support.tiny.wider", self.family, config, str(draft)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": f"{ROOT}/tests"})
            try:
                os.replace(draft, folder)
            except OSError:  # another process was faster
                shutil.rmtree(draft)
        return folder


MODELS = {
    model.name: model
    for model in (
        PeerModel("flux", "flux", "guidance_scale", 3.5, {"size": SIZE}),
        PeerModel(
            "qwen-image",
            "qwen_image",
            "true_cfg_scale",
            3.0,
            {"size": SIZE, "negative_prompt": "blurred"},
        ),
        PeerModel("shapes", "", "guidance_scale", 2.0, {"max_sequence_length": 16}),
    )
}
