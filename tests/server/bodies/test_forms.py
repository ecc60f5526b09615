"""Bodies with pictures: a form and JSON that say the same are the same request."""

import base64
import json
from typing import Any

import httpx2
import pytest

from carpool.server.app import UPLOADS
from support.app import ask, refusal, shared_app
from support.endpoints import EDITS, VARIATIONS
from support.forms import BOTH, PICTURE, SEVERAL, send, worker_of
from support.pictures import mask, png


def url_of(content: bytes) -> dict[str, str]:
    return {"image_url": "data:image/png;base64," + base64.b64encode(content).decode()}


def say(path: str = EDITS, *, card: Any = BOTH, **body: Any) -> tuple[httpx2.Response, list[Any]]:
    """Send JSON; gives the answer, and the jobs that were made of it."""
    worker = worker_of(card)
    body = {"prompt": "a", **body} if path == EDITS else body
    return ask(json.dumps(body), path, worker=worker), worker.jobs


def test_json_and_a_form_are_the_same_request() -> None:
    fields: dict[str, Any] = {
        "seed": 7, "n": 2, "strength": 0.5, "lora": [{"id": "outlined", "scale": 0.5}],
        "original_size": [32, 48], "control_scale": [0.5, 1.0], "attention_kwargs": {"a": 1},
    }  # fmt: skip
    answer, jobs = say(images=[url_of(png())], mask=url_of(mask()), **fields)
    assert answer.status_code == 200, answer.text

    worker = worker_of(BOTH)
    texts: dict[str, Any] = {name: json.dumps(value) for name, value in fields.items()}
    send([("image", png()), ("mask", mask())], worker=worker, **texts)

    for left, right in zip(jobs, worker.jobs, strict=True):
        assert (left.seed, left.task, left.lora) == (right.seed, right.task, right.lora)
        rest = [{n: v for n, v in j.arguments.items() if "image" not in n} for j in (left, right)]
        for name in ("image", "mask_image"):
            assert left.arguments[name].tobytes() == right.arguments[name].tobytes()
        assert rest[0] == rest[1] == {**rest[0], "original_size": [32, 48]}


def test_json_may_bring_several_pictures_in_their_order() -> None:
    pictures = [url_of(png(16 * i, 16, seed=i)) for i in (1, 2, 3)]

    _, [job] = say(card=SEVERAL, images=pictures)

    assert [one.size for one in job.arguments["image"]] == [(16, 16), (32, 16), (48, 16)]


def test_a_variation_in_json_needs_no_prompt() -> None:
    answer, [job] = say(VARIATIONS, image=url_of(png()))

    assert (answer.status_code, job.arguments["prompt"]) == (200, "")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_parameter", "image"),
        ({"images": []}, "missing_parameter", "image"),
        ({"images": [{"file_id": "file-1"}]}, "unsupported_parameter", "images"),
        ({"images": [{"url": "x"}]}, "invalid_value", "images"),
        ({"images": [7]}, "invalid_value", "images"),
        ({"images": ["x"]}, "invalid_value", "image"),
        ({"images": [{"image_url": "http://a/b.png"}]}, "unsupported_parameter", "image"),
        ({"images": [url_of(png())] * 2}, "invalid_value", "image"),
        ({"images": [url_of(png())], "mask": {"file_id": "x"}}, "unsupported_parameter", "mask"),
        ({"images": [url_of(png())], "mask": [url_of(mask())] * 2}, "invalid_value", "mask"),
        ({"images": [url_of(png())], "n": "2"}, "invalid_value", "n"),
        ({"images": [url_of(png())], "width": [64]}, "invalid_value", "width"),
        ({"images": [url_of(png())], "prompt": None}, "missing_parameter", "prompt"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_wrong_json_is_refused_by_name(body: dict[str, Any], code: str, param: str) -> None:
    answer, jobs = say(**body)

    told = refusal(answer)
    assert (told["code"], told["param"], jobs) == (code, param, [])


def test_an_index_or_a_key_in_the_name_of_a_picture_is_understood() -> None:
    worker = worker_of(SEVERAL)
    more: dict[str, Any] = {"image[1][image_url]": url_of(png(32, 16))["image_url"]}

    send([("image[0]", png(16, 16))], worker=worker, **more)

    [job] = worker.jobs
    assert {one.size for one in job.arguments["image"]} == {(16, 16), (32, 16)}


def test_the_document_tells_of_both_kinds_of_body_and_of_jobs() -> None:
    paths = shared_app().openapi()["paths"]

    for path in sorted(UPLOADS):
        content = paths[path]["post"]["requestBody"]["content"]
        form = content["multipart/form-data"]["schema"]
        in_json = content["application/json"]["schema"]
        has_reference = path in ("/v1/videos", "/v1/meshes")
        name = "input_reference" if has_reference else "image"
        assert name in form["properties"]
        assert (name if has_reference else "images") in in_json["properties"]
        for schema in (form, in_json):
            assert set(schema["required"]) <= schema["properties"].keys()
    for path in (EDITS, VARIATIONS, "/v1/images/generations"):
        assert "202" in paths[path]["post"]["responses"]
    edits = paths[EDITS]["post"]["requestBody"]["content"]
    assert edits["multipart/form-data"]["schema"]["required"] == ["prompt", "image"]
    assert edits["application/json"]["schema"]["required"] == ["prompt", "images"]
    assert "background_job" in edits["application/json"]["schema"]["properties"]


def test_large_bodies_are_taken_where_pictures_are() -> None:
    picture = "data:image/png;base64," + "A" * (2 << 20)
    content = json.dumps({"prompt": "a" * 32_001, "images": [{"image_url": picture}]})
    for path, code in ((EDITS, "invalid_value"), ("/v1/images/generations", "body_too_large")):
        told = refusal(ask(content, path, worker=worker_of(BOTH), max_body_bytes=1 << 20))
        assert told["code"] == code


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("n", "1_0"), ("n", "\u0664"), ("n", " 4"), ("n", "4 "), ("n", "+4"), ("n", "0x4"),
        ("n", "4.0"), ("seed", "9" * 5000), ("strength", "0_1"), ("strength", "\u0660.5"),
        ("strength", ".5"), ("strength", " 0.5"), ("strength", "nan"), ("strength", "Infinity"),
        ("timeout_s", "1_0"),
    ],
)  # fmt: skip
def test_a_number_in_a_form_is_one_that_json_would_take(name: str, text: str) -> None:
    worker = worker_of(BOTH)
    said: dict[str, Any] = {name: text}

    told = refusal(send([PICTURE], worker=worker, **said))

    assert (told["code"], told["param"], worker.jobs) == ("invalid_value", name, [])
    assert told["message"].startswith(f'{name}="')


