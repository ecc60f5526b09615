"""Training of a transformer by flow matching: the part common to all models.

The model learns the velocity from data to noise at points in between. `advance` takes one step;
a subclass draws batches and returns their loss.

Source: Lipman et al., Flow matching for generative modeling, arXiv:2210.02747, 2022.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSchedule:
    """Settings that depend on the optimizer's step, counted from 1."""

    steps: int
    decay_from: int  # start of the learning rate's linear decay to the end
    warmup: int
    floor: float = 0.0  # minimum, relative to the peak learning rate
    rows: int = 64  # rows of a batch
    dropout: float = 0.1  # fraction of captions replaced by the empty one
    ema: float = 0.999  # decay of the averaged weights; shorter at first:
    ema_warmup: int = 20  # n / (n + ema_warmup) at step n
    loss_share: float = 0.01  # weight of the newest loss in the reported mean

    def share(self, step: int) -> float:
        """The fraction of the peak learning rate at a step."""
        left = (self.steps - step + 1) / (self.steps - self.decay_from + 1)
        return min(1.0, step / self.warmup, max(left, self.floor))


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Encoded examples with the encodings of their captions."""

    latents: Tensor  # (examples, ...), zero mean and unit spread
    caption: Tensor  # (examples,), row of the tables
    tables: tuple[Tensor, ...]  # text encodings, (captions, ...) each; row 0 is the empty caption
    noise: float = 0.0  # spread of noise added to the latents, same unit

    def text(self, captions: Tensor) -> tuple[Tensor, ...]:
        """The encodings of captions, by row, in single precision."""
        return tuple(table[captions].float() for table in self.tables)


def encode_examples(
    count: int,
    draw: Callable[[], tuple[str, Any]],
    encode: Callable[[Sequence[Any]], Tensor],
    tables: Callable[[Sequence[str]], tuple[Tensor, ...]],
    *,
    batch: int = 100,
) -> TrainingSet:
    """Draw and encode training examples, each with one caption.

    Args:
        draw: returns a caption and an example.
        encode: converts a batch of examples to latents.
        tables: encodes captions.
    """
    rows, latents = {"": 0}, []
    caption = torch.zeros(count, dtype=torch.long)
    for start in range(0, count, batch):
        examples = []
        for at in range(start, min(start + batch, count)):
            text, example = draw()
            examples.append(example)
            caption[at] = rows.setdefault(text, len(rows))
        latents.append(encode(examples))
    return TrainingSet(torch.cat(latents), caption, tables(list(rows)))


class FlowMatching:
    """A transformer in training, with an average of its weights.

    Args:
        build: makes the untrained model; called after torch is seeded.
        optimize: makes the model's optimizer.
    """

    def __init__(
        self,
        schedule: TrainingSchedule,
        build: Callable[[], Any],
        optimize: Callable[[Any], Any],
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.schedule, self.step, self.loss = schedule, 0, 1.0
        self.chance = torch.Generator().manual_seed(seed)
        self.model = build()
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.optimizer = optimize(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The complete training state."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "ema", "optimizer")}
        return parts | {"step": self.step, "loss": self.loss, "chance": self.chance.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name in ("model", "ema", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.loss = state["step"], state["loss"]
        self.chance.set_state(state["chance"])

    def batch_loss(self) -> Tensor:
        """Draw a batch, and return the model's loss on it."""
        raise NotImplementedError

    def advance(self) -> None:
        """Take one optimizer step."""
        self.step += 1
        loss = self.batch_loss()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(self.schedule.share(self.step))
        self.loss += self.schedule.loss_share * (loss.item() - self.loss)
        decay = min(self.schedule.ema, self.step / (self.step + self.schedule.ema_warmup))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.ema.parameters()), list(self.model.parameters()), 1 - decay
            )

    def kept_captions(self, captions: Tensor) -> Tensor:
        """Replace some captions by the empty one, so the model learns unconditional drawing."""
        kept = torch.rand(len(captions), generator=self.chance) >= self.schedule.dropout
        return captions * kept
