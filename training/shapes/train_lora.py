"""Train the adapter `outlined` of the embedded model, on one CPU core.

    python -m training.shapes.train_lora

The autoencoder was not trained on outlines. Its decoder can draw thin outlines in the right
colours, but its encoder does not produce the latents: a copy of the encoder learns them with the
frozen decoder. The adapter is then trained on the copy's latents of outlined scenes, with the
recipe of `flow`: first plain, then half of each batch guided. Only the adapter is saved.
"""

import copy
import random
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from carpool.models.embedded import LORA_DIR, MODEL_DIR
from training.shapes.draw import draw, parse, prompts, sample
from training.shapes.evaluate import load
from training.shapes.fit import AdamW
from training.shapes.flow import PEAK, FluxMatching, generate, pack
from training.shapes.flow_matching import TrainingSchedule, TrainingSet
from training.shapes.outlined import outline, why_not_outlined
from training.shapes.run import Checkpoints, TrainingLog
from training.shapes.train import BUILD
from training.shapes.vae import pixels

SEED = 0
RANK = 16
LAYERS = (  # attention and feed-forward; the last two are in FLUX's single blocks
    r".*\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out|net\.0\.proj|net\.2|proj_mlp|proj_out)"
)
ENCODER_STEPS, ENCODER_ROWS = 600, 16
SCENES, SPREAD, ALONE = 6000, 0.15, 0.85
SCHEDULE = TrainingSchedule(
    steps=2_000, decay_from=1_001, warmup=50, floor=0.02,
    rows=48, ema=0.995, ema_warmup=10, loss_share=0.02,
)  # fmt: skip
GUIDED_FROM = 1_000
JUDGE_EVERY = 400


def outlined_scenes(count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw scenes in outlines; returns bytes (count, 3, SIZE_PX, SIZE_PX) and captions."""
    rng = random.Random(seed)
    images, captions = [], []
    for _ in range(count):
        scene, text = sample(rng, ALONE)
        images.append(draw(scene, rng, SPREAD, pen=outline))
        captions.append(text)
    return pixels(images), captions


def learn_to_encode(vae: AutoencoderKL, scenes: Tensor, log: TrainingLog) -> nn.Module:
    """Train a copy of the encoder on the latents that the decoder needs for outlines.

    Args:
        vae: not changed.
        scenes: (scenes, 3, SIZE_PX, SIZE_PX) bytes.

    Returns:
        A module from pictures (n, 3, SIZE_PX, SIZE_PX), -1 to 1, to the mean and spread of
        their latents, (n, 2 * CHANNELS, 8, 8).
    """
    encoder: nn.Module = copy.deepcopy(vae.encoder).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(encoder.parameters(), 5e-4, betas=(0.9, 0.99))
    chance, mean_loss = torch.Generator().manual_seed(SEED), 0.1
    for step in range(1, ENCODER_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * min(1.0, 2 * (1 - step / (ENCODER_STEPS + 1)))
        rows = torch.randint(len(scenes), (ENCODER_ROWS,), generator=chance)
        pictures = scenes[rows].float() / 127.5 - 1
        mean, _ = encoder(pictures).chunk(2, dim=1)
        noisy = mean + 0.1 * torch.randn(mean.shape, generator=chance)
        loss = (vae.decode(noisy).sample - pictures).abs().mean() + 2e-3 * mean.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss += 0.02 * (loss.item() - mean_loss)
        if step % 100 == 0:
            log(f"encoder step {step} loss {mean_loss:.4f} spread {mean.std().item():.2f}")
    return encoder.eval().requires_grad_(False)


@torch.no_grad()
def encode_scenes(
    pipe: FluxPipeline, encoder: nn.Module, scenes: Tensor, captions: list[str]
) -> TrainingSet:
    """Encode the scenes and their captions."""
    config, latents = pipe.vae.config, []
    for batch in torch.split(scenes, 100):
        mean, _ = encoder(batch.float() / 127.5 - 1).chunk(2, dim=1)
        latents.append(pack((mean - config.shift_factor) * config.scaling_factor))
    rows = {"": 0}
    caption_rows = torch.tensor([rows.setdefault(text, len(rows)) for text in captions])
    return TrainingSet(torch.cat(latents), caption_rows, embed(pipe, list(rows)), noise=0.05)


@torch.no_grad()
def embed(pipe: FluxPipeline, captions: list[str]) -> tuple[Tensor, Tensor]:
    """The pooled (n, 96) and token vectors (n, LENGTH, 96) of captions."""
    pooled, tokens = [], []
    for start in range(0, len(captions), 200):
        some = captions[start : start + 200]
        tokens_of, pooled_of, _ = pipe.encode_prompt(some, some, max_sequence_length=16)
        pooled.append(pooled_of)
        tokens.append(tokens_of)
    return torch.cat(pooled), torch.cat(tokens)


def new_flow(model: Any, examples: TrainingSet) -> FluxMatching:
    """Set up the training of an adapter, with the guidance of its base model."""

    def build() -> Any:
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
        return model

    def optimizer(model: nn.Module) -> AdamW:
        return AdamW(trained_weights(model), PEAK, betas=(0.9, 0.99))

    flow = FluxMatching(
        SCHEDULE, build, optimizer, SEED, examples=lambda step: examples, guided_from=GUIDED_FROM
    )
    flow.teacher = flow.model
    return flow


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def judged(pipe: FluxPipeline, model: Any, captions: list[str]) -> list[str]:
    """Draw captions with the adapter; returns the judge's reason for each picture."""
    images = generate(model, pipe.vae, embed(pipe, captions), seed=SEED)
    return [why_not_outlined(*pair) for pair in zip(images, captions, strict=True)]


def main() -> None:
    """Train, judge on held-out prompts, and write the adapter into the package."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(BUILD)
    log = TrainingLog(BUILD / "lora.log")
    pipe: Any = load(MODEL_DIR)
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(False)
    scenes, captions = outlined_scenes(SCENES, SEED)
    encoder = checkpoints.load_or_make(
        "outlined-encoder.pt", lambda: learn_to_encode(pipe.vae, scenes, log)
    )
    flow = new_flow(pipe.transformer, encode_scenes(pipe, encoder, scenes, captions))
    log(f"{sum(weight.numel() for weight in trained_weights(flow.model))} weights to train")
    held_out = [text for text in prompts(36) if len(parse(text).items) == 1]
    while flow.step < SCHEDULE.steps:
        flow.advance()
        if flow.step % 50 == 0:
            log(f"adapter step {flow.step} loss {flow.loss:.4f}")
        if flow.step % JUDGE_EVERY == 0:
            wrong = judged(pipe, flow.ema, held_out)
            save(flow.ema)
            log(f"adapter step {flow.step}: {wrong.count('')} of {len(held_out)} right")
            for text, reason in zip(held_out, wrong, strict=True):
                if reason and flow.step == SCHEDULE.steps:
                    log(f"  wrong: {text!r}: {reason}")


def save(model: nn.Module) -> None:
    """Save the adapter in half precision, in diffusers' format."""
    state = get_peft_model_state_dict(model, adapter_name="default")
    FluxPipeline.save_lora_weights(
        LORA_DIR,
        transformer_lora_layers={name: weight.half() for name, weight in state.items()},
        weight_name="outlined.safetensors",
    )
    (LORA_DIR / "outlined.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
