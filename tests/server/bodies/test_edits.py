"""Forms with pictures: what they become, what is refused, and what comes of them."""

import asyncio
import base64
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from carpool.media.reader import ImageIntake, PictureReader
from carpool.request.card import Card
from carpool.request.sizes import within
from carpool.server.bodies import schema
from carpool.server.bodies.forms import Form
from carpool.server.bodies.input_images import edit_images, edit_task
from carpool.server.image_request import ParsedImageRequest
from carpool.server.state import ServedModel
from carpool.worker import encoding, protocol
from support.app import CARD, app_of, ask, client_of, refusal
from support.endpoints import EDITS, VARIATIONS
from support.engine_driver import CLOSE, Recorder, driving, gap, plain
from support.forms import BOTH, PICTURE, SEVERAL, send, worker_of
from support.pictures import ALIKE, mask, picture, png, saved
from support.pictures import gap as levels
from support.server_process import eventually, serving
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.timeout(150)  # starting a server may take long


def test_a_picture_becomes_an_argument_with_the_size_that_follows() -> None:
    worker = worker_of(BOTH)
    content = png(32, 48)

    assert send([("image", content)], worker=worker, n="2", seed="7").status_code == 200

    for i, job in enumerate(worker.jobs):
        assert (job.task, job.seed) == ("image-to-image", 7 + i)
        assert (job.arguments["width"], job.arguments["height"]) == (32, 48)
        assert job.arguments["image"].tobytes() == picture(content).tobytes()


def test_a_mask_is_white_where_openais_is_transparent() -> None:
    worker = worker_of(BOTH)

    assert send([("image", png()), ("mask", mask())], worker=worker).status_code == 200

    [job] = worker.jobs
    white = job.arguments["mask_image"]
    assert (job.task, white.mode, white.size) == ("inpaint", "L", (64, 64))
    assert (white.getpixel((0, 0)), white.getpixel((63, 0))) == (0, 255)


def test_a_picture_too_large_for_the_model_is_made_smaller_with_its_mask() -> None:
    worker = worker_of(BOTH)

    files = [("image", png(400, 200)), ("mask", mask(400, 200))]
    assert send(files, worker=worker).status_code == 200

    [job] = worker.jobs
    assert job.arguments["image"].size == job.arguments["mask_image"].size == (80, 32)
    assert (job.arguments["width"], job.arguments["height"]) == (80, 32)


