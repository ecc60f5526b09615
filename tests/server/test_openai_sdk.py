"""OpenAI's own SDK, unmodified, against real servers: what it sends is understood, and the
pictures are those of plain diffusers.

The servers have one worker, two, and two models; the latter with API keys.
"""

import asyncio
import base64
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.resources import Images
from PIL import Image, ImageChops, ImageStat

from carpool.telemetry.worker_statistics import workers_of
from support.engine_driver import fresh
from support.lora_files import adapter
from support.pictures import ALIKE, gap, picture, read_settings
from support.server_process import (
    DRAW,
    FAMILY,
    MODEL,
    MODEL_ID,
    PATIENCE_S,
    SIZE,
    Server,
    drawn_by_diffusers,
    eventually,
    serving,
)

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
SIZE_TEXT = f"{SIZE[0]}x{SIZE[1]}"


KEY = "alice-secret"
KEYS = ("--api-key", f"alice={KEY}", "--api-key", "bob=bob-secret")
SETUPS: Mapping[str, tuple[Sequence[str], str]] = {  # flags, and the model
    "one worker": ((), MODEL),
    "two workers": (("--workers", "2", *KEYS), MODEL),
    "two models": ((f"{MODEL_ID}={MODEL}", "shapes=shapes", *KEYS), ""),
}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> str:
    return str(request.param)


of_one_worker = pytest.mark.parametrize("setup", ["one worker"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    adapter(folder, FAMILY, seed=5)
    return folder


@pytest.fixture(scope="module")
def server(setup: str, folder: Path) -> Iterator[Server]:
    flags, model = SETUPS[setup]
    with serving(*flags, "--metadata-prompt", "--lora-dir", str(folder), model=model) as server:
        eventually(lambda: state_of(server) == "ready", PATIENCE_S, "every worker is ready")
        yield server


def state_of(server: Server) -> str:
    return str(server.get("/health").json()["status"])


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def draw(client: openai.OpenAI, prompt: str = "a red circle", **options: Any) -> Any:
    return client.images.generate(**asked(prompt, **options))


def asked(prompt: str, **options: Any) -> dict[str, Any]:
    """Arguments of `images.generate`; what OpenAI does not know goes into `extra_body`."""
    options = {"model": MODEL_ID, "size": SIZE_TEXT, "seed": 1, **DRAW, **options}
    known = inspect.signature(Images.generate).parameters.keys() & options.keys()
    named = {name: options.pop(name) for name in known}
    return {"prompt": prompt, **named, "extra_body": options}


def decoded(image: Any) -> bytes:
    return base64.b64decode(image.b64_json, validate=True)


# Pictures


@of_one_worker
def test_a_picture_is_a_png_that_says_how_it_was_made(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"prompt": "a red circle", "negative_prompt": "blue", "seed": 7}
    wish |= {"num_inference_steps": 4, "guidance_scale": 2.5, "true_cfg_scale": 2.0}

    png = decoded(draw(client, **wish).data[0])

    image = picture(png)
    assert (image.format, image.size, image.mode) == ("PNG", SIZE, "RGB")
    sides = {"width": SIZE[0], "height": SIZE[1]}
    settings = read_settings(png)
    assert settings.pop("engine")["pipeline"] == "FluxPipeline"
    assert settings == {**DRAW, **wish, **sides, "model": MODEL_ID}
    assert image.info["parameters"] == (
        "a red circle\nNegative prompt: blue\n"
        "Steps: 4, Sampler: FlowMatchEulerDiscreteScheduler, CFG scale: 2.0, "
        f"Distilled CFG Scale: 2.5, Seed: 7, Size: {SIZE_TEXT}, Model: {MODEL_ID}"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_inference_steps": 5, "guidance_scale": 1.5},
        {"negative_prompt": "a blue star", "true_cfg_scale": 2.5},
    ],
    ids=["plain", "steps and guidance", "negative prompt"],
)
def test_a_picture_is_the_one_that_plain_diffusers_draws(
    client: openai.OpenAI, arguments: dict[str, Any]
) -> None:
    answer = draw(client, "a green square", seed=11, **arguments)

    assert (
        gap(picture(decoded(answer.data[0])), drawn_by_diffusers("a green square", 11, **arguments))
        <= ALIKE
    )


def test_an_adapter_of_the_folder_is_applied_as_diffusers_applies_it(
    client: openai.OpenAI, folder: Path
) -> None:
    [file] = folder.iterdir()

    answer = draw(client, "a green square", seed=11, lora=[{"id": file.stem, "scale": -0.7}])

    drawn, bare = picture(decoded(answer.data[0])), drawn_by_diffusers("a green square", 11)
    assert gap(drawn, drawn_with(file, -0.7, "a green square", 11)) <= ALIKE
    assert gap(drawn, bare) > 10 * ALIKE


def drawn_with(file: Path, scale: float, prompt: str, seed: int) -> Image.Image:
    """The picture that plain diffusers draws with an adapter."""
    pipe: Any = fresh(FAMILY)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="x")
    pipe.set_adapters(["x"], [scale])
    pipe.set_progress_bar_config(disable=True)
    width, height = SIZE
    generator = torch.Generator().manual_seed(seed)
    drawn = pipe(prompt=prompt, width=width, height=height, generator=generator, **DRAW)
    image = drawn.images[0]
    assert isinstance(image, Image.Image)
    return image


