"""A file, a job and an answer say what made them: the same settings give the same picture again."""

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.app import open_app
from support.engine_driver import Drive, driving, fresh
from support.engine_worker import EngineWorker
from support.pictures import png, read_settings
from support.tiny import ARGUMENTS
from support.video_app import url_of

ENGINE = {"scheduler", "scheduler_config", "dtype", "numerics", "pipeline", "versions"}
JOB = {"background_job": True}
OTHERS = {"num_inference_steps": 3, "guidance_scale": 1.5, "width": 32, "height": 32}
"""Defaults of a later server."""


def talk(
    drive: Drive, *bodies: dict[str, Any], path: str = "/v1/images/generations", **settings: Any
) -> list[Any]:
    async def answers() -> list[Any]:
        answers = list[Any]()
        async with open_app(EngineWorker(drive), **settings) as opened:
            for body in bodies:
                answer = await opened.http.post(path, json=body)
                assert answer.status_code in (200, 202), answer.text
                answers.append(answer.json())
                if answer.status_code == 202:
                    job = await opened.ended(answers[-1]["id"])
                    answers[-1] = {"job": job, "files": await opened.files(job)}
        return answers

    return asyncio.run(answers())


def file_of(answer: dict[str, Any]) -> bytes:
    return base64.b64decode(answer["data"][0]["b64_json"])


