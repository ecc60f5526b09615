"""AUTOMATIC1111's API with a real client of it: `webuiapi`, with its own defaults."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import webuiapi
from PIL import Image

from carpool.worker import protocol
from support.app import Grey
from support.forms import BOTH
from support.running import Running, Timed

SIZE = {"width": 64, "height": 48}
KEY = "a-key"


@contextmanager
def client(worker: Grey, **settings: Any) -> Iterator[Any]:
    """The client of a server of this worker; it knows the key as a password."""
    with Running(worker, api_key=(KEY,), **settings) as url:
        api = webuiapi.WebUIApi(
            baseurl=f"{url}/sdapi/v1", sampler="Automatic", username="me", password=KEY
        )
        yield api
        api.session.close()


def editing(**options: Any) -> Timed:
    worker = Timed(**options)
    worker.ready = protocol.WorkerReady(replace(BOTH, lora=("outlined",)), {}, 0.0)
    return worker


def test_a_picture_is_drawn_from_a_text_with_the_seed_that_is_told() -> None:
    worker = editing()

    with client(worker) as api:
        made = api.txt2img(prompt="a cat", negative_prompt="dogs", seed=1003, steps=3, cfg_scale=7,
                           batch_size=2, **SIZE)  # fmt: skip

    assert [image.size for image in made.images] == [(16, 16)] * 2  # as the fake worker draws
    assert made.image is made.images[0]
    assert made.info["seed"] == 1003
    assert made.info["all_seeds"] == [1003, 1004]
    assert made.parameters["prompt"] == "a cat"
    assert [job.seed for job in worker.jobs] == [1003, 1004]
    assert worker.jobs[0].arguments == {
        "prompt": "a cat", "negative_prompt": "dogs", "num_inference_steps": 3,
        "true_cfg_scale": 7, **SIZE,
    }  # fmt: skip


def test_a_picture_is_drawn_anew_and_with_a_mask_only_there() -> None:
    worker = editing()
    blue, mask = Image.new("RGB", (64, 48), "blue"), Image.new("L", (64, 48), 0)
    mask.paste(255, (0, 0, 32, 48))

    with client(worker) as api:
        whole = api.img2img(images=[blue], prompt="a cat", denoising_strength=0.4, steps=3, **SIZE)
        part = api.img2img(
            images=[blue], mask_image=mask, inpainting_fill=1, mask_blur=0, inpaint_full_res=False,
            prompt="a cat", denoising_strength=0.9, steps=3, **SIZE,
        )  # fmt: skip

    assert len(whole.images) == len(part.images) == 1
    first, second = worker.jobs
    assert (first.task, first.arguments["strength"]) == ("image-to-image", 0.4)
    assert first.arguments["image"].getpixel((0, 0)) == (0, 0, 255)
    assert (second.task, second.arguments["strength"]) == ("inpaint", 0.9)
    white = second.arguments["mask_image"]
    assert (white.getpixel((8, 8)), white.getpixel((56, 8))) == (255, 0)


def test_an_adapter_of_the_list_is_used_in_a_prompt() -> None:
    worker = editing()

    with client(worker) as api:
        [adapter] = [one["name"] for one in api.get_loras()]
        api.txt2img(prompt=f"a cat <lora:{adapter}:0.7>", steps=3, **SIZE)

    assert worker.jobs[0].lora == (("outlined", 0.7),)
    assert worker.jobs[0].arguments["prompt"] == "a cat"


def test_progress_and_an_interrupt_are_those_of_what_runs() -> None:
    worker, made = editing(is_slow=True), []

    with client(worker) as api:
        drawing = threading.Thread(
            target=lambda: made.append(api.txt2img(prompt="a cat", steps=4, **SIZE))
        )
        drawing.start()
        with client_like(api) as other:
            while not (told := other.get_progress())["state"]["job_count"] or not told["progress"]:
                assert drawing.is_alive()
            assert told["progress"] == 0.5
            assert told["state"]["sampling_steps"] == 4
            other.interrupt()
            drawing.join(20)
            other.util_wait_for_ready(check_interval=0.01)
    assert [result.images for result in made] == [[]]


@contextmanager
def client_like(api: Any) -> Iterator[Any]:
    """Another client of the same server: sessions are for one thread."""
    other = webuiapi.WebUIApi(baseurl=api.baseurl, username="me", password=KEY)
    yield other
    other.session.close()


def test_what_the_client_lists_and_sets_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with client(editing()) as api:
        assert api.util_get_model_names() == ["grey"]
        assert api.util_get_current_model() == "grey"
        api.util_set_model("grey")
        assert api.util_get_sampler_names() == ["Automatic"]
        assert api.util_get_scheduler_names() == ["automatic"]
        assert api.get_options()["sd_model_checkpoint"] == "grey"
        assert api.get_scripts() == {"txt2img": [], "img2img": []}
        assert api.get_embeddings() == {"loaded": {}, "skipped": {}}
        assert api.get_cmd_flags() == {}
        for name in ("upscalers", "latent_upscale_modes", "sd_vae", "prompt_styles",
                     "hypernetworks", "face_restorers", "realesrgan_models"):  # fmt: skip
            assert getattr(api, f"get_{name}")() == [], name
        api.refresh_checkpoints()
        api.skip()
        assert not any((api.has_controlnet, api.has_adetailer, api.has_animatediff))


def test_what_would_be_drawn_otherwise_is_refused_in_words_that_the_client_shows() -> None:
    worker = editing()

    with client(worker) as api:
        for wrong, says in (
            ({"sampler_name": "Euler a"}, "Automatic"),
            ({"enable_hr": True}, "enable_hr"),
            ({"restore_faces": True}, "restore_faces"),
            ({"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "ADetailer"),
        ):
            with pytest.raises(RuntimeError, match="400") as refused:
                api.txt2img(prompt="a cat", steps=3, **SIZE, **wrong)
            assert says in str(refused.value)
        mask = Image.new("L", (64, 48), 255)
        with pytest.raises(RuntimeError, match="inpainting_fill"):
            api.img2img(
                images=[mask.convert("RGB")], mask_image=mask, inpainting_fill=2, prompt="a", **SIZE
            )
    assert worker.jobs == []

    with Running(editing(), api_key=(KEY,)) as url:
        wrong = webuiapi.WebUIApi(baseurl=f"{url}/sdapi/v1", username="me", password="no")
        with pytest.raises(RuntimeError, match="401"):
            wrong.txt2img(prompt="a cat")
        wrong.session.close()
