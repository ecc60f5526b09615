"""Whatever a body, a path or a header says: it is refused in a sentence, or drawn as it stands."""

import base64
import io
import json
import logging
from typing import Any

import pytest
from PIL import Image

from carpool.config import ServeSettings
from carpool.server.bodies.json_bodies import read
from support.app import Grey, ask, refusal, shared_app
from support.endpoints import ENDPOINT
from support.pictures import read_settings

POSTS = sorted(
    path.replace("{video_id}", "video_1")
    for path, methods in shared_app().openapi()["paths"].items()
    if "requestBody" in methods.get("post", {})
)


def body(**said: Any) -> str:
    return json.dumps({"prompt": "a red circle", "seed": 1, **said})


def raw(said: str) -> str:
    """A body with more in it, as it is written."""
    return body()[:-1] + f", {said}}}"


# JSON


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (raw('"seed": 2'), "has 'seed' twice: send it once"),
        (raw('"prompt": "a red circle"'), "has 'prompt' twice"),
        (raw('"\\u0073eed": 2'), "has 'seed' twice"),
        (raw('"lora": [{"id": "outlined", "scale": 1, "id": "outlined"}]'), "has 'id' twice"),
        (raw('"x\\ud800": 1, "x\\ud800": 1'), "has 'x\\ud800' twice"),
        (raw(f'"x": {"[" * 40}{"]" * 40}'), "nests lists or objects more than 32 deep"),
        (raw(f'"seed": {"9" * 5000}'), "a number of too many digits"),
        (raw(f'"x": -{"9" * 5000}'), "a number of too many digits"),
        ("\ufeff" + body(), "the body is not JSON: Unexpected UTF-8 BOM"),
        (raw(f'"{"x" * 201}": 1'), "a key of more than 200 characters"),
        (body().encode("utf-16"), "it is not UTF-8"),
        (body().encode("utf-32"), "it is not"),
        (b'{"prompt": "\xed\xa0\x80"}', "it is not UTF-8"),
        (b'{"prompt": "\xc0\x80"}', "it is not UTF-8"),
        ("", ""),
        (b"prompt=a", "is not JSON"),
        ("null", "not a JSON object"),
        (body() + body(), "is not JSON: Extra data"),
        (body() + "\0", "is not JSON: Extra data"),
        (body()[:-1], "is not JSON"),
        ("{'prompt': 'a'}", "is not JSON"),
        ('{"prompt": "a", }', "is not JSON"),
        ('{"prompt": "a" /* b */}', "is not JSON"),
        ('{"prompt": "a\nb"}', "is not JSON: Invalid control character"),
        ('{"prompt": "a\0b"}', "is not JSON: Invalid control character"),
        ('{"seed": 0x10}', "is not JSON"),
        ('{"seed": 01}', "is not JSON"),
        ("[]", "not a JSON object"),
        ("NaN", "not a JSON object"),
    ],
    ids=lambda value: f"{value[:30]!r}",
)
def test_a_body_that_is_no_plain_json_object_is_refused(content: str | bytes, says: str) -> None:
    for path in POSTS:
        told = refusal(ask(content, path))
        assert told["code"] == "invalid_json", path
        assert path != ENDPOINT or says in told["message"]


def test_nesting_is_counted_in_lists_and_objects_alike() -> None:
    assert read(("[" * 32 + "]" * 32).encode()) is not None
    assert read(b'{"a":' * 31 + b'["[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["]' + b"}" * 31)
    assert read(b"[" + b"[]," * 9999 + b"[]]") == [[]] * 10_000


# Fields


