"""Jobs that bring pictures along: what they give is what the same request gives at once."""

import base64
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import WorkerLost
from carpool.types import CheckedRequest
from carpool.worker.protocol import Done
from support.app import AppClient, Grey, open_app, refusal
from support.endpoints import EDITS, VARIATIONS
from support.engine_driver import driving
from support.engine_worker import EngineWorker
from support.forms import BOTH, worker_of
from support.pictures import mask, png

pytestmark = pytest.mark.timeout(100)  # checkpoints may have to be made first
DRAW = {"seed": "3", "num_inference_steps": "4", "strength": "0.8", "max_sequence_length": "48"}
PROMPT = {"prompt": "a red circle"}
JOB = {"background_job": "true"}


async def edit(
    opened: AppClient, fields: Any, path: str = EDITS, headers: Any = (), **files: bytes
) -> dict[str, Any]:
    """Send a form; gives the answer."""
    named = {name: (f"{name}.png", content) for name, content in files.items()}
    answer = await opened.http.post(path, data=fields, files=named, headers=dict(headers))
    assert answer.status_code in (200, 202), answer.text
    return {"status": answer.status_code, **answer.json()}


@pytest.mark.parametrize(
    ("path", "fields", "files"),
    [
        (EDITS, PROMPT | {"n": "2"}, {"image": png()}),
        (EDITS, PROMPT | {"size": "48x32"}, {"image": png(48, 64), "mask": mask(48, 64)}),
        (VARIATIONS, {"output_format": "webp", "output_compression": "80"}, {"image": png()}),
    ],
    ids=["two edits", "a masked edit", "a variation"],
)
async def test_what_is_drawn_in_the_background_is_what_is_drawn_at_once(
    path: str, fields: dict[str, str], files: dict[str, bytes]
) -> None:
    with driving("flux") as drive:
        async with open_app(EngineWorker(drive)) as opened:
            job = await edit(opened, fields | DRAW | JOB, path, **files)
            assert (job["status"], job["object"]) == ("queued", "job")
            done = await opened.ended(job["id"])
            assert (done["status"], done["error"]) == ("completed", None)
            at_once = await edit(opened, fields | DRAW, path, **files)

            drawn = [base64.b64decode(image["b64_json"]) for image in at_once["data"]]
            assert await opened.files(done) == drawn
            await opened.inputs_are_gone()


async def test_the_sdk_gets_a_job_too(tmp_path: Path) -> None:
    async with open_app(worker_of(BOTH), tmp_path, runs=False) as opened:
        asked: dict[str, Any] = {"image": ("a.png", png()), "prompt": "a"}
        answer: Any = await opened.openai.images.edit(**asked, extra_body={"background_job": True})
        assert (answer.object, answer.kind, answer.status) == ("job", "image", "queued")
        assert opened.inputs() == ["input-0.png"]


async def test_a_job_begins_again_from_its_pictures_when_the_server_was_killed(
    tmp_path: Path,
) -> None:
    files: dict[str, Any] = {"image": png(), "mask": mask()}

    with driving("flux") as drive:
        async with open_app(EngineWorker(drive), tmp_path, runs=False) as opened:
            job = await edit(opened, PROMPT | DRAW | JOB, **files)
            assert opened.inputs() == ["input-0.png", "input-1.png"]
        async with open_app(EngineWorker(drive), tmp_path) as opened:
            done = await opened.ended(job["id"])
            [drawn] = (await edit(opened, PROMPT | DRAW, **files))["data"]
            assert await opened.files(done) == [base64.b64decode(drawn["b64_json"])]
            await opened.inputs_are_gone()


class Dying(Grey):
    """Dies under the first part that it runs."""

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> Done:
        if not self.jobs:
            self.jobs.append(request)
            raise WorkerLost("it died")
        return await super().submit(request)


async def test_a_job_whose_worker_dies_is_run_again_with_the_same_pixels() -> None:
    worker = Dying()
    worker.ready = worker_of(BOTH).ready

    async with open_app(worker) as opened:
        job = await edit(opened, PROMPT | JOB, image=png(), mask=mask())
        assert (await opened.ended(job["id"]))["status"] == "completed"
    first, second = worker.jobs
    assert first.request_id != second.request_id
    for name, mode in (("image", "RGB"), ("mask_image", "L")):
        before, after = first.arguments[name], second.arguments[name]
        assert before.mode == after.mode == mode
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_pictures_go_as_their_job_is_given_up(end: str, tmp_path: Path) -> None:
    async with open_app(worker_of(BOTH), tmp_path, runs=False) as opened:
        job = await edit(opened, PROMPT | JOB, image=png())
        url = f"/v1/jobs/{job['id']}"
        if end == "cancel":
            await opened.http.post(f"{url}/cancel")
        else:
            await opened.http.delete(url)
        assert opened.inputs() == []


async def test_a_job_whose_pictures_are_lost_fails_and_says_so(tmp_path: Path) -> None:
    async with open_app(worker_of(BOTH), tmp_path, runs=False) as opened:
        lost = await edit(opened, PROMPT | JOB, image=png())
        spoiled = await edit(opened, PROMPT | JOB, image=png())
    (tmp_path / "inputs" / lost["id"] / "input-0.png").unlink()
    (tmp_path / "inputs" / spoiled["id"] / "input-0.png").write_bytes(png()[:500])
    async with open_app(worker_of(BOTH), tmp_path) as opened:
        errors = [(await opened.ended(job["id"]))["error"] for job in (lost, spoiled)]
        assert [error["code"] for error in errors] == ["store_failed", "unsupported_image"]
        assert "pictures cannot be read any more" in errors[0]["message"]
        await opened.inputs_are_gone()


async def test_the_same_key_is_the_same_job_and_another_picture_is_refused(tmp_path: Path) -> None:
    async with open_app(worker_of(BOTH), tmp_path, runs=False) as opened:
        key = {"idempotency-key": "mine"}
        first = await edit(opened, PROMPT | JOB, headers=key, image=png())
        again = await edit(opened, PROMPT | JOB, headers=key, image=png())
        assert first["id"] == again["id"]
        assert opened.inputs() == ["input-0.png"]
        form = {"image": ("a.png", png(seed=1))}
        other = await opened.http.post(EDITS, data=PROMPT | JOB, files=form, headers=key)
        assert refusal(other)["code"] == "idempotency_mismatch"
        assert opened.inputs() == ["input-0.png"]


async def test_an_edit_that_would_be_refused_at_once_is_no_job_either(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, str], str]] = [
        ({"stream": "true"}, "stream"), ({"size": "65x64"}, "size"), ({"n": "0"}, "n"),
        ({"strength": "2"}, "strength"),
    ]  # fmt: skip

    async with open_app(worker_of(BOTH), tmp_path, runs=False) as opened:
        for fields, param in wrong:
            form = {"image": ("a.png", png())}
            answer = await opened.http.post(EDITS, data=PROMPT | JOB | fields, files=form)
            assert refusal(answer)["param"] == param
        assert opened.inputs() == []
        assert (await opened.http.get("/v1/jobs")).json()["data"] == []
