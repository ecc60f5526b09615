"""Train the adapter `outlined` of the embedded model, on one CPU core.

    python -m training.shapes.train_lora

The autoencoder has never seen an outline. Its decoder can draw thin ones in the right colours,
but its encoder does not say so: a copy of it learns to, with the decoder as it is. The adapter is
then trained on what the copy makes of outlined scenes, with the recipe of `flow`: plain first,
then half of each batch with the guidance of the model itself. Only the adapter is kept.
"""

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from carpool.models.embedded import LORA_DIR, MODEL_DIR
from training.shapes.draw import draw, parse, prompts, sample
from training.shapes.evaluate import load
from training.shapes.flow import generate, pack, velocity
from training.shapes.outlined import outline, why_not_outlined
from training.shapes.train import BUILD, Journal, kept
from training.shapes.vae import pixels

SEED = 0
RANK = 16
LAYERS = (  # attention and feed-forward; the last two are those of FLUX's single blocks
    r".*\.(to_q|to_k|to_v|to_out\.0|add_[qkv]_proj|to_add_out|net\.0\.proj|net\.2|proj_mlp|proj_out)"
)
ENCODER_STEPS, ENCODER_ROWS = 600, 16
SCENES, SPREAD, ALONE = 6000, 0.15, 0.85
ROWS, PEAK, DROPOUT = 48, 2e-3, 0.1
STEPS, GUIDED_FROM, WARMUP, AVERAGE = 2000, 1000, 50, 0.995
JUDGE_EVERY = 400


@dataclass(frozen=True, slots=True)
class Pool:
    """Encoded scenes with the encodings of their captions."""

    latents: Tensor  # (scenes, GRID * GRID, WIDTH)
    noise: float  # spread of what is added to them
    caption: Tensor  # (scenes,), row of the tables
    pooled: Tensor  # (captions, 96); row 0 is the empty caption
    tokens: Tensor  # (captions, LENGTH, 96)


