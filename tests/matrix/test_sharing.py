"""No class runs alone without need: six requests at once share forwards, or it is said why not.

`make sharing` runs every row of the matrix, every tiny checkpoint of a class without one, and,
where `DIFFUSERS_CHECKOUT` names a checkout, every class that diffusers' own tests build. It prints
requests a forward of each denoiser and writes them to `docs/sharing.json`, of which
`docs/models.md` tells. The six run three times: what is inferred has then proven itself.
"""

import copy
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from diffusers import DiffusionPipeline

from support import torchvision_cpu
from support.diffusers_tests import configurations, pipeline, requests
from support.engine_driver import driving, fresh, mean
from support.isolation import build
from support.matrix import CASES
from support.modular import CLASSES, modular
from support.modular import asked as asked_of_modular
from support.newcomers import NEWCOMERS, asked
from support.pictures import picture, png
from support.tiny import ARGUMENTS, newest

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, REASONS = DOCS / "sharing.json", DOCS / "sharing_reasons.json"
DENOISERS: tuple[str, ...] = ("transformer", "unet", "image_unet", "prior", "decoder", "denoiser")
DENOISERS += ("dit", "controlnet")
IS_ASKED = "CARPOOL_WRITE_SHARING" in os.environ


def shares(pipe: DiffusionPipeline, arguments: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of requests a forward of each denoiser, six requests at once, the third time."""
    six = [arguments[i % len(arguments)] for i in range(6)]
    widths: dict[str, list[int]] = defaultdict(list)
    with driving(pipe, max_running=16) as drive:
        for _ in range(3):
            drive.forwards.clear()
            recorders = [
                drive.submit(**{"prompt": None, **copy.deepcopy(dict(request)), "seed": seed})
                for seed, request in enumerate(six)
            ]
            drive.finish()
            assert [recorder.error for recorder in recorders] == [None] * 6
        for forward in drive.forwards:
            if forward.component.startswith(DENOISERS) and "encoder" not in forward.component:
                name = f"{forward.component}.{forward.method}".removesuffix(".forward")
                widths[name].append(forward.requests)
    return {name: round(mean(width), 2) for name, width in sorted(widths.items())}


def builds() -> Iterator[Any]:
    """Where a class is built: a row of the matrix, a tiny family, or a test of diffusers."""
    in_rows = {case.family for case in CASES}
    for case in CASES:
        if torchvision_cpu.IS_THERE or not case.needs_torchvision:
            yield pytest.param("row", case.name, id=case.name)
    for family in ARGUMENTS:
        if family not in in_rows:
            yield pytest.param("family", family, id=family)
    for name in configurations():
        yield pytest.param("test", name, id=name)
    for name in sorted(NEWCOMERS.keys() - configurations().keys()):
        yield pytest.param("data", name, id=name)
    for name, (family, _) in CLASSES.items():
        if family in newest.DATA:
            yield pytest.param("modular", name, id=name)


def built(place: str, name: str) -> tuple[DiffusionPipeline, list[dict[str, Any]]]:
    """A pipeline, and requests of mixed steps for it."""
    steps = [{"prompt": "a cat", "num_inference_steps": n} for n in (4, 6, 5)]
    if place == "test":
        return pipeline(name), requests(name)
    if place == "data":
        return build(NEWCOMERS[name][0]), asked(name, steps)
    if place == "modular":
        pipe = modular(name)
        return pipe, asked_of_modular(pipe, steps)
    if place == "family":
        more = (
            {"image": picture(png(32, 32, seed=1)), "prompt": None}
            if name == "svd"
            else {"prompt": "a cat"}
        )
        arguments = {**ARGUMENTS[name], **more}
        return fresh(name), [{**arguments, "num_inference_steps": n} for n in (4, 6, 5)]
    [case] = [case for case in CASES if case.name == name]
    pipe = fresh(case.family)
    family = {n: v for n, v in ARGUMENTS[case.family].items() if n not in case.without}
    requests_of_case = [{**family, **case.common, **request} for request in case.requests]
    return case.adapt(pipe) if case.adapt else pipe, requests_of_case


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not IS_ASKED, reason="`make sharing` runs every class")
@pytest.mark.parametrize(("place", "name"), builds() if IS_ASKED else [])
def test_six_at_once_share_forwards_of_a_denoiser_or_it_is_said_why(place: str, name: str) -> None:
    pipe, arguments = built(place, name)
    class_name = name if place in ("test", "data") else type(pipe).__name__
    pipe.set_progress_bar_config(disable=True)

    widths = shares(pipe, arguments)

    print(f"{class_name}: {', '.join(f'{n} {width}' for n, width in widths.items())}")
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if place != "test" or name not in known or known[name]["build"] == "test":
        known[class_name] = {"build": place, "requests_per_forward": widths}
        RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    assert min(widths.values(), default=0.0) >= 2.0 or class_name in json.loads(REASONS.read_text())


def test_a_class_that_shares_with_fewer_than_one_other_says_why_and_no_other_does() -> None:
    entries = json.loads(RESULTS.read_text()).items()
    least = {name: min(e["requests_per_forward"].values(), default=2.0) for name, e in entries}

    assert {name for name in least if least[name] < 2.0} == json.loads(REASONS.read_text()).keys()


def test_six_requests_of_mixed_steps_share_forwards_of_the_unet() -> None:
    pipe, arguments = built("row", "sd15-t2i")

    assert shares(pipe, arguments)["unet"] > 2
