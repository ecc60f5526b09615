"""The same promise on CUDA: fused equals alone. Skipped where there is no such device."""

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import carpool
from support.tiny import ARGUMENTS, checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", ["flux", "sd3", "sdxl", "sd15"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_fused_equals_alone_on_cuda(family: str, dtype: str, most: float) -> None:
    path, base = checkpoint(family), dict(ARGUMENTS[family])
    base.pop("num_inference_steps")
    pipe = DiffusionPipeline.from_pretrained(path, dtype=getattr(torch, dtype)).to("cuda")
    requests = [
        carpool.Request(prompt, seed=i, num_inference_steps=2 + i, guidance_scale=1.0 + 2 * i)
        for i, prompt in enumerate(["a cat", "dance monkey in the rain", "blue", "a dog"])
    ]
    alone = [
        pipe(r.prompt, **base, **r.parameters,
             generator=torch.Generator().manual_seed(r.seed or 0)).images.cpu()
        for r in requests
    ]  # fmt: skip

    with carpool.load(path, device="cuda", dtype=dtype) as engine:
        outputs = engine.generate(requests, **base)

    for solo, output in zip(alone, outputs, strict=True):
        drawn: Any = output.images
        assert (drawn.float() - solo.float()).abs().max() <= most