def outlined_scenes(count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw scenes in outlines; gives bytes (count, 3, SIZE_PX, SIZE_PX) and their captions."""
    rng = random.Random(seed)
    images, captions = [], []
    for _ in range(count):
        scene, text = sample(rng, ALONE)
        images.append(draw(scene, rng, SPREAD, pen=outline))
        captions.append(text)
    return pixels(images), captions


def learn_to_encode(vae: AutoencoderKL, shown: Tensor, log: Journal) -> nn.Module:
    """Teach a copy of the encoder what the decoder needs to draw outlines.

    Args:
        vae: stays as it is.
        shown: (scenes, 3, SIZE_PX, SIZE_PX) bytes.

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
        rows = torch.randint(len(shown), (ENCODER_ROWS,), generator=chance)
        wanted = shown[rows].float() / 127.5 - 1
        mean, _ = encoder(wanted).chunk(2, dim=1)
        noisy = mean + 0.1 * torch.randn(mean.shape, generator=chance)
        loss = (vae.decode(noisy).sample - wanted).abs().mean() + 2e-3 * mean.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss += 0.02 * (loss.item() - mean_loss)
        if step % 100 == 0:
            log(f"encoder step {step} loss {mean_loss:.4f} spread {mean.std().item():.2f}")
    return encoder.eval().requires_grad_(False)


@torch.no_grad()
def make_pool(pipe: FluxPipeline, encoder: nn.Module, shown: Tensor, captions: list[str]) -> Pool:
    """Encode the scenes and their captions."""
    config, latents = pipe.vae.config, []
    for batch in torch.split(shown, 100):
        mean, _ = encoder(batch.float() / 127.5 - 1).chunk(2, dim=1)
        latents.append(pack((mean - config.shift_factor) * config.scaling_factor))
    rows = {"": 0}
    caption_rows = torch.tensor([rows.setdefault(text, len(rows)) for text in captions])
    pooled, tokens = embed(pipe, list(rows))
    return Pool(torch.cat(latents), 0.05, caption_rows, pooled, tokens)


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


class Training:
    """The adapter in training, its average, and what the next step depends on."""

    def __init__(self, model: Any, pool: Pool) -> None:
        torch.manual_seed(SEED)
        self.model, self.pool, self.step, self.loss = model.requires_grad_(False), pool, 0, 1.0
        self.chance = torch.Generator().manual_seed(SEED)
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.average = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, PEAK, betas=(0.9, 0.99))

    def advance(self) -> None:
        """Take one optimizer step."""
        self.step += 1
        left = min(1.0, (STEPS - self.step + 1) / (STEPS / 2))
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, self.step / WARMUP, max(left, 0.02))
        pool = self.pool
        rows = torch.randint(len(pool.latents), (ROWS,), generator=self.chance)
        z = pool.latents[rows]
        z = z + pool.noise * torch.randn(z.shape, generator=self.chance)
        n = torch.randn(z.shape, generator=self.chance)
        t = torch.sigmoid(torch.randn(ROWS, generator=self.chance))
        g = 1 + 4 * torch.rand(ROWS, generator=self.chance)
        captions = pool.caption[rows] * (torch.rand(ROWS, generator=self.chance) >= DROPOUT)
        x, target = torch.lerp(z, n, t[:, None, None]), n - z
        if self.step >= GUIDED_FROM:
            taught = slice(ROWS // 2, ROWS)  # the other half stays plain, at g = 1
            g[: ROWS // 2] = 1.0
            target[taught] += self._guidance(x[taught], t[taught], g[taught], captions[taught])
        text = pool.pooled[captions], pool.tokens[captions]
        loss = nn.functional.mse_loss(velocity(self.model, x, t, g, text), target)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.loss += 0.02 * (loss.item() - self.loss)
        with torch.no_grad():
            decay = min(AVERAGE, self.step / (self.step + 10))
            torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @torch.no_grad()
    def _guidance(self, x: Tensor, t: Tensor, g: Tensor, captions: Tensor) -> Tensor:
        """Give what guidance adds to the velocity of each row; nothing without a caption."""
        both = torch.cat([captions, torch.zeros_like(captions)])
        text = self.pool.pooled[both], self.pool.tokens[both]
        v = velocity(self.model, x.repeat(2, 1, 1), t.repeat(2), torch.ones(len(both)), text)
        said, silent = v.chunk(2)
        return (g - 1)[:, None, None] * (said - silent)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their average; twice is as before."""
        for weight, mean in zip(self.weights, self.average, strict=True):
            kept = weight.clone()
            weight.copy_(mean)
            mean.copy_(kept)


def judged(pipe: FluxPipeline, captions: list[str]) -> list[str]:
    """Draw captions with the adapter as it is; gives why each picture is wrong."""
    images = generate(pipe.transformer, pipe.vae, embed(pipe, captions), seed=SEED)
    return [why_not_outlined(*pair) for pair in zip(images, captions, strict=True)]


def main() -> None:
    """Train, judge on held-out prompts, and write the adapter into the package."""
    torch.set_num_threads(1)
    BUILD.mkdir(parents=True, exist_ok=True)
    log = Journal(BUILD / "lora.log")
    pipe: Any = load(MODEL_DIR)
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(False)
    shown, captions = outlined_scenes(SCENES, SEED)
    encoder = kept("outlined-encoder.pt", lambda: learn_to_encode(pipe.vae, shown, log))
    training = Training(pipe.transformer, make_pool(pipe, encoder, shown, captions))
    log(f"{sum(weight.numel() for weight in training.weights)} weights to train")
    held_out = [text for text in prompts(36) if len(parse(text).items) == 1]
    while training.step < STEPS:
        training.advance()
        if training.step % 50 == 0:
            log(f"adapter step {training.step} loss {training.loss:.4f}")
        if training.step % JUDGE_EVERY == 0:
            training.swap()
            wrong = judged(pipe, held_out)
            save(pipe)
            training.swap()
            log(f"adapter step {training.step}: {wrong.count('')} of {len(held_out)} right")
            for text, reason in zip(held_out, wrong, strict=True):
                if reason and training.step == STEPS:
                    log(f"  wrong: {text!r}: {reason}")


def save(pipe: FluxPipeline) -> None:
    """Write the adapter in half precision, as diffusers does."""
    state = get_peft_model_state_dict(pipe.transformer, adapter_name="default")
    FluxPipeline.save_lora_weights(
        LORA_DIR,
        transformer_lora_layers={name: weight.half() for name, weight in state.items()},
        weight_name="outlined.safetensors",
    )
    (LORA_DIR / "outlined.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
