"""Train the embedded model from a seed, on two CPU cores.

    python -m training.shapes.train             all stages, then export and evaluate
    python -m training.shapes.train --export    export the last checkpoint as it is
    python -m training.shapes.train --evaluate  judge the model in the package

Stages: text encoders, autoencoder, transformer. Each saves a checkpoint in
`build/shapes/`, so a stopped run resumes.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from carpool.models.embedded import MODEL_DIR
from training.shapes import run
from training.shapes.draw import SIZE_PX, prompts
from training.shapes.evaluate import PER_KIND, describe, evaluate, load, sheet
from training.shapes.evaluate import generate as generate_with
from training.shapes.fit import AdamW
from training.shapes.flow import (
    PEAK,
    FluxMatching,
    build_transformer,
    encode_scenes,
    generate,
)
from training.shapes.flow_matching import TrainingSchedule, TrainingSet
from training.shapes.judge import why_not
from training.shapes.run import Checkpoints, TrainingLog
from training.shapes.text import LENGTH, Encoders, train_text
from training.shapes.vae import build_vae, train_vae

SEED = 0
THREADS = 2
TEXT_STEPS = 800
VAE_STEPS = 5000
VARIED: dict[str, Any] = {"count": 40_000, "seed": 0, "spread": 1.0, "alone": 0.4}
CALM: dict[str, Any] = {"count": 40_000, "seed": 1, "spread": 0.5, "alone": 0.6}
SCHEDULE = TrainingSchedule(steps=9_100, decay_from=7_301, warmup=300, floor=0.01)
CALM_FROM, GUIDED_FROM = 5_001, 5_501  # first step with less variation, first step with guidance
SAVE_EVERY, JUDGE_EVERY = 500, 1000  # steps of the transformer

BUILD = Path("build/shapes")
SERVING = {
    "id": "shapes",
    "defaults": {
        "height": SIZE_PX,
        "width": SIZE_PX,
        "max_sequence_length": LENGTH,
        "guidance_scale": 2.0,
    },
    "max_pixels": (4 * SIZE_PX) ** 2,  # it draws well only near its own size
    "rewriter": "../shapes_rewriter",
    "lora": {"outlined": "../shapes_lora/outlined.safetensors"},  # from train_lora
}


def new_flow(varied: TrainingSet, calm: TrainingSet) -> FluxMatching:
    """Set up the training of the transformer."""

    def optimizer(model: FluxTransformer2DModel) -> AdamW:
        return AdamW(model.parameters(), PEAK, betas=(0.9, 0.99), weight_decay=0.01, fused=True)

    flow = FluxMatching(
        SCHEDULE, build_transformer, optimizer, SEED,
        examples=lambda step: calm if step >= CALM_FROM else varied,
        guided_from=GUIDED_FROM, plain_rows=SCHEDULE.rows // 4,
    )  # fmt: skip
    # compiled for one shape; pictures are drawn with the uncompiled `ema`
    flow.student, flow.teacher = torch.compile(flow.model), torch.compile(flow.ema)
    return flow


def train_flow(
    flow: FluxMatching,
    encoders: Encoders,
    vae: AutoencoderKL,
    checkpoints: Checkpoints,
    log: TrainingLog,
) -> None:
    """Train the transformer to the end of its schedule, judging samples in between."""
    captions = prompts(32, held_out=False)
    text = [part.float() for part in encoders.table(captions)]
    while flow.step < flow.schedule.steps:
        flow.advance()
        if flow.step % 100 == 0:
            rate = PEAK * flow.schedule.share(flow.step)
            log(f"transformer step {flow.step} loss {flow.loss:.4f} rate {rate:.2e}")
        if flow.step % JUDGE_EVERY == 0:
            images = generate(flow.ema, vae, text)
            summary = describe([why_not(*pair) for pair in zip(images, captions, strict=True)])
            log(f"transformer step {flow.step} {len(captions)} captions: {summary}")
            sheet(images, captions).save(checkpoints.folder / f"step-{flow.step}.png")
        if flow.step % SAVE_EVERY == 0:
            checkpoints.save(flow.state_dict(), "flow.pt")
            if flow.step < flow.schedule.decay_from:
                checkpoints.save(flow.state_dict(), "flow-stable.pt")


def pipeline_of(flow: FluxMatching, encoders: Encoders, vae: AutoencoderKL) -> FluxPipeline:
    """Make a pipeline from the averaged model, mostly in half precision."""
    for module in (vae, flow.ema):  # diffusers loads these in float32 by default,
        module.to(torch.float16)  # transformers the text encoders in the type they were saved in
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=encoders.clip,
        tokenizer=encoders.clip_tokenizer,
        text_encoder_2=encoders.t5,
        tokenizer_2=encoders.t5_tokenizer,
        transformer=flow.ema,
    )


def train(log: TrainingLog, to_the_end: bool) -> None:
    """Run the unfinished stages, then export the current state."""
    checkpoints = Checkpoints(BUILD)
    encoders = Encoders()
    encoders.load_state_dict(
        checkpoints.load_or_make("text.pt", lambda: train_text(TEXT_STEPS, SEED, log).state_dict())
    )
    encoders.eval().requires_grad_(False)
    vae = checkpoints.autoencoder(
        build_vae, lambda: train_vae(VAE_STEPS, SEED, log), ("scaling_factor", "shift_factor")
    )
    varied: TrainingSet = checkpoints.load_or_make(
        "scenes.pt", lambda: encode_scenes(encoders, vae, **VARIED)
    )
    calm: TrainingSet = checkpoints.load_or_make(
        "scenes-calm.pt", lambda: encode_scenes(encoders, vae, **CALM)
    )
    for scenes in (varied, calm):
        captions = len(scenes.tables[0])
        log(f"{len(scenes.latents)} scenes, {captions} captions, noise {scenes.noise:.3f}")
    flow = new_flow(varied, calm)
    checkpoints.resume(flow, log)
    if to_the_end:
        train_flow(flow, encoders, vae, checkpoints, log)
    size = checkpoints.export(pipeline_of(flow, encoders, vae), SERVING, MODEL_DIR)
    log(f"exported step {flow.step}: {size} bytes")


def judge_package(log: TrainingLog) -> None:
    """Judge the packaged model, and draw some held-out captions for the documentation."""
    evaluate(MODEL_DIR, log)
    captions = [prompts(PER_KIND)[at] for at in range(0, 2 * PER_KIND, 5)]
    images = generate_with(load(MODEL_DIR), MODEL_DIR, captions)
    sheet(images, captions).save(run.DOCS / "shapes.png")


if __name__ == "__main__":
    run.main(__doc__, BUILD, "shapes", threads=THREADS, train=train, evaluate=judge_package)