@pytest.mark.parametrize(
    ("size", "expected"), [((64, 64), (64, 64)), ((70, 50), (64, 48)), ((9, 9), (16, 16))]
)
def test_sizes_are_rounded_down_to_what_the_model_can(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert within(size, 64 * 64, 16) == expected


@pytest.mark.parametrize("size", [(1, 100_000), (9000, 1)])
def test_a_picture_too_long_for_the_model_is_refused_as_a_picture(size: tuple[int, int]) -> None:
    told = refusal(send([("image", saved(Image.new("RGB", size)))]))

    assert (told["code"], told["param"]) == ("unsupported_image", "image")
    assert told["message"] == (
        f"image has {size[0]}x{size[1]} pixels: too long for this model, whose sides are "
        "multiples of 16 and make at most 4096 pixels: cut it"
    )


def test_a_size_that_is_asked_for_wins_and_the_picture_stays() -> None:
    worker = worker_of(BOTH)

    assert send([("image", png(32, 48))], worker=worker, size="64x64").status_code == 200

    [job] = worker.jobs
    assert (job.arguments["width"], job.arguments["height"]) == (64, 64)
    assert job.arguments["image"].size == (32, 48)


def test_a_model_that_sees_several_pictures_gets_them_in_order_and_sizes_as_it_likes() -> None:
    worker = worker_of(SEVERAL)
    files = [("image[]", png(16 * i, 16, seed=i)) for i in (1, 2, 3)]

    assert send(files, worker=worker).status_code == 200

    [job] = worker.jobs
    assert [one.size for one in job.arguments["image"]] == [(16, 16), (32, 16), (48, 16)]
    assert "width" not in job.arguments


def test_texts_become_what_they_stand_for() -> None:
    worker = worker_of(BOTH)
    fields: dict[str, Any] = {"strength": "5e-1", "num_inference_steps": "3", "clip_skip": "true"}
    fields |= {"guidance_scale": "-1.5E+0", "seed": "007"}
    fields |= {"lora": json.dumps([{"id": "outlined", "scale": 0.5}]), "priority": "2"}
    fields |= {"timeout_s": "9.5", "sigmas[]": ["1", "0.5"], "output_compression": "50"}

    assert (
        send([("image", png())], worker=worker, output_format="webp", **fields).status_code == 200
    )

    [job] = worker.jobs
    assert job.arguments.items() >= {
        "strength": 0.5, "num_inference_steps": 3, "clip_skip": True, "sigmas": [1, 0.5],
        "guidance_scale": -1.5,
    }.items()  # fmt: skip
    assert (job.lora, job.priority, job.timeout_s, job.seed) == ((("outlined", 0.5),), 2, 9.5, 7)


def test_a_picture_is_changed_as_each_of_several_prompts_says() -> None:
    worker = worker_of(BOTH)
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    said = {"prompt": ["red", "blue"], "images": [url], "n": 2, "seed": 1}

    answer = ask(json.dumps(said), EDITS, worker=worker)

    assert [one["seed"] for one in answer.json()["data"]] == [1, 2, 3, 4]
    prompts = [one.arguments["prompt"] for one in worker.jobs]
    assert prompts == ["red", "red", "blue", "blue"]
    assert all(one.arguments["image"] is not None for one in worker.jobs)
    too_many = ask(json.dumps({**said, "n": 6}), EDITS, worker=worker)
    assert "which is 5 of each" in refusal(too_many)["message"]


def test_a_picture_may_be_a_data_url() -> None:
    worker, content = worker_of(BOTH), png()
    url = "data:image/png;base64," + base64.b64encode(content).decode()

    assert send([("mask", mask())], worker=worker, image=url).status_code == 200

    assert worker.jobs[0].arguments["image"].tobytes() == picture(content).tobytes()


def test_a_variation_is_an_edit_without_a_prompt() -> None:
    worker = worker_of(BOTH)

    assert send([("image", png())], worker=worker, path=VARIATIONS).status_code == 200

    assert (worker.jobs[0].task, worker.jobs[0].arguments["prompt"]) == ("image-to-image", "")


def test_a_file_has_no_pictures_of_the_request_in_its_settings() -> None:
    answer = send([("image", png())], settings={"metadata_prompt": True})

    image = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
    assert "mask_image" not in json.dumps({key: str(value) for key, value in image.info.items()})
    assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 16


def test_pictures_cross_to_the_worker_as_pixels() -> None:
    worker = worker_of(SEVERAL)
    send([("image[]", png()), ("image[]", png(seed=1))], worker=worker)
    [job] = worker.jobs

    body = encoding.encode(protocol.Submit(job))[encoding.LENGTH.size :]
    crossed = encoding.decode_to_worker(body)

    assert isinstance(crossed, protocol.Submit)
    for left, right in zip(crossed.request.arguments["image"], job.arguments["image"], strict=True):
        assert (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        encoding.encode(protocol.Submit(replace(job, arguments={"image": object()})))


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str | None]] = {
    "no picture": ([("mask", mask())], {}, "missing_parameter", "image"),
    "no prompt": ([PICTURE], {"prompt": []}, "missing_parameter", "prompt"),
    "two pictures": ([PICTURE, PICTURE], {}, "invalid_value", "image"),
    "no PNG as a mask": (
        [PICTURE, ("mask", saved(Image.new("RGB", (64, 64)), "JPEG"))],
        {},
        "unsupported_image",
        "mask",
    ),
    "another size of mask": ([PICTURE, ("mask", mask(32, 64))], {}, "mask_mismatch", "mask"),
    "an opaque mask": ([PICTURE, ("mask", png())], {}, "mask_mismatch", "mask"),
    "two masks": ([PICTURE, ("mask", mask()), ("mask", mask())], {}, "invalid_value", "mask"),
    "text as a picture": ([("image", b"hello")], {}, "unsupported_image", "image"),
    "a cut picture": ([("image", png()[:999])], {}, "unsupported_image", "image"),
    "an empty picture": ([("image", b"")], {}, "unsupported_image", "image"),
    "a tiny picture": ([("image", png(8, 8))], {"size": "64x64"}, "invalid_value", "image"),
    "a remote picture": (
        [("mask", mask())], {"image": "http://a/b.png"}, "unsupported_parameter", "image",
    ),
    "no URL": ([("mask", mask())], {"image": "b.png"}, "invalid_value", "image"),
    "another file": ([PICTURE, ("style", png())], {}, "invalid_value", "style"),
    "a value twice": ([PICTURE], {"n": ["1", "2"]}, "invalid_value", "n"),
    "no number": ([PICTURE], {"n": "two"}, "invalid_value", "n"),
    "no boolean": ([PICTURE], {"stream": "maybe"}, "invalid_value", "stream"),
    "a strength": ([PICTURE], {"strength": "2"}, "invalid_value", "strength"),
    "an unknown name": ([PICTURE], {"strenght": "1"}, "unknown_parameter", "strenght"),
    "a size": ([PICTURE], {"size": "65x64"}, "size_not_supported", "size"),
    "fidelity": ([PICTURE], {"input_fidelity": "high"}, "unsupported_parameter", "input_fidelity"),
    "another model": ([PICTURE], {"model": "dall-e-2"}, "model_not_found", None),
}  # fmt: skip