def test_n_pictures_have_following_seeds_and_each_is_its_own(client: openai.OpenAI) -> None:
    answer = draw(client, "a star", n=3, seed=41)

    assert [image.seed for image in answer.data] == [41, 42, 43]
    for image in answer.data:
        assert read_settings(decoded(image))["seed"] == image.seed
        assert gap(picture(decoded(image)), drawn_by_diffusers("a star", image.seed)) <= ALIKE


@of_one_worker
def test_a_seed_that_was_not_given_is_drawn_and_reported(client: openai.OpenAI) -> None:
    first, second = (draw(client, seed=None).data[0] for _ in range(2))

    assert first.seed != second.seed
    assert decoded(draw(client, seed=first.seed).data[0]) == decoded(first)


@of_one_worker
@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_other_formats_are_smaller_when_compressed_more(
    client: openai.OpenAI, output_format: str
) -> None:
    files = {
        quality: decoded(
            draw(client, output_format=output_format, output_compression=quality).data[0]
        )
        for quality in (5, 95)
    }

    fine, exact = picture(files[95]), picture(decoded(draw(client).data[0]))
    assert (fine.format, fine.size) == (output_format.upper(), SIZE)
    assert len(files[5]) < len(files[95])
    assert max(ImageStat.Stat(ImageChops.difference(fine, exact)).mean) < 20  # colours are halved


# The rest of an answer


@of_one_worker
def test_every_field_of_an_answer_is_filled(client: openai.OpenAI) -> None:
    before_s = time.time()

    answer = draw(client, n=2, user="somebody")

    assert before_s - 1 <= answer.created <= time.time()
    assert (answer.size, answer.output_format) == (SIZE_TEXT, "png")
    assert (answer.quality, answer.background) == ("auto", "opaque")
    assert answer.model == MODEL_ID
    assert answer.safety_identifier == "somebody"
    usage = answer.usage
    assert usage.input_tokens == usage.input_tokens_details.text_tokens > 0
    assert usage.output_tokens == usage.output_tokens_details.image_tokens > 0
    assert usage.output_tokens == 2 * draw(client).usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    timings = answer.timings
    phases = ("queue_s", "encode_s", "denoise_s", "decode_s")
    assert 0 < timings["denoise_s"] < timings["total_s"]
    assert sum(timings[phase] for phase in phases) == pytest.approx(timings["total_s"])
    assert answer._request_id.startswith("req-")


