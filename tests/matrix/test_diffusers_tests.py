"""Pipelines of diffusers' own tests: six at once, against the plain pipeline alone.

`make test-diffusers DIFFUSERS_CHECKOUT=FOLDER` runs them and writes `docs/tried_pipelines.json`,
from which `docs/models.md` tells what was seen. In exact numerics, so that a difference is a
fault and never rounding; how far `fast` is off is measured beside it.
"""

import copy
import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.diffusers_tests import FOLDERS, configurations, pipeline, requests, tensors
from support.engine_driver import driving
from support.isolation import differences, state_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not FOLDERS, reason="DIFFUSERS_CHECKOUT names no checkout of diffusers"),
]
RESULTS = Path(__file__).parents[2] / "docs" / "tried_pipelines.json"


def alone(name: str, arguments: dict[str, Any], seed: int) -> list[torch.Tensor]:
    pipe, given = pipeline(name), copy.deepcopy(arguments)
    torch.manual_seed(seed)
    np.random.seed(seed)
    if "generator" in inspect.signature(type(pipe).__call__).parameters:
        given["generator"] = torch.Generator().manual_seed(seed)
    return list(tensors(pipe(**given)))


def off(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, of values up to one or of the largest value."""
    assert [one.shape for one in ours] == [one.shape for one in theirs]
    scale = max(1.0, *(float(one.abs().max()) for one in theirs if one.numel()))
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs) / scale


def together(name: str, numerics: str) -> tuple[list[Any], dict[str, int]]:
    """The answers of the requests, two more among them that are cancelled and fail; twice."""
    pipe, asked = pipeline(name), requests(name)
    before = state_of(pipe)
    taken = inspect.signature(type(pipe).__call__).parameters
    failure = next((n for n in ("callback_on_step_end", "callback") if n in taken), None)

    def fail(*_: Any) -> dict[str, Any]:
        raise ValueError("on purpose")

    with driving(pipe, numerics=numerics) as drive:

        def submit(arguments: dict[str, Any], **more: Any) -> Any:
            return drive.submit(**{"prompt": None, **copy.deepcopy(arguments), **more})

        for turn in range(2):  # the second time what fuses is known
            drive.forwards.clear()
            cancelled = submit(asked[0], seed=90, request_id=f"cancelled {turn}")
            heard = [submit(one, seed=seed) for seed, one in enumerate(asked[:3])]
            failing = submit(asked[0], seed=91, **{failure: fail}) if failure else None
            while not any(event.step for event in heard[0].events) and drive.engine.step():
                pass
            heard += [submit(one, seed=seed + 3) for seed, one in enumerate(asked[3:])]
            drive.engine.cancel(f"cancelled {turn}")
            drive.finish()
            assert cancelled.outcomes
            assert failing is None or failing.error is not None
        widths: dict[str, int] = {}
        for one in drive.forwards:
            method = f"{one.component}.{one.method}".removesuffix(".forward")
            widths[method] = max(widths.get(method, 0), one.requests)
    assert differences(before, state_of(pipe)) == []
    return heard, widths


def note(name: str, **measured: Any) -> None:
    if "WRITE_RESULTS" in os.environ:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[name] = measured
        RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


@pytest.mark.parametrize("name", configurations())
def test_six_at_once_get_what_each_gets_alone_bit_for_bit_in_exact_numerics(name: str) -> None:
    try:
        expected = [alone(name, one, seed) for seed, one in enumerate(requests(name))]
    except Exception as error:
        pytest.skip(f"plain diffusers cannot run it here: {type(error).__name__}: {error}")

    measured: dict[str, Any] = {}
    for numerics in ("exact", "fast"):
        heard, widths = together(name, numerics)
        for one in heard:
            assert one.error is None, one.error
        answers = [list(tensors(one.outcome.fields)) for one in heard]
        gaps = [off(a, b) for a, b in zip(answers, expected, strict=True)]
        measured[numerics] = max(gaps)
        measured["widths"] = widths
    changes = off(expected[0], expected[2]) if expected[0][0].shape == expected[2][0].shape else 1.0
    assert measured["exact"] == 0.0
    assert measured["fast"] < 5e-3
    note(name, **measured, is_told_apart=changes > 1e-3)
