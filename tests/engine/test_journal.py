"""A journal: another engine goes on where the first one was, and gives the same bits."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from carpool.engine import journal as journals
from carpool.engine.answers import copied, pack, size, unpack
from carpool.engine.journal import Answered, Journal
from carpool.request.parameters import check
from carpool.types import JournalEntry, Request
from support.engine_driver import Drive, Recorder, driving, fresh
from support.tiny import ARGUMENTS

STEPS = 6


def put(
    drive: Drive,
    request: Request,
    past: list[JournalEntry],
    kept: list[Answered] | None = None,
    **changes: Any,
) -> Recorder:
    recorder = Recorder()
    sink = None if kept is None else kept.append
    checked = replace(check(drive.engine.loaded.card, request), **changes)
    drive.engine.submit(checked, recorder, journal=Journal(past, sink))
    return recorder


def asked(family: str, **parameters: Any) -> Request:
    given = {**ARGUMENTS[family], "num_inference_steps": STEPS, **parameters}
    return Request("a photo of a cat", **{"seed": 7, **given})


def tensor_of(recorder: Recorder) -> torch.Tensor:
    if recorder.error is not None:
        raise recorder.error
    fields = recorder.outcome.fields
    value = fields["images"] if "images" in fields else fields["frames"]
    assert isinstance(value, torch.Tensor)
    return value


def interrupted(
    family: str, request: Request, steps: int, **changes: Any
) -> tuple[list[JournalEntry], torch.Tensor, int]:
    """What was written down until so many steps; the whole picture; forwards that were left."""
    kept: list[Answered] = []
    with driving(family, numerics="exact") as drive:
        ran = put(drive, request, [], kept, **changes)
        drive.turn_until(lambda: any(event.step >= steps for event in ran.events))
        entries, made = [one.entry() for one in kept], len(drive.forwards)
        drive.finish()
        return entries, tensor_of(ran), len(drive.forwards) - made


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("flux", {}),
        ("sd", {"guidance_scale": 5.0}),
        ("qwen-image", {"true_cfg_scale": 4.0, "negative_prompt": "dark"}),
        ("wan", {"guidance_scale": 5.0}),
    ],
)
def test_another_engine_runs_only_what_was_not_written_down_and_gives_the_same_bits(
    family: str, parameters: dict[str, Any]
) -> None:
    request = asked(family, **parameters)
    entries, whole, left = interrupted(family, request, 3)
    with driving(fresh(family), numerics="exact") as other:
        again = put(other, request, entries)
        other.finish()

        assert torch.equal(tensor_of(again), whole)
        assert len(other.forwards) == left
        assert again.step == STEPS
        steps = [event.step for event in again.events if event.kind == "step"]
        assert steps[0] >= 3
        assert other.engine.timeline(request.request_id)["replayed_calls"] == len(entries)
