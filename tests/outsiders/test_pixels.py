"""No family of the matrix computes more pixels than `max_pixels`, whatever its words are."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from carpool.errors import CarpoolError, Rejected, SizeRejected
from support.app import open_app
from support.engine_driver import Drive, Recorder, driving, fresh
from support.engine_worker import EngineWorker
from support.matrix import CASES
from support.matrix.case import Case
from support.pictures import png
from support.tiny import ARGUMENTS
from support.video_app import url_of

SIZING = ("width", "height", "max_area", "_auto_resize", "resolution", "use_resolution_binning")
QUICK = ("kontext-edit", "zimage-turbo-t2i", "ernie-turbo-t2i")  # and the cases of `make test`
KONTEXT = "kontext"


def arguments_of(case: Case) -> dict[str, Any]:
    family = {n: v for n, v in ARGUMENTS[case.family].items() if n not in case.without}
    return {**family, **case.common, **case.requests[0]}


def pipeline_of(case: Case) -> DiffusionPipeline:
    pipe = fresh(case.family)
    return case.adapt(pipe) if case.adapt else pipe


@contextmanager
def measuring(pipe: DiffusionPipeline) -> Iterator[list[int]]:
    """The values of each row that denoisers are given: they grow as the pixels do."""
    seen = list[int]()

    def note(_: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        names = ("hidden_states", "sample", "x")
        first = args[0] if args else next(kwargs[name] for name in names if name in kwargs)
        seen.append(first[0].numel())

    denoisers = [getattr(pipe, name, None) for name in ("transformer", "transformer_2", "unet")]
    hooks = [
        one.register_forward_pre_hook(note, with_kwargs=True)
        for one in denoisers
        if isinstance(one, torch.nn.Module)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def draw(drive: Drive, arguments: Mapping[str, Any]) -> CarpoolError | None:
    """Draw a request; returns what refused it."""
    try:
        recorder = drive.submit(**arguments)
    except Rejected as error:
        return error
    drive.finish()
    assert recorder.error is None or isinstance(recorder.error, CarpoolError)
    return recorder.error


def size_of(arguments: Mapping[str, Any]) -> int:
    """The pixels of a picture of a case, whose input pictures are no larger."""
    if "width" in arguments:
        return int(arguments["width"] * arguments["height"])
    return math.prod(arguments["image"].size)


def variants(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same request in other words about its size, and from larger pictures."""
    sizing = [name for name in SIZING if name in arguments]
    for names in (sizing, *([name] for name in sizing)):
        yield {name: value for name, value in arguments.items() if name not in names}
    for name in ("width", "height", "max_area"):
        if name in arguments:
            yield {**arguments, name: arguments[name] * 4}
    if isinstance(picture := arguments.get("image"), Image.Image):
        wide = picture.resize((2 * picture.width, picture.height))
        yield {**arguments, "image": wide}
        yield {n: v for n, v in arguments.items() if n not in SIZING} | {"image": wide}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[] if case.is_fast or case.name in QUICK else [pytest.mark.slow],
            id=case.name,
        )
        for case in CASES
    ],
)
def test_no_family_computes_more_pixels_than_there_may_be(case: Case) -> None:
    case.require()
    pipe, arguments = pipeline_of(case), arguments_of(case)
    most = size_of(arguments)

    with measuring(pipe) as values, driving(pipe, isolation="shared", max_pixels=most) as drive:
        assert draw(drive, arguments) is None, "a picture of just so many pixels is drawn"
        largest = max(values)
        for words in variants(arguments):
            refused = draw(drive, words)
            assert refused is None or refused.status < 500, refused
    with measuring(pipe) as less, driving(pipe, isolation="shared", max_pixels=most // 4) as drive:
        assert isinstance(draw(drive, arguments), Rejected)

    assert max(values) == largest
    assert max(less, default=0) <= largest // 4


def kontext(max_pixels: int, **words: Any) -> Recorder | CarpoolError:
    """What FLUX Kontext draws for these words, from one step."""
    given = {"num_inference_steps": 1, "max_sequence_length": 48, "output_type": "latent", **words}
    with driving(fresh(KONTEXT), max_pixels=max_pixels) as drive:
        try:
            recorder = drive.submit("a red circle", **given)
        except Rejected as error:
            return error
        drive.finish()
        return recorder.error if isinstance(recorder.error, CarpoolError) else recorder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"width": 64, "height": 64}, "max_area=1048576: must be from 16 to 16384"),
        ({}, "max_area=1048576"),
        ({"width": 64, "height": 64, "max_area": 16385}, "max_area=16385"),
        ({"width": 64, "height": 64, "max_area": 1}, "max_area=1: must be from 16"),
        ({"width": 64, "height": 16, "max_area": 32}, "max_area=32: must be from 64"),
        ({"max_area": 16384, "image": Image.new("RGB", (64, 64))}, "_auto_resize decide it"),
    ],
)
def test_kontext_draws_within_the_limit_or_is_refused(words: dict[str, Any], says: str) -> None:
    refused = kontext(16384, **words)

    assert isinstance(refused, SizeRejected)
    assert says in str(refused)


def test_kontext_in_python_draws_what_plain_diffusers_draws_of_a_shape() -> None:
    drawn = kontext(16384, width=64, height=32, max_area=2048)

    assert isinstance(drawn, Recorder)
    assert drawn.outcome.fields["images"].shape[1] == 2048 // 16


@pytest.mark.parametrize("words", [{"size": "64x32"}, {"width": 64, "height": 32}])
async def test_kontext_over_http_draws_the_size_that_was_asked(words: dict[str, Any]) -> None:
    sizes = list[Any]()

    with driving(fresh(KONTEXT), max_pixels=16384) as drive:
        async with open_app(EngineWorker(drive)) as opened:
            body = {"prompt": "a", "num_inference_steps": 1, "max_sequence_length": 48, **words}
            answer = await opened.http.post("/v1/images/generations", json=body)
            assert answer.status_code == 200, answer.text
            sizes.append(answer.json()["size"])
            edit = {**body, "images": [{"image_url": url_of(png(32, 32))}], "_auto_resize": False}
            answer = await opened.http.post("/v1/images/edits", json=edit)
            assert answer.status_code == 200, answer.text
            sizes.append(answer.json()["size"])
            large = {**body, **{n: "256x128" if n == "size" else 4 * v for n, v in words.items()}}
            refused = await opened.http.post("/v1/images/generations", json=large)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
            assert "nearest size of this shape is 180x88" in refused.json()["error"]["message"]
            edit["_auto_resize"] = True
            refused = await opened.http.post("/v1/images/edits", json=edit)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")

    assert sizes == ["64x32", "64x32"]


def test_a_size_that_is_drawn_in_a_larger_one_and_made_small_again_is_refused() -> None:
    pipe = fresh("sana")
    pipe.transformer.register_to_config(sample_size=32)  # its sizes have about 1024x1024 pixels
    words = ARGUMENTS["sana"] | {"use_resolution_binning": True}

    with driving(pipe, max_pixels=64 * 64) as drive:
        refused = draw(drive, words)

    assert isinstance(refused, SizeRejected)
    assert "use_resolution_binning" in str(refused)
    assert drive.widths("transformer") == []
