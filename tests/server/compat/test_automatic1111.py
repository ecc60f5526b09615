"""AUTOMATIC1111's API: as webuiapi, Open WebUI and SillyTavern use it."""

import base64
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from PIL import Image

from carpool.request.card import Task
from carpool.server.compat.automatic1111.bodies import Text2Image
from carpool.server.compat.automatic1111.fields import translated
from support.app import Grey, app_of, ask, client_of, refusal
from support.forms import BOTH, FILL, OWN, worker_of
from support.pictures import picture, png, saved

API = "/sdapi/v1/"
FIXED = tuple(one for one in FILL.parameters if one.name not in ("width", "height"))
OWN_SIZE = replace(BOTH, tasks=(OWN, Task("inpaint", "GreyFixed", FIXED)))

OPEN_WEBUI = {"prompt": "a cat", "batch_size": 2, "width": 64, "height": 48, "steps": 3,
              "negative_prompt": "dogs", "cfg_scale": 2.5}  # fmt: skip
SILLY_TAVERN = {
    "url": "http://localhost:7860", "auth": "", "prompt": "a cat", "negative_prompt": "dogs",
    "sampler_name": "Automatic", "scheduler": "automatic", "steps": 3, "cfg_scale": 2.5,
    "width": 64, "height": 48, "restore_faces": False, "enable_hr": False,
    "hr_upscaler": "Latent", "hr_scale": 1.0, "hr_additional_modules": [],
    "denoising_strength": 0.7, "hr_second_pass_steps": 0,
    "override_settings": {"CLIP_stop_at_last_layers": 1},
    "override_settings_restore_afterwards": True, "save_images": True, "send_images": True,
    "do_not_save_grid": False, "do_not_save_samples": False,
}  # fmt: skip


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def post(worker: Grey, path: str, body: Any, **options: Any) -> httpx2.Response:
    return ask(json.dumps(body), API + path, worker=worker, **options)


def get(path: str, **options: Any) -> Any:
    return ask(b"", API + path, method="GET", worker=Grey(), **options).json()


@pytest.mark.parametrize("sent", [OPEN_WEBUI, SILLY_TAVERN], ids=["Open WebUI", "SillyTavern"])
def test_what_a_client_sends_is_drawn(sent: dict[str, Any]) -> None:
    worker = Grey()

    answer = post(worker, "txt2img", sent)

    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert len(told["images"]) == len(worker.jobs) == sent.get("batch_size", 1)
    assert picture(base64.b64decode(told["images"][0])).size == (16, 16)
    assert told["parameters"] == {name: value for name, value in sent.items() if value is not None}
    assert json.loads(told["info"])["all_seeds"] == [job.seed for job in worker.jobs]
    assert worker.jobs[0].arguments == {
        "prompt": "a cat", "negative_prompt": "dogs", "width": 64, "height": 48,
        "num_inference_steps": 3, "true_cfg_scale": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize("inverted", [0, 1])
def test_a_mask_is_white_where_to_draw_anew(inverted: int) -> None:
    worker, mask = worker_of(OWN_SIZE), Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    sent = {"prompt": "a", "init_images": [b64(png())], "mask": b64(saved(mask)),
            "inpainting_mask_invert": inverted, "width": 32, "height": 64,
            "inpainting_fill": 1}  # fmt: skip

    answer = post(worker, "img2img", sent)

    assert answer.status_code == 200, answer.text
    arguments = worker.jobs[0].arguments
    assert arguments["image"].size == arguments["mask_image"].size == (32, 64)
    left, right = (arguments["mask_image"].getpixel((x, 32)) for x in (2, 30))
    assert (left, right) == ((255, 0) if inverted else (0, 255))


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"sampler_name": "Euler a"}, "unsupported_parameter", "sampler_name"),
    ({"scheduler": "Karras"}, "unsupported_parameter", "scheduler"),
    ({"enable_hr": True}, "unsupported_parameter", "enable_hr"),
    ({"restore_faces": True}, "unsupported_parameter", "restore_faces"),
    ({"tiling": True}, "unsupported_parameter", "tiling"),
    ({"styles": ["bold"]}, "unsupported_parameter", "styles"),
    ({"subseed_strength": 0.5}, "unsupported_parameter", "subseed_strength"),
    ({"script_name": "x/y/z plot"}, "unsupported_parameter", "script_name"),
    ({"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "unsupported_parameter",
     "alwayson_scripts"),
    ({"alwayson_scripts": {"ADetailer": {"arg": []}}}, "unsupported_parameter",
     "alwayson_scripts"),
    ({"override_settings": {"sd_model_checkpoint": "other"}}, "model_not_found", None),
    ({"override_settings": {"eta_noise": 1}}, "unsupported_parameter", "eta_noise"),
    ({"override_settings": {"CLIP_stop_at_last_layers": 99}}, "invalid_value",
     "CLIP_stop_at_last_layers"),
    *[({name: value}, "", name) for name, value in {
        "tempo": 1, "s_min_uncond": 0.5, "initial_noise_multiplier": 0, "s_churn": 1,
        "s_noise": 0.5, "eta": "a", "infotext": "a\nSteps: 3",
        "token_merging_ratio": 0.5, "sampler_index": "Heun", "sampler_name": "Euler",
    }.items()],
    ({"override_settings": {"sdxl_clip_l_skip": True}}, "", "sdxl_clip_l_skip"),
    ({"alwayson_scripts": {"ControlNet": {"args": [{"enabled": True}]}}}, "", "alwayson_scripts"),
    ({"alwayson_scripts": {"ControlNet": {"args": [{"module": "canny"}]}}}, "", "alwayson_scripts"),
    ({"batch_size": 0}, "invalid_value", "batch_size"),
    ({"batch_size": 900, "n_iter": 900}, "invalid_value", "n"),
    ({"steps": 0}, "invalid_value", "num_inference_steps"),
    ({"width": 33, "height": 33}, "size_not_supported", None),
    ({"prompt": "a <lora:none:1>"}, "invalid_value", "lora"),
    ({"prompt": 7}, "invalid_value", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), WRONG, ids=str)