@of_one_worker
def test_openais_neutral_values_are_taken(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {"quality": "auto", "background": "auto", "stream": False}
    neutral |= {"response_format": "b64_json", "moderation": "low", "partial_images": 0}

    answer = draw(client, size="auto", n=1, **neutral)

    assert answer.size == client.models.retrieve(MODEL_ID).default_size  # type: ignore[attr-defined]


def test_models_are_listed_and_found_by_id(client: openai.OpenAI, setup: str) -> None:
    listed, *others = client.models.list().data

    assert [one.id for one in others] == (["shapes"] if setup == "two models" else [])
    assert (listed.id, listed.object, listed.owned_by) == (MODEL_ID, "model", "carpool")
    assert client.models.retrieve(MODEL_ID) == listed
    names = {parameter["name"] for parameter in listed.parameters}  # type: ignore[attr-defined]
    assert {"prompt", "num_inference_steps", "guidance_scale"} <= names
    assert not {"generator", "latents", "output_type", "num_images_per_prompt"} & names


# Errors


@of_one_worker
@pytest.mark.parametrize(
    ("options", "code", "param", "message"),
    [
        ({"size": "65x64"}, "size_not_supported", "size", "nearest size is 64x64"),
        ({"num_steps": 4}, "unknown_parameter", "num_steps", "did you mean 'num_inference_steps'"),
        ({"n": 11}, "invalid_value", "n", "from 1 to 10"),
        ({"output_type": "pt"}, "unsupported_parameter", "output_type", "use output_format"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_request_is_refused_with_what_works(
    client: openai.OpenAI, options: dict[str, Any], code: str, param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        draw(client, **options)

    error = caught.value
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert error.request_id is not None
    assert error.request_id.startswith("req-")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'dall-e-3' is not served") as caught:
        draw(client, model="dall-e-3")
    with pytest.raises(openai.NotFoundError, match=MODEL_ID):
        client.models.retrieve("org/name")

    assert caught.value.code == "model_not_found"


def test_another_key_is_refused_where_there_are_keys(server: Server, setup: str) -> None:
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="mallory-secret", max_retries=0) as client:
        if setup == "one worker":
            assert draw(client).data
        else:
            with pytest.raises(openai.AuthenticationError):
                draw(client)


def test_a_deadline_that_cannot_be_met_is_refused_once_it_is_known_what_steps_take(
    client: openai.OpenAI,
) -> None:
    refusals = list[openai.BadRequestError]()

    def is_refused() -> bool:
        try:
            draw(client, num_inference_steps=50, deadline_s=0.001)
        except openai.BadRequestError as error:
            refusals.append(error)
        return bool(refusals)

    eventually(is_refused, PATIENCE_S, "it is known")  # workers tell a front once a second

    assert (refusals[0].code, refusals[0].param) == ("deadline_too_near", "deadline_s")


# Together


def test_concurrent_requests_share_forwards_and_each_is_as_if_alone(server: Server) -> None:
    wishes: list[dict[str, Any]] = [
        {
            "prompt": f"picture {i} of {['cats', 'dogs', 'suns'][i % 3]}", "seed": 100 + i,
            "num_inference_steps": 4 + i % 5, "guidance_scale": 1.0 + i / 4,
        }
        for i in range(12)
    ]  # fmt: skip
    shared = forwards_shared(server)

    answers = asyncio.run(all_at_once(server.url + "/v1", wishes))

    assert forwards_shared(server) > shared
    for wish, answer in zip(wishes, answers, strict=True):
        assert gap(picture(decoded(answer.data[0])), drawn_by_diffusers(**wish)) <= ALIKE


async def all_at_once(url: str, wishes: list[dict[str, Any]]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        return await asyncio.gather(*(client.images.generate(**asked(**wish)) for wish in wishes))


def forwards_shared(server: Server) -> int:
    """Forwards of the transformer that more than one request rode in."""
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
        statistics = http.get("/stats").json()
    return sum(
        forward["count"]
        for worker in workers_of(MODEL_ID, statistics)
        for forward in worker.statistics["forwards"]
        if forward["component"] == "transformer" and forward["requests"] > 1
    )
