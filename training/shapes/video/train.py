"""Train the video model from a seed, on two CPU cores.

    python -m training.shapes.video.train             all stages, then export and evaluate
    python -m training.shapes.video.train --export    export the last checkpoint as it is
    python -m training.shapes.video.train --evaluate  judge the model in the package

Stages: text encoder, autoencoder, transformer. Each leaves a checkpoint in
`build/shapes-video/`, so that a run that was stopped goes on where it was.
"""

import argparse
import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

from carpool.models.embedded import VIDEO_MODEL_DIR
from training.shapes.train import Journal
from training.shapes.video.draw import FRAMES, SIZE_PX, prompts
from training.shapes.video.evaluate import HELD_OUT, evaluate, load, reasons, sheet, videos
from training.shapes.video.flow import Flow, Plan, Pool, make_pool
from training.shapes.video.text import LENGTH, Encoder, train_text
from training.shapes.video.vae import build_vae, polish_vae, train_vae

SEED = 0
THREADS = 1
TEXT_STEPS = 400
STILL_STEPS, VAE_STEPS = 400, 1500
CLIPS = 6_000
POLISH_STEPS = 1200  # of the decoder alone
PLAN = Plan(steps=3_000)
SAVE_EVERY, JUDGE_EVERY = 250, 500  # steps of the transformer

BUILD = Path("build/shapes-video")
DOCS = Path("docs")
SERVING = {
    "id": "shapes-video",
    "defaults": {
        "height": SIZE_PX,
        "width": SIZE_PX,
        "num_frames": FRAMES,
        "num_inference_steps": 12,
        "guidance_scale": 3.0,
        "max_sequence_length": LENGTH,
    },
    "max_pixels": (2 * SIZE_PX) ** 2,  # it draws well at its own size only
}


def kept(name: str, make: Callable[[], Any]) -> Any:
    """Load what a stage left, or run the stage and keep what it makes."""
    if not (BUILD / name).exists():
        save(make(), name)
    return torch.load(BUILD / name, weights_only=False)


def save(state: object, name: str) -> None:
    """Write a checkpoint so that it is either the old one or the new one."""
    torch.save(state, BUILD / f"{name}.tmp")
    os.replace(BUILD / f"{name}.tmp", BUILD / name)


def train_flow(flow: Flow, encoder: Encoder, vae: AutoencoderKLWan, log: Journal) -> None:
    """Train the transformer to the end of its plan, with judged samples on the way."""
    captions = prompts(24, held_out=False)
    while flow.step < flow.plan.steps:
        flow.advance()
        if flow.step % 50 == 0:
            share = flow.plan.share(flow.step)
            log(f"transformer step {flow.step} loss {flow.loss:.4f} rate {share:.2f} of the peak")
        if flow.step % SAVE_EVERY == 0:
            save(flow.state(), "flow.pt")
        if flow.step % JUDGE_EVERY == 0:
            export(flow, encoder, vae, BUILD / "model")
            made = videos(load(BUILD / "model"), BUILD / "model", captions)
            right = reasons(made, captions).count("")
            log(f"transformer step {flow.step} {right} of {len(captions)} captions right")
            sheet(made, captions).save(BUILD / f"step-{flow.step}.png")


def export(flow: Flow, encoder: Encoder, vae: AutoencoderKLWan, folder: Path) -> int:
    """Write the averaged model as a diffusers folder, mostly in half precision; give its bytes."""
    pipeline = WanPipeline(
        tokenizer=encoder.tokenizer,
        text_encoder=encoder.umt5,
        # diffusers loads these in float32 unless told otherwise,
        # transformers the text encoder in the type it was saved in
        vae=copy.deepcopy(vae).to(torch.float16),
        transformer=copy.deepcopy(flow.ema).to(torch.float16),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
        ),
    )
    fresh = BUILD / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    (fresh / "carpool.json").write_text(json.dumps(SERVING, indent=2) + "\n")
    for path in fresh.rglob("*.safetensors"):
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(fresh, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train(log: Journal, *, to_the_end: bool = True) -> None:
    """Run the stages that are not done yet, then export what there is."""
    encoder = Encoder()
    encoder.load_state_dict(kept("text.pt", lambda: train_text(TEXT_STEPS, SEED, log).state_dict()))
    encoder.eval().requires_grad_(False)

    def trained_vae() -> tuple[dict[str, Any], dict[str, Any]]:
        vae = polish_vae(train_vae(STILL_STEPS, VAE_STEPS, SEED, log), POLISH_STEPS, SEED, log)
        return vae.state_dict(), dict(vae.config)

    weights, config = kept("vae.pt", trained_vae)
    vae = build_vae().eval().requires_grad_(False)
    vae.load_state_dict(weights)
    vae.register_to_config(**{name: config[name] for name in ("latents_mean", "latents_std")})
    pool: Pool = kept("pool.pt", lambda: make_pool(encoder, vae, CLIPS, SEED))
    log(f"{len(pool.latents)} clips, {len(pool.vectors)} captions")
    flow = Flow(PLAN, pool, SEED)
    if (BUILD / "flow.pt").exists():
        flow.load(torch.load(BUILD / "flow.pt", weights_only=False))
        log(f"transformer goes on from step {flow.step}")
    if to_the_end:
        train_flow(flow, encoder, vae, log)
    log(f"exported step {flow.step}: {export(flow, encoder, vae, VIDEO_MODEL_DIR)} bytes")


def main() -> None:
    """Train, export and judge, or do the later part alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluate", action="store_true", help="only judge the packaged model")
    parser.add_argument("--export", action="store_true", help="only export the last checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    BUILD.mkdir(parents=True, exist_ok=True)
    log = Journal(BUILD / "training.log")
    if not options.evaluate:
        train(log, to_the_end=not options.export)
    if not options.export:
        evaluate(VIDEO_MODEL_DIR, log)
        captions = prompts(HELD_OUT)[:12]
        made = videos(load(VIDEO_MODEL_DIR), VIDEO_MODEL_DIR, captions)
        sheet(made, captions).save(DOCS / "shapes-video.png")
        shutil.copy(BUILD / "training.log", DOCS / "shapes-video-training.log")


if __name__ == "__main__":
    main()
