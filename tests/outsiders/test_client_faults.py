"""The client's fault is a 4xx, wherever in its own code the pipeline finds it."""

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, PNDMScheduler
from PIL import Image

from carpool.errors import CarpoolError, PipelineFailed, Rejected
from support.app import open_app
from support.engine_driver import driving, fresh
from support.engine_worker import EngineWorker
from support.matrix.control import with_adapter
from support.pictures import png
from support.tiny import ARGUMENTS
from support.video_app import url_of


def error_of(family: str, pipe: Any = None, **words: Any) -> CarpoolError | None:
    """What a request with these words ends with."""
    given = {**ARGUMENTS[family], "num_inference_steps": 1, **words}
    with driving(pipe or fresh(family)) as drive:
        try:
            recorder = drive.submit("a red circle", **given)
        except Rejected as error:
            return error
        drive.finish()
        assert recorder.error is None or isinstance(recorder.error, CarpoolError)
        return recorder.error


@pytest.mark.parametrize("size", [(48, 48), (640, 64), (64, 640), (63, 64)])
def test_a_picture_that_flux2_cannot_edit_is_the_clients_fault(size: tuple[int, int]) -> None:
    error = error_of("flux2", image=Image.new("RGB", size, "red"))

    assert isinstance(error, Rejected)
    assert "too small" in str(error) or "too extreme" in str(error)


@pytest.mark.parametrize(
    ("family", "words", "param"),
    [
        ("flux2", {"text_encoder_out_layers": []}, "text_encoder_out_layers"),
        ("flux2", {"text_encoder_out_layers": [999]}, "text_encoder_out_layers"),
        ("flux2", {"text_encoder_out_layers": ["a"]}, "text_encoder_out_layers"),
        ("sdxl", {"clip_skip": 99}, "clip_skip"),
        ("sdxl", {"original_size": [1]}, "original_size"),
        ("sd3", {"clip_skip": 99}, "clip_skip"),
        ("sd15", {"timesteps": [3, 999, 5]}, "timesteps"),
        ("sdxl_control", {}, None),  # no image
        ("flux_control", {"control_guidance_start": 5.0}, "control_guidance_start"),
        ("sdxl", {"latents": torch.zeros(1, 3, 8, 8)}, "latents"),  # the unet's forward finds it
        ("sd15", {"cross_attention_kwargs": {"gligen": {}}}, "cross_attention_kwargs"),
    ],
)
def test_an_argument_that_the_pipelines_code_fails_for_is_the_clients_fault(
    family: str, words: dict[str, Any], param: str | None
) -> None:
    error = error_of(family, **words)

    assert isinstance(error, Rejected), error
    assert error.param in (param, None)


def test_the_image_of_an_ip_adapter_is_required() -> None:
    pipe = with_adapter(fresh("sdxl_adapter"))

    error = error_of("sdxl_adapter", pipe)
    assert str(error) == "ip_adapter_image is missing: every request needs one"
    assert error_of("sdxl_adapter", pipe, ip_adapter_image_embeds=[torch.ones(2, 1, 32)]) is None
    masks: Any = {"ip_adapter_masks": [torch.zeros(1, 64, 64)]}
    words = {"ip_adapter_image": Image.new("RGB", (64, 64)), "cross_attention_kwargs": masks}
    assert "refuses the request: Each element" in str(error_of("sdxl_adapter", pipe, **words))


async def test_a_flux2_edit_of_a_small_picture_is_400_over_http() -> None:
    answers = list[Any]()

    with driving(fresh("flux2")) as drive:
        async with open_app(EngineWorker(drive)) as opened:
            body = {"prompt": "a", "num_inference_steps": 1, "size": "64x64"}
            body["text_encoder_out_layers"] = ARGUMENTS["flux2"]["text_encoder_out_layers"]
            for picture in (png(48, 48), png(64, 64)):
                edit = {**body, "images": [{"image_url": url_of(picture)}]}
                answers.append(await opened.http.post("/v1/images/edits", json=edit))

    small, fitting = answers
    assert (small.status_code, small.json()["error"]["param"]) == (400, None), small.text
    assert "too small" in small.json()["error"]["message"]
    assert fitting.status_code == 200, fitting.text


def test_a_broken_pipeline_is_not_the_clients_fault() -> None:
    pipe = fresh("sdxl")
    pipe.encode_prompt = None

    error = error_of("sdxl", pipe, guidance_scale=3.0)

    assert isinstance(error, PipelineFailed)


def test_a_failure_of_a_modules_forward_is_not_the_clients_fault() -> None:
    pipe = fresh("sdxl")

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("this module is broken")

    pipe.text_encoder.register_forward_pre_hook(fails)
    before = torch.is_grad_enabled()
    error = error_of("sdxl", pipe, clip_skip=1)

    assert isinstance(error, PipelineFailed)
    assert torch.is_grad_enabled() == before


EDIT: dict[str, Any] = {"prompt": "a", "seed": 1, "images": [{"image_url": url_of(png(64, 64))}]}


@pytest.mark.parametrize("scheduler", [PNDMScheduler, DDIMScheduler])
async def test_a_strength_that_leaves_no_step_is_refused_and_others_go_on(scheduler: Any) -> None:
    pipe = fresh("sd15")
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    with driving(pipe) as drive:
        async with open_app(EngineWorker(drive)) as opened:
            for words, status in (
                ({"num_inference_steps": 1}, 400),
                ({"num_inference_steps": 1, "strength": 0.9}, 400),
                ({"num_inference_steps": 1, "strength": 1.0}, 200),
                ({"num_inference_steps": 2, "strength": 0.6}, 200),
            ):
                answer = await opened.http.post("/v1/images/edits", json={**EDIT, **words})
                assert answer.status_code == status, (words, answer.text)
                if status == 400:
                    assert answer.json()["error"]["param"] == "strength"
