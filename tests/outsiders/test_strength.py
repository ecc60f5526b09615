"""A strength that leaves no step is the client's fault, whatever the scheduler counts."""

from typing import Any

import pytest
from diffusers import DDIMScheduler, PNDMScheduler

from support.app import open_app
from support.engine_driver import driving, fresh
from support.engine_worker import EngineWorker
from support.pictures import png
from support.video_app import url_of

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
