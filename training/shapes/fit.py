"""The optimisation loop of text encoders and autoencoders, and the AdamW of all stages."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Log = Callable[[str], None]

Loss = tuple[Tensor, Callable[[], str]]
"""The loss of a batch, and a report of the batch."""


class AdamW(torch.optim.AdamW):
    """AdamW with the gradient's norm clipped to 1.

    Args:
        one_cycle: steps of torch's one-cycle schedule, and the fraction with a rising rate;
            None: each step gets its rate.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        peak: float,
        one_cycle: tuple[int, float] | None = None,
        **options: Any,
    ) -> None:
        self._weights, self._peak = list(weights), peak
        super().__init__(self._weights, peak, **options)
        self._cycle = one_cycle and torch.optim.lr_scheduler.OneCycleLR(
            self, peak, one_cycle[0], pct_start=one_cycle[1]
        )

    def step(self, share: float = 1.0) -> None:  # type: ignore[override]
        """Take a step at a fraction, 0 to 1, of the peak learning rate."""
        if not self._cycle:
            for group in self.param_groups:
                group["lr"] = self._peak * share
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        super().step()
        if self._cycle:
            self._cycle.step()


def fit(
    name: str,
    steps: int,
    batch_loss: Callable[[int], Loss],
    optimizer: Any,
    log: Log,
    *,
    share: Callable[[int], float] = lambda step: 1.0,
    log_every: int = 100,
) -> None:
    """Minimise the loss on newly drawn batches.

    Args:
        batch_loss: draws the batch of a step (from 1) and returns its loss.
        share: fraction of the peak learning rate, by step.
    """
    for step in range(1, steps + 1):
        loss, report = batch_loss(step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(share(step))
        if step % log_every == 0 or step == steps:
            log(f"{name} step {step} loss {loss.item():.4f} {report()}")
