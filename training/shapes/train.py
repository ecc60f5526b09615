"""Train the embedded model from a seed, on two CPU cores.

    python -m training.shapes.train             all stages, then export and evaluate
    python -m training.shapes.train --evaluate  judge the model in the package

Stages: text encoders, autoencoder, transformer. Each leaves a checkpoint in
`build/shapes/`, so that a run that was stopped goes on where it was.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

from carpool.models.embedded import MODEL_DIR
from training.shapes.draw import SIZE_PX, prompts
from training.shapes.evaluate import PER_KIND, describe, evaluate, load, pictures, shares, sheet
from training.shapes.flow import Flow, Plan, Pool, generate, make_pool
from training.shapes.judge import why_not
from training.shapes.text import LENGTH, Encoders, train_text
from training.shapes.vae import build_vae, train_vae

SEED = 0
THREADS = 2
TEXT_STEPS = 800
VAE_STEPS = 5000
VARIED: dict[str, Any] = {"count": 40_000, "seed": 0, "spread": 1.0, "alone": 0.4}
CALM: dict[str, Any] = {"count": 40_000, "seed": 1, "spread": 0.5, "alone": 0.6}
PLAN = Plan(steps=9_100, calm_from=5_001, guided_from=5_501, decay_from=7_301)
SAVE_EVERY, JUDGE_EVERY = 500, 1000  # steps of the transformer

BUILD = Path("build/shapes")
DOCS = Path("docs")
SERVING = {
    "id": "shapes",
    "defaults": {
        "height": SIZE_PX,
        "width": SIZE_PX,
        "max_sequence_length": LENGTH,
        "guidance_scale": 2.0,
    },
    "max_pixels": (4 * SIZE_PX) ** 2,  # it draws well at its own size only
    "lora": {"outlined": "../shapes_lora/outlined.safetensors"},  # made by train_lora
}


class Journal:
    """A log that is printed and kept, with seconds of work that outlive a restart."""

    def __init__(self, path: Path) -> None:
        self._path, self._last_s = path, time.monotonic()
        lines = path.read_text().splitlines() if path.exists() else []
        self._spent_s = float(lines[-1][1:8]) if lines else 0.0

    def __call__(self, line: str) -> None:
        now_s = time.monotonic()
        self._spent_s, self._last_s = self._spent_s + now_s - self._last_s, now_s
        line = f"[{self._spent_s:7.0f} s] {line}"
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def kept(name: str, make: Callable[[], Any]) -> Any:
    """Load what a stage left, or run the stage and keep what it makes."""
    if not (BUILD / name).exists():
        save(make(), name)
    return torch.load(BUILD / name, weights_only=False)


def save(state: object, name: str) -> None:
    """Write a checkpoint so that it is either the old one or the new one."""
    torch.save(state, BUILD / f"{name}.tmp")
    os.replace(BUILD / f"{name}.tmp", BUILD / name)


def train_flow(flow: Flow, encoders: Encoders, vae: AutoencoderKL, log: Journal) -> None:
    """Train the transformer to the end of its plan, with judged samples on the way."""
    captions = prompts(32, held_out=False)
    text = [part.float() for part in encoders.table(captions)]
    while flow.step < flow.plan.steps:
        flow.advance()
        if flow.step % 100 == 0:
            rate = flow.plan.rate(flow.step)
            log(f"transformer step {flow.step} loss {flow.loss:.4f} rate {rate:.2e}")
        if flow.step % JUDGE_EVERY == 0:
            images = generate(flow.ema, vae, text)
            found = shares([why_not(*pair) for pair in zip(images, captions, strict=True)])
            log(f"transformer step {flow.step} {len(captions)} captions: {describe(found)}")
            sheet(images, captions).save(BUILD / f"step-{flow.step}.png")
        if flow.step % SAVE_EVERY == 0:
            save(flow.state(), "flow.pt")
            if flow.step < flow.plan.decay_from:
                save(flow.state(), "flow-stable.pt")


def export(flow: Flow, encoders: Encoders, vae: AutoencoderKL, folder: Path) -> int:
    """Write the averaged model as a diffusers folder, mostly in half precision; give its bytes."""
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=encoders.clip,
        tokenizer=encoders.clip_tokenizer,
        text_encoder_2=encoders.t5,
        tokenizer_2=encoders.t5_tokenizer,
        transformer=flow.ema,
    )
    fresh = BUILD / "model"
    shutil.rmtree(fresh, ignore_errors=True)
    for module in (vae, flow.ema):  # diffusers loads these in float32 unless told otherwise,
        module.to(torch.float16)  # transformers the text encoders in the type they were saved in
    pipeline.save_pretrained(fresh)
    (fresh / "carpool.json").write_text(json.dumps(SERVING, indent=2) + "\n")
    for path in fresh.rglob("*.safetensors"):
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(fresh, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train(log: Journal, *, to_the_end: bool = True) -> None:
    """Run the stages that are not done yet, then export what there is."""
    encoders = Encoders()
    encoders.load_state_dict(
        kept("text.pt", lambda: train_text(TEXT_STEPS, SEED, log).state_dict())
    )
    encoders.eval().requires_grad_(False)

    def trained_vae() -> tuple[dict[str, Any], dict[str, Any]]:
        trained = train_vae(VAE_STEPS, SEED, log)
        return trained.state_dict(), dict(trained.config)

    weights, config = kept("vae.pt", trained_vae)
    vae = build_vae().eval().requires_grad_(False)
    vae.load_state_dict(weights)
    vae.register_to_config(**{name: config[name] for name in ("scaling_factor", "shift_factor")})
    varied: Pool = kept("pool.pt", lambda: make_pool(encoders, vae, **VARIED))
    calm: Pool = kept("pool-calm.pt", lambda: make_pool(encoders, vae, **CALM))
    for pool in (varied, calm):
        log(f"{len(pool.latents)} scenes, {len(pool.pooled)} captions, noise {pool.noise:.3f}")
    flow = Flow(PLAN, varied, calm, SEED)
    if (BUILD / "flow.pt").exists():
        flow.load(torch.load(BUILD / "flow.pt", weights_only=False))
        log(f"transformer goes on from step {flow.step}")
    if to_the_end:
        train_flow(flow, encoders, vae, log)
    log(f"exported step {flow.step}: {export(flow, encoders, vae, MODEL_DIR)} bytes")


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
        evaluate(MODEL_DIR, log)
        captions = (prompts(PER_KIND)[at] for at in range(0, 2 * PER_KIND, 5))
        write_sheet(list(captions))
        shutil.copy(BUILD / "training.log", DOCS / "shapes-training.log")


def write_sheet(captions: list[str]) -> None:
    """Draw some held-out captions for the documentation."""
    images = pictures(load(MODEL_DIR), MODEL_DIR, captions)
    sheet(images, captions).save(DOCS / "shapes.png")


if __name__ == "__main__":
    main()