def pixels(content: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def sendable(settings: dict[str, Any]) -> dict[str, Any]:
    """What the playground sends of settings: the model's own parameters, and adapters."""
    own = {n: v for n, v in settings.items() if n not in ("engine", "model")}
    return {"prompt": "a red circle", **own}


@pytest.mark.parametrize("family", ["sdxl", "flux", "sd15"])
def test_settings_of_a_file_give_its_picture_after_the_defaults_have_changed(family: str) -> None:
    defaults = {"num_inference_steps": 2, "width": 64, "height": 64}
    with driving(fresh(family), default_sampling_params=json.dumps(defaults)) as drive:
        [first] = talk(drive, {"prompt": "a red circle", "seed": 7})
    settings = read_settings(file_of(first))
    with driving(fresh(family), default_sampling_params=json.dumps(OTHERS)) as drive:
        again, plain = talk(drive, sendable(settings), {"prompt": "a red circle", "seed": 7})

    assert (pixels(file_of(again)) == pixels(file_of(first))).all()
    assert pixels(file_of(plain)).shape != pixels(file_of(first)).shape
    assert settings["num_inference_steps"] == 2
    assert settings["guidance_scale"] == {"sdxl": 5.0, "flux": 3.5, "sd15": 7.5}[family]
    assert settings["engine"].keys() >= ENGINE


def test_a_picture_of_sdxl_says_steps_guidance_sampler_and_size_in_every_form() -> None:
    body = {"prompt": "a red circle", "seed": 7, "size": "64x64", "num_inference_steps": 2}
    sizes = {"width": 64, "height": 64, "steps": 2}
    with driving(fresh("sdxl")) as drive:
        answer, streamed = talk(drive, body, {**body, "background_job": True})
        [jpeg] = talk(drive, {**body, "output_format": "jpeg"})
        [webui] = talk(drive, {"prompt": "a", "seed": 7, **sizes}, path="/sdapi/v1/txt2img")

    line = "Steps: 2, Sampler: EulerDiscreteScheduler, CFG scale: 5.0, Seed: 7, Size: 64x64"
    with Image.open(io.BytesIO(file_of(answer))) as image:
        assert line in image.text["parameters"]  # type: ignore[attr-defined]
    with Image.open(io.BytesIO(file_of(jpeg))) as image:
        comment = image.getexif().get_ifd(0x8769)[0x9286]
        assert line in comment[8:].decode("utf-16-be")
    info = json.loads(webui["info"])
    assert (info["steps"], info["cfg_scale"], info["width"]) == (2, 5.0, 64)
    assert line in info["infotexts"][0]
    settings = answer["settings"]
    assert (settings["num_inference_steps"], settings["guidance_scale"]) == (2, 5.0)
    assert (settings["width"], settings["height"]) == (64, 64)
    assert not any("prompt" in name for name in settings)
    job = streamed["job"]["settings"]
    assert {**settings, "seed": 7, "n": 1, "prompt": "a red circle"} == job
    assert read_settings(streamed["files"][0]) == read_settings(file_of(answer))


def test_a_strength_is_said_where_it_acts() -> None:
    body = {"prompt": "a", "seed": 1, "num_inference_steps": 2}
    with driving(fresh("flux")) as drive:
        words = {**body, "size": "64x64", "max_sequence_length": 48}
        [drawn] = talk(drive, words)
        edit = {**body, "max_sequence_length": 48, "images": [{"image_url": url_of(png(64, 64))}]}
        [changed] = talk(drive, edit, path="/v1/images/edits")

    assert "strength" not in drawn["settings"]
    assert changed["settings"]["strength"] == 0.6
    with Image.open(io.BytesIO(file_of(changed))) as image:
        assert "Denoising strength: 0.6" in image.text["parameters"]  # type: ignore[attr-defined]


def test_a_crop_that_is_pasted_says_the_size_that_it_was_drawn_in() -> None:
    hole = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    hole.paste((0, 0, 0, 0), (10, 10, 20, 20))
    hole.save(file := io.BytesIO(), "PNG")
    pictures = {"images": [{"image_url": url_of(png(64, 64))}]}
    body = {"prompt": "a", "seed": 1, "num_inference_steps": 4, "padding_mask_crop": 8, **pictures}
    body["mask"] = {"image_url": url_of(file.getvalue())}
    with driving(fresh("sd15")) as drive:
        [drawn] = talk(drive, {**body, "size": "128x128"}, path="/v1/images/edits")
        settings = {**sendable(drawn["settings"]), "prompt": "a"}
        again, other = talk(drive, {**body, **settings}, body, path="/v1/images/edits")

    assert (drawn["settings"]["width"], drawn["settings"]["height"]) == (128, 128)
    assert pixels(file_of(drawn)).shape == (64, 64, 3)
    assert (pixels(file_of(again)) == pixels(file_of(drawn))).all()
    assert not (pixels(file_of(other)) == pixels(file_of(drawn))).all()


def test_in_python_an_output_says_its_settings_whatever_its_type_is() -> None:
    words = {**ARGUMENTS["sdxl"], "num_inference_steps": 2}
    with driving(fresh("sdxl"), numerics="exact", step_cache=0.1) as drive:
        heard = [drive.submit("a", **words | {"output_type": kind}) for kind in ("pt", "np", "pil")]
        latent = drive.submit("a", **words | {"output_type": "latent"})
        drive.finish()

    told = [dict(recorder.outcome.settings) for recorder in heard]
    assert told[0] == told[1] == told[2] == latent.outcome.settings
    assert told[0]["step_cache"] == 0.1
    assert told[0]["engine"]["numerics"] == "exact"
    assert told[0]["engine"]["dtype"] == "float32"
    assert json.loads(json.dumps(told[0])) == told[0]


def test_a_server_without_metadata_writes_none_into_files() -> None:
    body = {"prompt": "secret", "num_inference_steps": 1, "size": "64x64", "seed": 1}
    background = {**body, "background_job": True}
    with driving(fresh("sdxl")) as drive:
        answer, job = talk(drive, body, background, metadata=False)
        [without_prompt] = talk(drive, background, metadata_prompt=False)

    [content] = job["files"]
    assert read_settings(file_of(answer)) == read_settings(content) == {}
    [content] = without_prompt["files"]
    assert b"secret" not in content
    assert read_settings(content)["guidance_scale"] == 5.0


def test_steps_are_those_of_a_list_and_a_none_that_decides_is_said() -> None:
    with driving(fresh("flux")) as drive:
        listed = drive.submit("a", **ARGUMENTS["flux"] | {"sigmas": [1.0, 0.7, 0.4]})
        drive.finish()
    with driving(fresh("sana")) as drive:
        bare = drive.submit("a", **ARGUMENTS["sana"] | {"complex_human_instruction": None})
        drive.finish()

    assert listed.outcome.settings["num_inference_steps"] == 3
    assert listed.step == 3
    assert bare.outcome.settings["complex_human_instruction"] is None
