"""`/v1/meshes` and `/v1/audio/generations`, before a fake worker that makes meshes or sound."""

import io
import json
import wave
from typing import Any

import numpy as np
import pytest

from carpool.request.card import Task
from support.app import AppClient, open_app
from support.artifacts_app import BELL, HUM, MESHES, OF_PICTURES, OF_WORDS, SOUND, Making
from support.pictures import png
from support.video_app import url_of


async def completed(opened: AppClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await opened.http.post(MESHES, json=body)
    assert answer.status_code == 200, answer.text
    job_id = answer.json()["id"]
    await opened.runner.ended(job_id, opened.runner.store.get(job_id, None).owner)
    job: dict[str, Any] = (await opened.http.get(f"{MESHES}/{answer.json()['id']}")).json()
    return job


def error_of(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, str(error["param"]), error["message"]


@pytest.mark.parametrize("format", ["glb", "obj", "ply"])
async def test_a_mesh_of_a_picture_is_a_job_with_a_file_of_the_format_that_was_asked(
    format: str,
) -> None:
    worker = Making(OF_PICTURES)

    async with open_app(worker) as opened:
        body = {
            "input_reference": {"image_url": url_of(png(16, 16))},
            "seed": 5,
            "output_format": format,
        }
        job = await completed(opened, body | {"num_inference_steps": 3})
        content = await opened.http.get(f"{MESHES}/{job['id']}/content")
        part = await opened.http.get(
            f"{MESHES}/{job['id']}/content", headers={"range": "bytes=0-3"}
        )
        plain = (await opened.http.get(f"/v1/jobs/{job['id']}")).json()

        assert (job["object"], job["status"], job["progress"]) == ("mesh", "completed", 100)
        assert (job["seed"], job["output_format"], job["model"]) == (5, format, "grey")
        assert job["settings"]["num_inference_steps"] == 3
        assert job["bytes"] == len(content.content)
        assert (part.status_code, part.content) == (206, content.content[:4])
        assert (plain["kind"], plain["files"][0]["name"]) == ("mesh", f"mesh.{format}")
        begins = {"glb": b"glTF", "obj": b"# made by a model", "ply": b"ply\n"}
        assert content.content.startswith(begins[format])
        assert content.headers["content-type"].startswith("model/")
    assert worker.jobs[0].arguments["image"].size == (16, 16)
    assert worker.jobs[0].output_type is None  # the pipeline's own: it has no pictures


async def test_a_form_with_a_picture_and_words_alone_make_meshes_as_well() -> None:
    async with open_app(Making(OF_PICTURES)) as opened:
        files: dict[str, Any] = {"image": ("a.png", png()), "num_inference_steps": (None, "2")}
        answer = await opened.http.post(MESHES, files=files)
        assert answer.status_code == 200, answer.text

    async with open_app(Making(OF_WORDS)) as opened:
        job = await completed(opened, {"prompt": "a cup"})
        assert (job["status"], job["prompt"]) == ("completed", "a cup")


async def test_meshes_are_listed_deleted_and_no_other_jobs() -> None:
    async with open_app(Making(OF_WORDS)) as opened:
        first, second = [await completed(opened, {"prompt": text}) for text in ("a", "b")]
        listed = (await opened.http.get(MESHES)).json()
        gone = (await opened.http.delete(f"{MESHES}/{first['id']}")).json()
        missing = await opened.http.get(f"{MESHES}/{first['id']}/content")
        unknown = await opened.http.get(f"{MESHES}/none")

        assert [one["id"] for one in listed["data"]] == [second["id"], first["id"]]
        assert gone == {"id": first["id"], "object": "mesh.deleted", "deleted": True}
        assert missing.status_code == unknown.status_code == 404


@pytest.mark.parametrize(
    ("task", "body", "param", "message"),
    [
        (OF_PICTURES, {}, "input_reference", "is missing"),
        (OF_WORDS, {}, "prompt", "is missing"),
        (OF_WORDS, {"prompt": "a", "output_format": "stl"}, "output_format", "glb"),
        (OF_WORDS, {"prompt": "a", "size": "64x64"}, "size", "meshes have none"),
        (OF_WORDS, {"prompt": "a", "n": 2}, "n", ""),
        (OF_WORDS, {"prompt": "a", "octrees": 2}, "octrees", "no parameter"),
        (BELL, {"prompt": "a"}, "model", "POST /v1/audio/generations makes them"),
    ],
)
async def test_what_cannot_be_a_mesh_is_refused_by_name(
    task: Task, body: dict[str, Any], param: str, message: str
) -> None:
    async with open_app(Making(task)) as opened:
        status, named, text = error_of(await opened.http.post(MESHES, json=body))
        assert status in (400, 422)
        assert named == param
        assert message in text


async def test_a_mesh_of_too_many_faces_fails_with_the_limit() -> None:
    async with open_app(Making(OF_WORDS), max_faces=1) as opened:
        job = await completed(opened, {"prompt": "a"})
        assert job["status"] == "failed"
        assert "has 2 faces: at most 1 (--max-faces)" in job["error"]["message"]


@pytest.mark.parametrize(
    ("format", "kind"), [("wav", "audio/wav"), ("flac", "audio/flac"), ("mp3", "audio/mpeg")]
)
async def test_sound_is_answered_with_its_file(format: str, kind: str) -> None:
    worker = Making(BELL)

    async with open_app(worker) as opened:
        body = {"prompt": "a bell", "seconds": 2, "seed": 3, "output_format": format}
        answer = await opened.http.post(SOUND, json=body)
        assert answer.status_code == 200, answer.text
        assert (answer.headers["content-type"], answer.headers["x-seed"]) == (kind, "3")
        job = (await opened.http.get(f"/v1/jobs/{answer.headers['x-job-id']}")).json()
        assert (job["kind"], job["files"][0]["name"]) == ("sound", f"sound.{format}")
        if format == "wav":
            with wave.open(io.BytesIO(answer.content)) as file:
                assert (file.getnchannels(), file.getframerate()) == (2, 8000)
    assert worker.jobs[0].arguments["audio_end_in_s"] == 2.0
    assert worker.jobs[0].output_type == "pt"


async def test_sound_may_be_a_job() -> None:
    async with open_app(Making(BELL)) as opened:
        answer = await opened.http.post(SOUND, json={"prompt": "a bell", "background_job": True})
        assert (answer.status_code, answer.json()["kind"]) == (202, "sound")
        ended = await opened.runner.ended(answer.json()["id"])
        assert list(ended.files) == ["sound.wav"]


@pytest.mark.parametrize(
    ("task", "body", "param", "message"),
    [
        (BELL, {"seconds": 601}, "seconds", r"at most 600 (--max-sound)"),
        (BELL, {"seconds": "long"}, "seconds", ""),
        (BELL, {"audio_end_in_s": 601}, "audio_end_in_s", r"at most 600 (--max-sound)"),
        (BELL, {"seconds": 0}, "seconds", "above 0"),
        (HUM, {"seconds": 5}, "seconds", "a length of its own"),
        (BELL, {"output_format": "ogg"}, "output_format", ""),
        (BELL, {"size": "64x64"}, "size", "sound have none"),
        (OF_WORDS, {}, "model", "POST /v1/meshes makes them"),
    ],
)
async def test_what_cannot_be_sound_is_refused_by_name(
    task: Task, body: dict[str, Any], param: str, message: str
) -> None:
    async with open_app(Making(task)) as opened:
        answer = await opened.http.post(SOUND, json={"prompt": "a", **body})
        status, named, text = error_of(answer)
        assert (status in (400, 422), named) == (True, param), text
        assert message in text


async def test_the_same_key_has_the_same_mesh() -> None:
    worker = Making(OF_WORDS)

    async with open_app(worker) as opened:
        headers = {"idempotency-key": "a"}
        answers = [
            await opened.http.post(MESHES, json={"prompt": "a"}, headers=headers) for _ in range(2)
        ]
        other = await opened.http.post(MESHES, json={"prompt": "b"}, headers=headers)
        assert len({one.json()["id"] for one in answers}) == 1
        assert other.status_code == 422


@pytest.mark.parametrize("options", [{}, {"metadata_prompt": True}])
async def test_files_say_what_made_them_without_prompts_unless_they_may(
    options: dict[str, Any],
) -> None:
    def note(of: bytes) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(of[of.index(b"carpool {") + 8 :].split(b"\n")[0])
        return made

    async with open_app(Making(OF_WORDS), **options) as opened:
        job = await completed(opened, {"prompt": "a cup", "output_format": "obj", "seed": 9})
        made = note((await opened.http.get(f"{MESHES}/{job['id']}/content")).content)
    assert made["seed"] == 9
    assert ("prompt" in made) == bool(options)


async def test_files_of_meshes_and_sound_have_signed_links_that_need_no_key() -> None:
    worker = Making(OF_WORDS)

    async with open_app(worker, api_key=("secret",)) as opened:
        opened.http.headers["authorization"] = "Bearer secret"
        job = await completed(opened, {"prompt": "a cup"})
        content = (await opened.http.get(f"{MESHES}/{job['id']}/content")).content
        plain = (await opened.http.get(f"/v1/jobs/{job['id']}")).json()
        opened.http.headers.pop("authorization")
        first, second = job["url"], plain["files"][0]["signed_url"]
        answers = [await opened.http.get(url) for url in (first, second)]
        part = await opened.http.get(first, headers={"range": "bytes=0-3"})
        others = [
            await opened.http.get(first.replace("mesh.glb", "mesh.obj")),
            await opened.http.get(first[:-1] + ("0" if first[-1] != "0" else "1")),
            await opened.http.get(first.partition("?")[0]),
            await opened.http.get(f"{MESHES}/{job['id']}/content"),
        ]

        assert [answer.content for answer in answers] == [content, content]
        assert (part.status_code, part.content) == (206, content[:4])
        assert [answer.status_code for answer in others] == [404, 404, 404, 401]


async def test_sound_names_the_signed_link_of_its_file() -> None:
    async with open_app(Making(BELL)) as opened:
        answer = await opened.http.post(SOUND, json={"prompt": "a bell"})
        again = await opened.http.get(answer.headers["x-file-url"])

        assert (again.status_code, again.content) == (200, answer.content)
        assert again.headers["content-type"] == answer.headers["content-type"]


async def test_the_texture_of_an_obj_is_a_file_of_its_job() -> None:
    worker = Making(OF_WORDS)
    worker.more = {"places": np.zeros((3, 2), np.float32), "texture": png()}

    async with open_app(worker) as opened:
        job = await completed(opened, {"prompt": "a cup", "output_format": "obj"})
        content = (await opened.http.get(f"{MESHES}/{job['id']}/content")).content
        files = (await opened.http.get(f"/v1/jobs/{job['id']}")).json()["files"]
        answers = {file["name"]: await opened.http.get(file["url"]) for file in files}

        assert answers["mesh.obj"].content == content
        assert b"mtllib mesh.mtl" in content
        assert answers["mesh.png"].content == png()
        assert answers["mesh.mtl"].headers["content-type"].startswith("model/mtl")
        assert job["bytes"] == len(content)