def test_what_would_change_the_picture_is_refused_by_name(
    fields: dict[str, Any], code: str, param: str | None
) -> None:
    worker = Grey()

    told = refusal(post(worker, "txt2img", {"prompt": "a", **fields}))

    assert (code or told["code"], worker.jobs) == (told["code"], [])
    assert param is None or told["param"] == param


WRONG_PICTURES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_parameter", "init_images"),
    ({"init_images": []}, "invalid_value", "init_images"),
    ({"init_images": [7]}, "invalid_value", "init_images"),
    ({"init_images": ["####"]}, "invalid_value", "init_images"),
    ({"init_images": ["http://127.0.0.1:9/a"]}, "unsupported_parameter", "init_images"),
    ({"resize_mode": 2}, "unsupported_parameter", "resize_mode"),
    ({"mask": "####", "inpainting_fill": 1}, "invalid_value", "mask"),
    ({"mask": "a", "inpainting_fill": 2}, "unsupported_parameter", "inpainting_fill"),
    ({"mask": "a", "inpaint_full_res": True}, "unsupported_parameter", "inpaint_full_res"),
    ({"mask": "a", "mask_blur": 1e9}, "invalid_value", "mask_blur"),
]


@pytest.mark.parametrize(("fields", "code", "param"), WRONG_PICTURES, ids=str)
def test_a_picture_that_cannot_be_drawn_anew_is_refused(
    fields: dict[str, Any], code: str, param: str
) -> None:
    worker = worker_of(BOTH)
    images = {} if not fields else {"init_images": [b64(png())]}

    told = refusal(post(worker, "img2img", {"prompt": "a", **images, **fields}))

    assert (told["code"], told["param"], worker.jobs) == (code, param, [])


def test_a_size_that_the_picture_cannot_have_is_refused() -> None:
    for width, height in ((33, 64), (0, 64), ("a", 64), (4096, 4096)):
        sent = {"prompt": "a", "init_images": [b64(png())], "width": width, "height": height}
        sent |= {"mask": b64(png()), "inpainting_fill": 1}
        told = refusal(post(worker_of(OWN_SIZE), "img2img", sent))
        assert told["code"] == "size_not_supported"


def test_options_are_taken_where_they_change_nothing() -> None:
    worker = Grey()
    whole = get("options")
    for sent, status in (
        (whole, 200), ({"sd_model_checkpoint": "grey"}, 200),
        ({"sd_model_checkpoint": "other"}, 404), ({"CLIP_stop_at_last_layers": 2}, 400),
        ({"eta_noise_seed_delta": 31337}, 400),
    ):  # fmt: skip
        assert post(worker, "options", sent).status_code == status, sent


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Basic " + b64(b"anybody:secret")}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "Basic " + b64(b"anybody:wrong")}, 401),
        ({"authorization": "Basic " + b64(b"secret")}, 401),
        ({"authorization": "Basic ####"}, 401),
        ({"authorization": "Basic"}, 401),
        ({}, 401),
        ({"authorization": "Basic " + b64(b"a:secret"), "sec-fetch-site": "cross-site"}, 401),
        ({"authorization": "Basic " + b64(b"a:secret"), "origin": "http://localhost"}, 401),
    ],
)
async def test_the_key_is_the_password(headers: dict[str, str], status: int) -> None:
    async with client_of(app_of(Grey(), api_key=("secret",))) as http:
        answer = await http.get(API + "sd-models", headers=headers)
        assert answer.status_code == status
        if "authorization" in headers:  # a password opens these paths alone
            other = await http.get("/v1/models", headers=headers)
            assert (other.status_code == 200) == headers["authorization"].startswith("Bearer")


@pytest.mark.parametrize(
    ("sent", "scheduler"),
    [
        ({"sampler_name": "DPM++ 2M", "scheduler": "Karras"}, "DPM++ 2M Karras"),
        ({"sampler_name": "Euler a", "scheduler": "Automatic"}, "Euler a"),
        ({"sampler_index": "DPM++ 2M Karras"}, "DPM++ 2M Karras"),
        ({"sampler_index": "Euler", "sampler_name": "Heun"}, "Heun"),
        ({"sampler_index": "Euler"}, None),
        ({"sampler_name": "Automatic", "scheduler": "automatic"}, None),
    ],
)
def test_a_sampler_and_its_schedule_become_one_name(
    sent: dict[str, Any], scheduler: str | None
) -> None:
    card = replace(BOTH, schedulers=("euler", "euler_a", "dpmpp_2m_karras", "heun"))

    values = translated(Text2Image(prompt="a", **sent), card, "grey").values

    assert values.get("scheduler") == scheduler