def form_of(*parts: tuple[bytes, bytes]) -> httpx2.Response:
    """Send a form of these names and texts, byte by byte."""
    pieces = (b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % p for p in parts)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    return ask(b"".join(pieces) + b"--b--\r\n", EDITS, worker=worker_of(BOTH), headers=kind)


def test_a_form_is_utf_8() -> None:
    answers = [form_of((b"prompt", b"caf\xe9")), form_of((b"caf\xe9", b"a"))]
    for answer, seen in zip(answers, ("prompt in this form", "a name in this form"), strict=True):
        assert answer.status_code == 400
        assert refusal(answer)["message"] == f"{seen} is not UTF-8: send it so"

    worker = worker_of(BOTH)
    assert send([PICTURE], worker=worker, prompt="caf\u00e9 \u4e2d").status_code == 200
    assert worker.jobs[0].arguments["prompt"] == "caf\u00e9 \u4e2d"


@pytest.mark.parametrize("count", [2, 17, 18, 40])
def test_too_many_pictures_are_counted_by_what_the_model_takes(count: int) -> None:
    told = refusal(send([PICTURE] * count))

    assert (told["code"], told["param"]) == ("invalid_value", "image")
    assert "grey takes at most 1" in told["message"]


def test_a_form_of_too_many_texts_is_refused_with_how_many_may_be() -> None:
    many: dict[str, Any] = {f"x{i}": "1" for i in range(200)}

    told = refusal(send([PICTURE], **many))

    assert (told["code"], told["message"]) == ("invalid_value", "the form has more than 100 texts")


@pytest.mark.parametrize("path", sorted(UPLOADS))
def test_an_empty_body_is_called_empty(path: str) -> None:
    told = refusal(ask(b"", path))

    assert told["code"] == "invalid_json"
    assert told["message"] == "the body is empty: send a form, or a JSON object"


def test_a_form_may_repeat_prompts_in_brackets_and_each_is_an_output_of_its_own() -> None:
    worker = worker_of(BOTH)
    prompts = [("prompt[]", "a cat"), ("prompt[]", "7"), ("prompt[]", "null")]
    more = [("negative_prompt[]", one) for one in ("dim", "[1]", "true")]

    answer = send_parts([*prompts, *more, ("seed", "5")], worker)

    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 3
    asked = [(one.arguments["prompt"], one.arguments["negative_prompt"]) for one in worker.jobs]
    assert asked == [("a cat", "dim"), ("7", "[1]"), ("null", "true")]
    assert [one.seed for one in worker.jobs] == [5, 6, 7]


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([("prompt", "a"), ("prompt", "b")], "prompt", "prompt is given twice"),
        ([("prompt[]", "a"), ("prompt", "b")], "prompt", "prompt is given twice"),
        ([("prompt", "a"), ("prompt[]", "b")], "prompt", "prompt is given twice"),
        ([("prompt", "a"), ("lora", "[1]"), ("lora[][id]", "b")], "lora", "lora is given twice"),
        (
            [("prompt[]", "a"), ("prompt[]", "b"), ("negative_prompt[]", "c")],
            "negative_prompt",
            "prompt has 2 entries and negative_prompt 1",
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(
    parts: list[tuple[str, str]], param: str, said: str
) -> None:
    worker = worker_of(BOTH)

    told = refusal(send_parts(parts, worker))

    assert (told["code"], told["param"], worker.jobs) == ("invalid_value", param, [])
    assert said in told["message"]


def send_parts(parts: list[tuple[str, str]], worker: Any) -> httpx2.Response:
    """Send a form of a picture and these texts, in their order, names as often as they come."""
    pieces = [
        f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()
        for name, text in parts
    ]
    head = b'--b\r\ncontent-disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    body = head + png() + b"\r\n" + b"".join(pieces) + b"--b--\r\n"
    return ask(body, EDITS, worker=worker, headers=kind)
