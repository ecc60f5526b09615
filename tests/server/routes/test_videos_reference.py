"""Videos that begin with a picture: `input_reference`, as a file, in a form and in JSON."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline
from PIL import Image

from carpool.request.card import Card
from carpool.types import CheckedRequest
from carpool.worker.protocol import Done
from support.app import CARD, open_app, refusal
from support.endpoints import VIDEOS
from support.engine_driver import driving, plain
from support.engine_worker import EngineWorker
from support.pictures import picture, png
from support.tiny import ARGUMENTS
from support.video_app import MOVING, NEEDS, SILENT, Filming, post, url_of

pytestmark = [
    pytest.mark.timeout(100),  # checkpoints may have to be made first
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # OpenAI's own service shuts down
]
# With a model


async def test_a_video_with_a_reference_is_what_plain_diffusers_makes_of_it(tmp_path: Path) -> None:
    """Through the SDK, and with a restart before it is run."""
    own: dict[str, Any] = {
        "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 32,
        "spatio_temporal_guidance_blocks": [1],
    }  # fmt: skip
    content = png(64, 32)

    with driving("ltx2") as drive:
        worker, done = EngineWorker(drive), list[Done]()

        async with open_app(worker, tmp_path, runs=False) as opened:
            asked: dict[str, Any] = {"prompt": "a cat", "input_reference": ("a.png", content)}
            video: Any = await opened.openai.videos.create(**asked, extra_body={"seed": 3, **own})
            assert (video.status, video.size, video.seed) == ("queued", "64x32", 3)

        keep_outputs(worker, done)
        async with open_app(worker, tmp_path) as opened:
            [video] = (await opened.openai.videos.list()).data
            assert (await opened.ended(video.id))["status"] == "completed"

        [job], [made] = worker.jobs, done

    assert job.task == "image-to-video"
    given = {**ARGUMENTS["ltx2"], **own, "output_type": "np", "frame_rate": 24.0}
    given |= {"prompt": "a cat", "image": picture(content), "width": 64, "height": 32}
    pipe = LTX2ImageToVideoPipeline(**plain("ltx2").components)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(**given, generator=torch.Generator().manual_seed(3)).frames[0]
    assert made.clip is not None
    pixels = np.frombuffer(made.clip.rgb, np.uint8).reshape(expected.shape)
    assert np.abs(pixels / 255 - expected).max() < 1.01 / 255


def keep_outputs(worker: EngineWorker, done: list[Done]) -> None:
    """Keep what the worker makes: an MP4 is not that to the bit."""
    submit = worker.submit

    async def kept(request: CheckedRequest, *rest: Any, **options: Any) -> Done:
        done.append(await submit(request, *rest, **options))
        return done[-1]

    worker.submit = kept  # type: ignore[method-assign]


# Before a worker that is none


async def test_a_reference_may_be_a_file_or_a_url_in_a_form_or_in_json() -> None:
    worker, content = Filming(), png(32, 48)

    async with open_app(worker) as opened:
        url = url_of(content)
        answers = [
            await post(opened, file=content),
            await post(opened, {"input_reference": url}),
            await post(opened, {"input_reference[image_url]": url}),
            await post(opened, input_reference={"image_url": url}),
            await post(opened, input_reference={"image_url": url, "file_id": None}),
            await post(opened, input_reference=None),
        ]
        assert [answer.status_code for answer in answers] == [200] * 6
        for answer in answers:
            await opened.ended(answer.json()["id"])
    *with_one, without = worker.jobs
    for job in with_one:
        assert (job.task, job.arguments["width"], job.arguments["height"]) == (
            "image-to-video", 32, 48,
        )  # fmt: skip
        assert job.arguments["image"].tobytes() == picture(content).tobytes()
    assert (without.task, "image" in without.arguments) == ("text-to-video", False)


@pytest.mark.parametrize(
    ("said", "size", "becomes"),  # the model's own is 64x64
    [
        ({}, (40, 50), (32, 48)),
        ({"size": "auto"}, (200, 100), (80, 32)),
        ({"size": "64x32"}, (50, 50), (64, 32)),
        ({"width": "16", "height": "48"}, (50, 50), (16, 48)),
    ],
)
async def test_a_video_has_the_size_that_is_asked_for_or_its_pictures_as_far_as_the_model_goes(
    said: dict[str, str], size: tuple[int, int], becomes: tuple[int, int]
) -> None:
    worker = Filming()

    async with open_app(worker) as opened:
        video = (await post(opened, said, file=png(*size))).json()
        assert video["size"] == f"{becomes[0]}x{becomes[1]}"
        await opened.ended(video["id"])
    [job] = worker.jobs
    is_sized = said not in ({}, {"size": "auto"})
    assert job.arguments["image"].size == (size if is_sized else becomes)


REFUSED: dict[str, tuple[Card, Any, str, str]] = {
    "from text only": (SILENT, {"file": png()}, "unsupported_parameter", "does text-to-video"),
    "nothing to begin with": (replace(CARD, tasks=(NEEDS,)), {}, "missing_parameter",
                              "does image-to-video: send the picture as a file"),
    "two": (MOVING, {"input_reference": [{"image_url": url_of(png())}] * 2}, "invalid_value",
            "given 2 times: grey takes at most 1"),
    "a kept file": (MOVING, {"input_reference": {"file_id": "file-1"}}, "unsupported_parameter",
                    "send the picture itself, or its image_url"),
    "a kept file in a form": (MOVING, {"fields": {"input_reference[file_id]": "file-1"}},
                              "unsupported_parameter", "send the picture itself"),
    "somewhere else": (MOVING, {"input_reference": {"image_url": "http://a/b.png"}},
                       "unsupported_parameter", "--allow-remote-media"),
    "a word": (MOVING, {"input_reference": "x"}, "invalid_value", "must be data:image/png"),
    "a number": (MOVING, {"input_reference": 3}, "invalid_value", "image_url"),
    "no picture": (MOVING, {"file": b"hello"}, "unsupported_image", "no PNG, JPEG or WebP"),
    "a cut picture": (MOVING, {"file": png()[:999]}, "unsupported_image", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("card", "sent", "code", "says"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_wrong_reference_is_refused_with_what_works(
    card: Card, sent: dict[str, Any], code: str, says: str
) -> None:
    worker = Filming(card)

    async with open_app(worker) as opened:
        told = refusal(await post(opened, **sent))
        assert (told["code"], told["param"]) == (code, "input_reference")
        assert says in told["message"]
        assert (await opened.http.get("/v1/jobs")).json()["data"] == []
        assert opened.inputs() == []


async def test_other_files_than_the_reference_are_refused_by_name() -> None:
    async with open_app(Filming()) as opened:
        files: dict[str, Any] = {"prompt": (None, "a"), "mask": ("a.png", png())}
        told = refusal(await opened.http.post(VIDEOS, files=files))
        assert (told["param"], told["message"]) == (
            "mask", "mask is a file: only input_reference, image_reference may be",
        )  # fmt: skip


@pytest.mark.parametrize("is_ended", [True, False])
async def test_a_remix_begins_with_the_same_picture(is_ended: bool) -> None:
    worker, content = Filming(), png(40, 50)

    async with open_app(worker) as opened:
        video = (await post(opened, {"seed": "7"}, file=content)).json()
        if is_ended:
            done = await opened.ended(video["id"])
            assert opened.inputs() == []
            assert [file["name"] for file in done["files"]] == [
                "input-0.png", "spritesheet.jpg", "thumbnail.webp", "video.mp4",
            ]  # fmt: skip
        remix: Any = await opened.openai.videos.remix(video["id"], prompt="b")
        assert (remix.remixed_from_video_id, remix.size) == (video["id"], "32x48")
        for one in (video["id"], remix.id):
            await opened.ended(one)
    first, second = worker.jobs
    assert (first.arguments["prompt"], second.arguments["prompt"]) == ("a", "b")
    assert first.seed == second.seed == 7
    assert first.arguments["image"].tobytes() == second.arguments["image"].tobytes()


async def test_a_remix_of_what_failed_asks_for_the_picture_again() -> None:
    worker = Filming()
    worker.is_broken = True

    async with open_app(worker) as opened:
        video = (await post(opened, file=png())).json()
        assert (await opened.ended(video["id"]))["status"] == "failed"
        answer = await opened.http.post(f"{VIDEOS}/{video['id']}/remix", json={"prompt": "b"})
        told = refusal(answer)
        assert (answer.status_code, told["code"]) == (404, "file_not_ready")
        assert "is no longer kept: make a new video" in told["message"]


async def test_the_same_key_with_another_reference_is_refused() -> None:
    async with open_app(Filming(), runs=False) as opened:
        opened.http.headers["idempotency-key"] = "mine"
        answers = [await post(opened, file=png(seed=seed)) for seed in (0, 0, 1)]
        assert [answer.status_code for answer in answers] == [200, 200, 422]
        assert answers[0].json()["id"] == answers[1].json()["id"]


async def test_a_phone_holds_a_reference_on_its_side_and_it_is_turned_upright() -> None:
    worker = Filming()
    image = Image.new("RGB", (48, 32), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    content = saved_with(image, exif)

    async with open_app(worker, runs=False) as opened:
        assert (await post(opened, file=content)).json()["size"] == "32x48"


def saved_with(image: Image.Image, exif: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()
