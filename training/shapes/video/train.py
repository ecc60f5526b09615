"""Train the video model from a seed, on two CPU cores.

    python -m training.shapes.video.train             all stages, then export and evaluate
    python -m training.shapes.video.train --export    export the last checkpoint as it is
    python -m training.shapes.video.train --evaluate  judge the model in the package

Stages: text encoder, autoencoder, transformer. Each saves a checkpoint in
`build/shapes-video/`, so a stopped run resumes.
"""

import copy
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

from carpool.models.embedded import VIDEO_MODEL_DIR
from training.shapes import run
from training.shapes.evaluate import load
from training.shapes.flow_matching import TrainingSchedule, TrainingSet
from training.shapes.run import Checkpoints, TrainingLog
from training.shapes.text import LENGTH
from training.shapes.video.draw import FRAMES, SIZE_PX, prompts
from training.shapes.video.evaluate import HELD_OUT, evaluate, reasons, sheet, videos
from training.shapes.video.flow import WanMatching, encode_videos
from training.shapes.video.text import Encoder, train_text
from training.shapes.video.vae import build_vae, polish_vae, train_vae

SEED = 0
THREADS = 1
TEXT_STEPS = 400
STILL_STEPS, VAE_STEPS = 400, 1500
VIDEOS = 6_000
POLISH_STEPS = 1200  # steps of the decoder alone
SCHEDULE = TrainingSchedule(steps=3_000, decay_from=1_201, warmup=100, ema=0.997)
SAVE_EVERY, JUDGE_EVERY = 250, 500  # steps of the transformer

BUILD = Path("build/shapes-video")
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
    "max_pixels": (2 * SIZE_PX) ** 2,  # it draws well only near its own size
}


def train_flow(
    flow: WanMatching,
    encoder: Encoder,
    vae: AutoencoderKLWan,
    checkpoints: Checkpoints,
    log: TrainingLog,
) -> None:
    """Train the transformer to the end of its schedule, judging samples in between."""
    captions = prompts(24, held_out=False)
    model = checkpoints.folder / "model"
    while flow.step < flow.schedule.steps:
        flow.advance()
        if flow.step % 50 == 0:
            share = flow.schedule.share(flow.step)
            log(f"transformer step {flow.step} loss {flow.loss:.4f} rate {share:.2f} of the peak")
        if flow.step % SAVE_EVERY == 0:
            checkpoints.save(flow.state_dict(), "flow.pt")
        if flow.step % JUDGE_EVERY == 0:
            checkpoints.export(pipeline_of(flow, encoder, vae), SERVING, model)
            clips = videos(load(model), model, captions)
            right = reasons(clips, captions).count("")
            log(f"transformer step {flow.step} {right} of {len(captions)} captions right")
            sheet(clips, captions).save(checkpoints.folder / f"step-{flow.step}.png")


def pipeline_of(flow: WanMatching, encoder: Encoder, vae: AutoencoderKLWan) -> WanPipeline:
    """Make a pipeline from the averaged model, mostly in half precision."""
    return WanPipeline(
        tokenizer=encoder.tokenizer,
        text_encoder=encoder.umt5,
        # diffusers loads these in float32 by default,
        # transformers the text encoder in the type it was saved in
        vae=copy.deepcopy(vae).to(torch.float16),
        transformer=copy.deepcopy(flow.ema).to(torch.float16),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
        ),
    )


def train(log: TrainingLog, to_the_end: bool) -> None:
    """Run the unfinished stages, then export the current state."""
    checkpoints = Checkpoints(BUILD)
    encoder = Encoder()
    encoder.load_state_dict(
        checkpoints.load_or_make("text.pt", lambda: train_text(TEXT_STEPS, SEED, log).state_dict())
    )
    encoder.eval().requires_grad_(False)

    def trained_vae() -> AutoencoderKLWan:
        return polish_vae(train_vae(STILL_STEPS, VAE_STEPS, SEED, log), POLISH_STEPS, SEED, log)

    vae = checkpoints.autoencoder(build_vae, trained_vae, ("latents_mean", "latents_std"))
    examples: TrainingSet = checkpoints.load_or_make(
        "videos.pt", lambda: encode_videos(encoder, vae, VIDEOS, SEED)
    )
    log(f"{len(examples.latents)} videos, {len(examples.tables[0])} captions")
    flow = WanMatching(SCHEDULE, examples, SEED)
    checkpoints.resume(flow, log)
    if to_the_end:
        train_flow(flow, encoder, vae, checkpoints, log)
    size = checkpoints.export(pipeline_of(flow, encoder, vae), SERVING, VIDEO_MODEL_DIR)
    log(f"exported step {flow.step}: {size} bytes")


def judge_package(log: TrainingLog) -> None:
    """Judge the packaged model, and make some held-out videos for the documentation."""
    evaluate(VIDEO_MODEL_DIR, log)
    captions = prompts(HELD_OUT)[:12]
    clips = videos(load(VIDEO_MODEL_DIR), VIDEO_MODEL_DIR, captions)
    sheet(clips, captions).save(run.DOCS / "shapes-video.png")


if __name__ == "__main__":
    run.main(__doc__, BUILD, "shapes-video", threads=THREADS, train=train, evaluate=judge_package)
