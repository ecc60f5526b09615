"""Every family and task: requests that ride together get what each would have got alone."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from carpool.errors import Cancelled, PipelineFailed
from carpool.models.grid import PROOF
from support.engine_driver import Drive, driving, for_inference, fresh, gap, mean
from support.matrix import CASES
from support.matrix.case import Case
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.filterwarnings(  # diffusers' Euler scheduler with numpy 2
    "ignore:__array__ implementation:DeprecationWarning"
)
STAGES = "pyramid_num_inference_steps_list"  # Helios's word for steps
FIELDS = ("images", "frames", "audio", "audios", "meshes")  # of a pipeline's output
FIRST = {case.name.partition("-")[0]: case for case in reversed(CASES)}.values()  # a family each


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (not case.is_fast) + [pytest.mark.versions] * (case in FIRST)


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=marks(case), id=case.name) for case in CASES]
)
def case(request: pytest.FixtureRequest) -> Case:
    one: Case = request.param
    one.require()
    return one


@pytest.fixture(scope="module")
def alone(case: Case) -> list[dict[str, torch.Tensor]]:
    """What plain diffusers gives for each request of the case."""
    pipe = pipeline_of(case)
    return [run(pipe, arguments) for arguments in requests_of(case)]


def pipeline_of(case: Case) -> DiffusionPipeline:
    pipe = case.build() if case.build else fresh(case.family)
    return for_inference(case.adapt(pipe) if case.adapt else pipe)


def requests_of(case: Case) -> list[dict[str, Any]]:
    family = {n: v for n, v in ARGUMENTS.get(case.family, {}).items() if n not in case.without}
    return [{**family, **case.common, **one} for one in case.requests]


def run(pipe: DiffusionPipeline, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    given = {name: value for name, value in arguments.items() if (name, value) != ("prompt", None)}
    generator = torch.Generator().manual_seed(given.pop("seed"))
    if hasattr(pipe.scheduler, "generator"):  # of our own: Wan's pipelines pass it none
        pipe.scheduler.generator = generator
    output = pipe(**given, generator=generator)
    return {name: output[name] for name in FIELDS if name in output}


def farthest(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """The largest difference between two outputs, over all their fields."""
    assert left.keys() & set(FIELDS) == right.keys() & set(FIELDS) != set()
    pairs = [(_whole(left[name]), _whole(right[name])) for name in left if name in FIELDS]
    return max(gap(a, b) if a.shape == b.shape else 1.0 for a, b in pairs)


def _whole(value: Any) -> torch.Tensor:
    """A field of an output as one tensor: layers of a picture, the triangles of a mesh."""
    if isinstance(value, list) and hasattr(value[0], "faces"):
        return torch.from_numpy(np.array(value[0].vertices[value[0].faces]))
    return value if isinstance(value, torch.Tensor) else torch.stack(value)


def breaks_at_the_second_step(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
    if step:
        raise RuntimeError("this request breaks")
    return {}


def test_requests_of_all_kinds_ride_together_and_get_what_they_would_get_alone(
    case: Case, alone: list[dict[str, torch.Tensor]]
) -> None:
    first, second, *others = requests_of(case)
    with driving(pipeline_of(case), max_running=16) as drive:
        heard = [drive.submit(**first), drive.submit(**second)]
        given_up = drive.submit(**{**second, "seed": 77})
        broken = drive.submit(
            **{**first, "seed": 78}, callback_on_step_end=breaks_at_the_second_step
        )
        drive.turn_until(lambda: heard[0].step >= 1)
        heard.append(drive.submit(**others[0]))  # joins in the middle
        drive.turn_until(lambda: given_up.step >= 1)
        drive.engine.cancel(given_up.events[0].request_id)
        heard += [drive.submit(**one) for one in others[1:]]
        drive.finish()

    assert isinstance(given_up.error, Cancelled)
    assert isinstance(broken.error, PipelineFailed)
    for recorder, expected in zip(heard, alone, strict=True):
        assert recorder.error is None
        assert farthest(recorder.outcome.fields, expected) <= case.tolerance
    widths = widths_of(drive)
    note(case, drive, [farthest(r.outcome.fields, e) for r, e in zip(heard, alone, strict=True)])
    for name, least in case.fuses.items():
        assert mean(widths[name]) >= least, f"{name} fused {widths[name]}"
    for name in case.alone:
        assert set(widths[name]) == {1}, f"{name} was to run alone, and fused {widths[name]}"
    assert widths.keys() == {*case.fuses, *case.alone}


def test_what_a_request_says_shows_in_what_it_gets(
    case: Case, alone: list[dict[str, torch.Tensor]]
) -> None:
    first, second, *_ = requests_of(case)
    pipe = pipeline_of(case)

    for name in case.matters:
        assert first[name] != second[name]
        swapped = run(pipe, {**first, name: second[name]})
        assert farthest(swapped, alone[0]) >= 100 * case.tolerance, f"{name} hardly matters"


def test_the_requests_of_the_case_differ_in_all_that_may_differ(case: Case) -> None:
    given = requests_of(case)

    assert len(given) >= 4
    assert len({one["seed"] for one in given}) == len(given)
    steps = [one.get("num_inference_steps") or str(one.get(STAGES)) for one in given]
    assert len(set(steps)) >= 3


def widths_of(drive: Drive) -> dict[str, list[int]]:
    """By "component.method": requests in each of its forwards, without those of second runs."""
    widths: dict[str, list[int]] = defaultdict(list)
    for forward in drive.forwards:
        if any(forward is again for again in drive.second_runs):
            continue  # what failed among others runs again alone
        widths[f"{forward.component}.{forward.method}"].append(forward.requests)
    return dict(widths)


def note(case: Case, drive: Drive, differences: list[float]) -> None:
    """Add the case to `proof.json`, where `make test-models` asks for it."""
    if "CARPOOL_WRITE_PROOF" not in os.environ:
        return
    known = json.loads(PROOF.read_text()) if PROOF.exists() else {}
    known[case.name] = {
        "task": case.task,
        "pipeline": drive.engine.loaded.card.pipeline,
        "requests_per_forward": {n: round(mean(w), 2) for n, w in widths_of(drive).items()},
        "largest_difference": float(f"{max(differences):.0e}"),
    }
    kept = {name: known[name] for name in sorted(known) if name in {one.name for one in CASES}}
    PROOF.write_text(json.dumps(kept, indent=1) + "\n")


def test_in_exact_numerics_company_changes_no_bit(
    case: Case, alone: list[dict[str, torch.Tensor]]
) -> None:
    first, *others = requests_of(case)
    with driving(pipeline_of(case), max_running=16, numerics="exact") as drive:
        heard = []
        for _ in range(2):  # the second time, what was proven in the first is trusted
            heard.append([drive.submit(**first)])
            drive.turn_until(lambda: heard[-1][0].step >= 1)
            heard[-1] += [drive.submit(**one) for one in others]
            drive.finish()

    for some in heard:
        for recorder, expected in zip(some, alone, strict=True):
            assert recorder.error is None
            assert farthest(recorder.outcome.fields, expected) == 0.0
    differed = [one for one in drive.engine.runner.probation.report() if one["fuses"] == "alone"]
    assert [one["call"] for one in differed] == []