@pytest.mark.parametrize(("files", "fields", "code", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_form_is_refused_by_name_and_rule(
    files: Any, fields: dict[str, Any], code: str, param: str | None
) -> None:
    worker = worker_of(BOTH)

    told = refusal(send(files, worker=worker, **fields))

    assert (told["code"], told["param"]) == (code, param)
    assert not worker.jobs


@pytest.mark.parametrize(
    ("card", "path", "files", "status", "code"),
    [
        (CARD, EDITS, [PICTURE], 404, "model_not_supported"),
        (CARD, VARIATIONS, [PICTURE], 404, "model_not_supported"),
        (SEVERAL, VARIATIONS, [PICTURE], 404, "model_not_supported"),
        (SEVERAL, EDITS, [PICTURE, ("mask", mask())], 400, "unsupported_parameter"),
        (SEVERAL, EDITS, [PICTURE] * 4, 400, "invalid_value"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    card: Card, path: str, files: Any, status: int, code: str
) -> None:
    answer = send(files, worker=worker_of(card), path=path)

    assert (answer.status_code, refusal(answer)["code"]) == (status, code)


def test_bodies_with_pictures_may_be_larger_than_others_but_not_endless() -> None:
    content = png(800, 800)
    assert len(content) > 1 << 20

    assert send([("image", content)]).status_code == 200
    small = {"max_upload_bytes": 1 << 20}
    assert refusal(send([("image", content)], settings=small))["code"] == "body_too_large"
    answer = send([PICTURE, ("mask", mask() + bytes(4 << 20))])
    assert refusal(answer)["code"] == "body_too_large"


async def test_the_same_key_with_another_picture_is_refused() -> None:
    worker = worker_of(BOTH)
    app = app_of(worker)

    async with client_of(app) as client:
        client.headers["idempotency-key"] = "mine"
        forms = [{"image": png(seed=seed)} for seed in (0, 0, 1)]
        answers = [await client.post(EDITS, data={"prompt": "a"}, files=f) for f in forms]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert len(worker.jobs) == 1


# With a model


def test_several_references_give_what_plain_diffusers_gives() -> None:
    contents = [png(seed=1), png(seed=2)]
    form = Form(images=list(contents))
    own = {"num_inference_steps": 3, "max_sequence_length": 48}
    body = schema.ImageRequest.model_validate({"prompt": "a cat", "seed": 3, **own})

    with driving("flux2") as drive:
        card = drive.engine.loaded.card
        intake = ImageIntake(PictureReader())
        work = edit_images(card, edit_task(card, form), form, body, intake)
        model = ServedModel(card.id, card, 10)
        [job] = ParsedImageRequest(model, body, pictures=asyncio.run(work)).requests
        recorder = Recorder()
        arguments = {**ARGUMENTS["flux2"], **job.arguments}
        drive.engine.submit(replace(job, arguments=arguments), recorder)
        drive.finish()

    images = [picture(content) for content in contents]
    given = {**ARGUMENTS["flux2"], **own, "prompt": "a cat", "image": images}
    expected = plain("flux2")(**given, generator=torch.Generator().manual_seed(3)).images
    assert len(job.arguments["image"]) == 2
    assert gap(recorder.image, expected) < CLOSE


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(model="shapes") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


DRAW: dict[str, Any] = {"seed": 2, "num_inference_steps": 8}


@pytest.fixture(scope="module")
def circle(client: openai.OpenAI) -> bytes:
    """A red circle on a blue background."""
    prompt = "a red circle on a blue background"
    return decoded(client.images.generate(prompt=prompt, extra_body=DRAW).data[0])  # type: ignore[index]


def decoded(image: Any) -> bytes:
    return base64.b64decode(image.b64_json)


def colour(content: bytes, x: int, y: int) -> str:
    """The strongest of red, green and blue at a place."""
    pixel = picture(content).getpixel((x, y))
    assert isinstance(pixel, tuple)
    return "rgb"[int(np.argmax(pixel))]


def test_the_embedded_model_changes_a_picture(client: openai.OpenAI, circle: bytes) -> None:
    answer = client.images.edit(
        image=("a.png", circle),
        prompt="a green square on a blue background",
        extra_body={**DRAW, "strength": 0.95},
    )

    [image] = answer.data or []
    assert (answer.size, image.seed) == ("64x64", 2)  # type: ignore[attr-defined]
    assert [colour(decoded(image), *place) for place in ((32, 32), (3, 3))] == ["g", "b"]


def test_a_masked_edit_streams_and_keeps_what_is_not_masked(
    client: openai.OpenAI, circle: bytes
) -> None:
    stream = client.images.edit(
        image=[("a.png", circle)], mask=("m.png", mask()),
        prompt="a yellow square on a green background", stream=True, partial_images=2,
        extra_body={**DRAW, "strength": 1.0},
    )  # fmt: skip
    events: list[Any] = list(stream)

    assert [event.type for event in events] == [
        "image_edit.partial_image", "image_edit.partial_image", "image_edit.completed",
    ]  # fmt: skip
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert events[-1].usage.input_tokens_details.image_tokens == 16
    last = decoded(events[-1])
    assert colour(last, 3, 60) == colour(circle, 3, 60) == "b"
    assert (colour(circle, 60, 60), colour(last, 60, 60)) == ("b", "g")


def test_variations_are_drawn_and_linked(client: openai.OpenAI, circle: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenAI has retired them
        answer = client.images.create_variation(
            image=("a.png", circle), n=2, response_format="url", extra_body=DRAW
        )

    files = [
        httpx2.get(str(image.url), trust_env=False, verify=False) for image in answer.data or []
    ]
    assert [file.headers["content-type"] for file in files] == ["image/png"] * 2
    assert [picture(file.content).size for file in files] == [(64, 64)] * 2
    assert files[0].content != files[1].content


def test_a_drawing_streams_its_previews_and_then_what_it_would_be_without_them(
    client: openai.OpenAI, circle: bytes
) -> None:
    prompt = "a red circle on a blue background"
    with client.images.generate(
        prompt=prompt, stream=True, partial_images=3, extra_body=DRAW
    ) as stream:
        events: list[Any] = list(stream)

    assert [event.type.split(".")[1] for event in events] == ["partial_image"] * 3 + ["completed"]
    assert [event.step for event in events[:3]] == [2, 4, 6]
    assert {picture(decoded(event)).size for event in events} == {(64, 64)}
    assert colour(decoded(events[2]), 32, 32) == "r"
    assert levels(picture(decoded(events[3])), picture(circle)) <= ALIKE


def test_a_stream_that_fails_raises_in_the_sdk(client: openai.OpenAI) -> None:
    endless = {**DRAW, "num_inference_steps": 1000, "timeout_s": 1}

    with pytest.raises(openai.APIError, match="timeout_s=1") as caught:
        list(client.images.generate(prompt="a", stream=True, extra_body=endless))

    assert (caught.value.code, caught.value.type) == ("deadline_exceeded", "server_error")


def test_a_stream_that_is_closed_ends_its_work(client: openai.OpenAI) -> None:
    endless = {**DRAW, "num_inference_steps": 400}
    url = str(client.base_url).replace("/v1/", "/stats")

    def running() -> int:
        return int(httpx2.get(url, trust_env=False, verify=False).json()["running"])

    with client.images.generate(
        prompt="a", stream=True, partial_images=3, extra_body=endless
    ) as stream:
        first: Any = next(iter(stream))
        assert (first.step, running()) == (100, 1)

    eventually(lambda: running() == 0, 10, "it is given up")
