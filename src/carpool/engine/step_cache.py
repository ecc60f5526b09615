"""Step caching: some denoising steps of a request reuse its denoiser's last answer.

Between neighbouring steps a denoiser's answer changes in proportion to its input. So before a call
parks, its input is compared with that of the last call that ran: the distance, times the rate at
which answers changed before, predicts the change of the answer. While that is below the request's
threshold, the last answer is reused, and no forward runs. The first two steps and the last one
always run.

All decisions use the request's own inputs and answers, so other requests change nothing. Each
guidance branch and each expert has its own last answer; the first branch of a step decides for the
other branches. On an accelerator the decision waits for the device, once a step.

Source: EasyCache (Zhou et al., arXiv 2507.02860, 2025) for the predicted change; TeaCache (Liu et
al., arXiv 2411.19108, 2024) for the threshold. Unlike there, the last answer itself is reused:
docs/experiments.md lists the alternatives that were tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from carpool.engine.containment import TurnStage
from carpool.engine.intercept import Call
from carpool.engine.nested import tensors_in
from carpool.engine.observe.timeline import Timeline
from carpool.engine.serialization import copied
from carpool.types import Phase

FIRST_STEPS, LAST_STEPS = 2, 1  # steps that always run
TIMES = ("timestep", "t", "timestep_ratio", "timesteps")  # denoisers' names for the timestep


@dataclass(slots=True)
class _Last:
    """The last executed call of one branch."""

    sample: list[Tensor]  # its main input
    answer: Any
    size: float  # mean absolute value of the answer
    rate: float = inf  # change of answers per change of inputs; inf: unknown


class StepCache:
    """The cache of one request: see `request.AnswerSource`.

    Args:
        threshold: reuse an answer up to this predicted change, relative to its mean absolute
            value; above 0.
        timeline: has the number of steps done, and counts the skipped ones.
        on_skip: called for each skipped step.
    """

    stage: ClassVar[TurnStage] = "cache"
    warning: ClassVar[str] = "step_cache failed and was switched off: all further steps ran"
    phases: ClassVar[tuple[Phase, ...]] = ("denoise",)

    def __init__(self, threshold: float, timeline: Timeline, on_skip: Callable[[], None]) -> None:
        self._threshold, self.timeline, self._on_skip = threshold, timeline, on_skip
        self._last: dict[tuple[str, int], _Last] = {}  # keyed by component and branch
        self._moment: Any = None  # the timestep of the last call
        self._step, self._branch = -1, 0  # last call's; a new timestep begins a new step
        self._skips = False  # skip the current step

    def answer(self, call: Call) -> Any | None:
        """The reused answer of a call, or None. Call it once for each call."""
        arguments, sample = call.arguments(), main_input(call)
        moment = next((arguments[name] for name in TIMES if name in arguments), None)
        if call.target.phase != "denoise" or not sample or moment is None:
            return None
        is_first = self._moment is None or not _is_same(moment, self._moment)
        if is_first:
            self._moment, self._step, self._branch = copied(moment), self._step + 1, 0
        else:
            self._branch += 1
        last = self._last.get(self._place(call))
        if last is not None and [s.shape for s in last.sample] != [s.shape for s in sample]:
            last = None
        if is_first:
            step, steps = self.timeline.step, self.timeline.steps
            is_inner = self._step >= FIRST_STEPS and step < steps - LAST_STEPS
            self._skips = (
                last is not None and is_inner and self._change(last, sample) < self._threshold
            )
            if self._skips:
                self.timeline.skipped_steps += 1
                self._on_skip()
        return copied(last.answer) if last is not None and self._skips else None

    def ran(self, call: Call, answer: Any) -> None:
        """Record the answer of the call last passed to `answer`, which did run."""
        sample, outputs = main_input(call), list(tensors_in(answer))
        if call.target.phase != "denoise" or not sample or not outputs:
            return
        before, place = self._last.get(self._place(call)), self._place(call)
        copy = copied(answer)
        record = _Last([tensor.clone() for tensor in sample], copy, _mean(list(tensors_in(copy))))
        if before is not None:
            moved = _distance(sample, before.sample)
            change = _distance(outputs, list(tensors_in(before.answer)))
            if 0 < moved < inf and change < inf:
                record.rate = change / moved
        self._last[place] = record

    def _place(self, call: Call) -> tuple[str, int]:
        return f"{call.target.component}.{call.target.method}", self._branch

    @staticmethod
    def _change(last: _Last, sample: list[Tensor]) -> float:
        """The predicted change of the answer, relative to its mean absolute value."""
        return last.rate * _distance(sample, last.sample) / last.size if last.size > 0 else inf


def main_input(call: Call) -> list[Tensor]:
    """The tensors of a call's main input, the one with its rows; empty without a table."""
    spec = call.target.spec
    return [] if spec is None else list(tensors_in(call.arguments().get(spec.rows)))


def _mean(tensors: list[Tensor]) -> float:
    """The mean absolute value."""
    total = sum(float(tensor.abs().sum(dtype=torch.float32)) for tensor in tensors)
    return total / max(1, sum(tensor.numel() for tensor in tensors))


def _distance(tensors: list[Tensor], references: list[Tensor]) -> float:
    """The mean absolute difference; infinite if shapes differ."""
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in references]:
        return inf
    return _mean([a - b for a, b in zip(tensors, references, strict=True)])


def _is_same(moment: Any, reference: Any) -> bool:
    if isinstance(moment, Tensor) and isinstance(reference, Tensor):
        return torch.equal(moment, reference)
    return bool(moment == reference)