WRONG: dict[str, dict[str, list[str]]] = {  # JSON, by the field and a part of the message
    "num_inference_steps": {
        "from 1 to 100": ["0", "-1", "101", "1000000000"],
        "a whole number": ["1e9", "2.5", '"50"', "true", "[5]", "{}", "NaN", "4.0", "-0.0"],
    },
    **{
        name: {"a finite number of at most 3.4e38": ["1e308", "1e39", "NaN", '"3"', "true"]}
        for name in ("guidance_scale", "true_cfg_scale", "strength")
    },
    **{
        name: {"seconds above 0": ["0", "-1", "Infinity", "1e309", '"1"', "true", "9" * 400]}
        for name in ("timeout_s", "deadline_s")
    },
    "sigmas": {"a list of finite numbers": ["[NaN]", "[true]", "[[1]]", '["1"]', "{}"]},
    "seed": {"from 0 to 2**63 - 1": ["-1", str(2**63), "1.0", '"1"', "NaN", "false"]},
    "n": {"from 1 to 10": ["0", "-1", "11", "1.0", "NaN", '"1"', "true", "9" * 400]},
    "priority": {"from -10 to 10": ["11", "-11", "0.5", "NaN", '"1"']},
    "num_frames": {"at least 1": ["0", "-1"], "a whole number": ["1.5", '"9"']},
    "clip_skip": {"true or false": ["0", '"true"', "[]"]},
    "output_compression": {
        "less than or equal to 100": ["101"], "": ["-1", "NaN", "1e309"], "jpeg": ["50"],
    },
    "size": {
        "write WIDTHxHEIGHT": ['""', '"big"', '"64x"', '"-64x64"', '"64X64"', '"64 x 64"'],
        "the nearest size is": ['"0x0"', '"1x1"', '"65x64"', '"8191x64"'],
        "the limit is": ['"16384x16384"'],
        "": ["64", '"64x64\\n"', '"64x64x64"', '"99999999x16"', '"2147483648x64"', '"\\udfff"'],
        "not both": ['"64x64", "width": 64'],
    },
    "lora": {"": [f'[{{"id": "outlined", "scale": {v}}}]' for v in ("NaN", "1e309", '"1"')]},
    "prompt": {
        "a valid string": ["5", "1", "{}", '"\\ud800"', '["a", 5]', '["a", ["b"]]', '["\\ud800"]'],
        "every request needs one": ["null"],
        "an empty list": ["[]"],
        "at most 32000 characters": [json.dumps("a" * 32_001), json.dumps(["a", "a" * 1_000_000])],
        "at most 10 in one request, which is 10 prompts": [json.dumps(["a"] * 11)],
    },
    "negative_prompt": {
        "one string": ['["a", "b"]', "5", '[["a"]]'],
        "without lone surrogates": ['"\\ud800"', '["\\ud800"]'],
        "32000": [json.dumps("a" * 32_001), json.dumps("a" * 1_000_000)],
    },
    "user": {"a valid string": ['"\\ud800"']},
    "output_format": {"'png', 'jpeg' or 'webp'": ['"gif"'], "": ['"\\ud800"']},
    "quality": {"must be 'auto'": ['"best"']},
    "background": {"opaque": ['"transparent"']},
    "partial_images": {"less than or equal to 3": ["4"]},
    "style": {"not supported": ['"vivid"'], "": ['"\\ud800"']},
    "latents": {"cannot be sent as JSON": ["[0.5]", '{"mask": 1}']},
    "generator": {"pass seed": ["1"]},
    "num_steps": {"did you mean 'num_inference_steps'": ["4"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rule", "value"),
    [(name, rule, one) for name in WRONG for rule, values in WRONG[name].items() for one in values],
    ids=lambda text: text[:20],
)
def test_a_wrong_value_is_refused_by_name_and_rule(name: str, rule: str, value: str) -> None:
    own = {key: said for key, said in {"prompt": "a", "seed": 1}.items() if key != name}
    answer = ask(json.dumps(own)[:-1] + f', "{name}": {value}}}')
    told = refusal(answer)
    assert (answer.status_code, told["param"]) == (400, name)
    assert rule in told["message"]


@pytest.mark.parametrize("side", [0, 1, -16, 8191, 2**31, 2**62, 2**64, 64.0, "64"])
def test_a_side_that_no_picture_has_is_refused(side: Any) -> None:
    assert refusal(ask(body(width=side, height=64)))["param"] in ("size", "width")


# Text

TEXTS = {
    "empty": "",
    "blank": " \t\n",
    "NUL": "a\0b",
    "control": "".join(map(chr, range(32))) + "\x7f\x85",
    "escapes": "\x1b[2J\x1b]0;title\x07",
    "right to left": "\u202ea red circle\u202c \u2066x\u2069 עיגול",
    "no width": "r\u200be\u200cd\u200d \ufeffc\u2060ircle",
    "emoji": "👩‍👩‍👧‍👦" * 500,
    "stacked": "e" + "\u0301" * 10_000,
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "private": "\ue000\U000f0000",
    "line ends": "a\r\nb\u2028c\u2029d",
    "longest": "熊" * 32_000,
    "markup": "<script>alert(1)</script> ${jndi:x} {{7*7}} %s %n '; DROP TABLE jobs; --",
    "path": "../../etc/passwd\0.png",
    "JSON": '{"prompt": "b"}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("format_", ["png", "jpeg", "webp"])
def test_any_text_reaches_the_worker_as_it_was_sent(text: str, format_: str) -> None:
    worker = Grey()
    content = body(prompt=text, negative_prompt=text, output_format=format_, user=text[:256])

    answer = ask(content, worker=worker, metadata_prompt=True)

    assert answer.status_code == 200
    [job] = worker.jobs
    assert (job.arguments["prompt"], job.arguments["negative_prompt"]) == (text, text)
    picture = base64.b64decode(answer.json()["data"][0]["b64_json"])
    assert Image.open(io.BytesIO(picture)).size == (16, 16)
    if format_ == "png":
        assert read_settings(picture)["prompt"] == text


@pytest.mark.parametrize(
    "said", ['"\\ud800": 1', '"model": "\\ud800"', '"lora": [{"id": "\\ud800"}]']
)
def test_half_a_character_is_refused_in_a_name_too(said: str) -> None:
    refusal(ask(raw(said)))


# Names, ids and paths

TRAVERSALS = ["../../x", "/etc/passwd", "..\\..\\x", "\\\\host\\share\\x", "x\0.safetensors",
              "file:///x", "~/x", "outlined/../outlined", "", ".", "..", "con",
              "a" * 5000]  # fmt: skip


@pytest.mark.parametrize("name", TRAVERSALS)
def test_an_adapter_is_never_a_path(name: str) -> None:
    assert refusal(ask(body(lora=[{"id": name}])))["param"] == "lora"


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_model_is_never_a_path(name: str) -> None:
    assert refusal(ask(body(model=name)))["code"] == "model_not_found"


@pytest.mark.parametrize(
    "name", ["output_path", "save_path", "file_name", "trust_remote_code", "revision", "tenant",
             "self", "request_id", "a" * 200, "__class__", "prompt_embeds", "latents", "callback",
             "", "\0"]
)  # fmt: skip
@pytest.mark.parametrize("value", ["../../x", {"__reduce__": ["os.system", "true"]}])
def test_nothing_can_be_said_that_the_pipeline_does_not_take(name: str, value: Any) -> None:
    told = refusal(ask(body(**{name: value})))

    assert told["code"] in ("unknown_parameter", "unsupported_parameter")


@pytest.mark.parametrize(
    "path",
    ["/v1/models/../../etc/passwd", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2f..",
     "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/" + "a" * 60_000, "/v1/models/..%5c..%5cx",
     "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1//models", "/v1/models/grey/", "/..;/x",
     "/docs/../../x", "/v1/models/grey%00", "/v1/models/%E2%80%AE",
     "/v1/jobs/..", "/v1/jobs/%2e%2e%2fx", "/v1/jobs/%00", "/v1/jobs/..%2f..%2fetc%2fpasswd",
     "/v1/jobs/x/files/../../../etc/passwd", "/v1/jobs/x/files/..%2f..%2f..%2fetc%2fpasswd",
     "/v1/jobs/..%2f../files/passwd", "/v1/jobs/..%5c..%5cx/files/x", "/v1/jobs/" + "a" * 60_000,
     "/v1/videos/../content", "/v1/videos/..%2f..%2fetc/content", "/v1/videos/%00/content",
     "/v1/videos/x/content?variant=../x", "/v1/videos/'%20OR%201=1%20--", "/v1/jobs/%ED%A0%80"],
)  # fmt: skip
def test_a_path_that_leads_nowhere_is_not_found(path: str) -> None:
    answer = ask(b"", path, method="GET")

    assert "root:" not in answer.text
    refusal(answer)
    assert answer.status_code == (400 if "variant=" in path else 404)


# Bodies of other kinds

BOUNDARY = {"content-type": "multipart/form-data; boundary=x"}


def part(disposition: str, content: str = "a", more: str = "") -> str:
    return f"--x\r\ncontent-disposition: {disposition}\r\n{more}\r\n{content}\r\n"


FORMS = {
    "empty": "",
    "no end": part('form-data; name="prompt"'),
    "no name": part("form-data") + "--x--\r\n",
    "no disposition": "--x\r\n\r\na\r\n--x--\r\n",
    "no colon": "--x\r\nno-header",
    "empty name": part('form-data; name=""') + "--x--\r\n",
    "wrong boundary": part('form-data; name="prompt"').replace("--x", "--y"),
    "ten thousand fields": "".join(part(f'form-data; name="f{i}"') for i in range(10_000))
    + "--x--",
    "the same field again": part('form-data; name="prompt"') * 5000 + "--x--\r\n",
    "five thousand files": part('form-data; name="image"; filename="a.png"') * 5000 + "--x--\r\n",
    "long header": part('form-data; name="prompt"', more=f"x: {'a' * 500_000}\r\n") + "--x--\r\n",
    "many headers": part('form-data; name="prompt"', more="x: y\r\n" * 50_000) + "--x--\r\n",
    "path": part('form-data; name="image"; filename="../../etc/passwd"') + "--x--\r\n",
    "NUL": part('form-data; name="a\0"; filename="\0"', "\0") + "--x--\r\n",
    "nested": part('form-data; name="a"', more="content-type: multipart/mixed; boundary=x\r\n"),
    "charset": part('form-data; name="_charset_"', "utf-7") + "--x--\r\n",
    "base64": part('form-data; name="prompt"', "!", "content-transfer-encoding: base64\r\n"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_form_that_is_none_is_refused(form: str) -> None:
    for path in POSTS:
        refusal(ask(form, path, headers=BOUNDARY))


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "application/x-pickle", "", "multipart",
     "multipart/form-data", "multipart/form-data; boundary=", "application/json; charset=utf-16",
     "multipart/form-data; boundary=" + "x" * 5000, "application/xml", "\xff"],
)  # fmt: skip
def test_another_type_of_body_is_refused(kind: str) -> None:
    content = body().encode("utf-16" if "utf-16" in kind else "utf-8")
    for path in POSTS:
        refusal(ask(content, path, headers={"content-type": kind.encode("latin-1")}))


@pytest.mark.parametrize("kind", ["octet-stream", "json", "x-pickle"])
def test_a_pickle_is_never_loaded(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    pickled = b"cos\nsystem\n(S'echo loaded'\ntR."
    for path in POSTS:
        refusal(ask(pickled, path, headers={"content-type": f"application/{kind}"}))

    assert "loaded" not in capfd.readouterr().out


# What files and logs say

SECRET = "a very private prompt"


@pytest.mark.parametrize(
    ("settings", "has_prompt", "has_seed"),
    [
        ({}, False, True),
        ({"metadata_prompt": True}, True, True),
        ({"metadata": False}, False, False),
        ({"metadata": False, "metadata_prompt": True}, False, False),
    ],
)
def test_pictures_say_prompts_only_where_that_is_asked_for(
    settings: dict[str, Any], has_prompt: bool, has_seed: bool
) -> None:
    answer = ask(body(prompt=SECRET, negative_prompt=SECRET), **settings)
    picture = base64.b64decode(answer.json()["data"][0]["b64_json"])

    assert (SECRET.encode() in picture) is has_prompt
    assert ("seed" in read_settings(picture)) is has_seed
    assert (b"trainedAlgorithmicMedia" in picture) is has_seed


def test_prompts_are_not_logged_however_a_request_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    assert ask(body(prompt=SECRET)).status_code == 200
    wrong: list[dict[str, Any]] = [
        {"prompt": [SECRET, 1]}, {"negative_prompt": [[SECRET]]}, {"x": SECRET}, {"model": SECRET},
    ]  # fmt: skip
    for said in (*wrong, {"prompt": SECRET, "n": 0}):
        refusal(ask(body(**said)))
    refusal(ask(body(prompt=SECRET)[:-1]))

    assert SECRET not in caplog.text


def test_risky_things_are_off_unless_asked_for() -> None:
    settings = ServeSettings()

    assert settings.host == "127.0.0.1"
    assert settings.allow_remote_media is False
    assert settings.metadata_prompt is False


def test_more_pictures_than_the_server_ever_holds_are_refused_for_good() -> None:
    told = refusal(ask(json.dumps({"prompt": "a", "n": 4}), max_running=2, max_queue=1))

    assert "from 1 to 3" in told["message"]
