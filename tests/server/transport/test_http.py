"""HTTP without an SDK: every answer has an id, every refusal has OpenAI's shape, none is a 500."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from carpool.server.compat.automatic1111.routes import EMPTY_LISTS
from support.endpoints import ENDPOINT
from support.server_process import Server, body, serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
NAME = "our/model"
KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with serving(*flags, "--served-model-name", NAME) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with server.client(headers=bearer(KEYS[0])) as client:
        yield client


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def post(client: httpx2.Client, content: Any, **headers: str) -> httpx2.Response:
    headers = {"content-type": "application/json", **headers}
    return client.post(ENDPOINT, content=content, headers=headers)


def refusal(answer: httpx2.Response) -> dict[str, Any]:
    """The error in an answer, once its shape is known to be right."""
    assert answer.status_code < 500, answer.text
    return error(answer)


def error(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code >= 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert int(answer.headers["openai-processing-ms"]) >= 0
    told: dict[str, Any] = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert told["message"]
    return told


# What is served beside pictures


def test_health_life_and_version_need_no_key(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ready"}
    assert server.get("/livez").json() == {"status": "alive"}
    versions = server.get("/version").json()
    assert {"carpool", "torch", "diffusers", "transformers"} <= versions.keys()


def test_the_openapi_document_has_every_route_and_the_shape_of_errors(server: Server) -> None:
    document = server.get("/openapi.json").json()

    paths = {ENDPOINT, "/v1/models", "/v1/models/{model}", "/health", "/livez", "/version"}
    paths |= {"/stats", "/metrics", "/v1/requests/{request_id}", "/v1/files/{file_id}"}
    paths |= {"/v1/files/{job_id}/{name}", "/sdapi/v1/embeddings"}
    paths |= {"/v1/images/edits", "/v1/images/variations", "/v1/jobs", "/v1/jobs/{job_id}"}
    paths |= {"/v1/jobs/{job_id}/cancel", "/v1/jobs/{job_id}/files/{name}", "/v1/videos"}
    paths |= {f"/v1/videos/{{video_id}}{more}" for more in ("", "/content", "/remix")}
    paths |= {f"/v1/meshes{more}" for more in ("", "/{mesh_id}", "/{mesh_id}/content")}
    paths |= {"/v1/audio/generations"}
    paths |= {"/", "/v1/chat/completions", "/v1/videos/sync", "/v1/model_info", "/model_info"}
    paths |= {"/server_info", "/health_generate", "/v1/events", "/v1/estimates"}
    paths |= {f"/v1/{name}" for name in ("set_lora", "list_loras", "unmerge_lora_weights")}
    paths |= {f"/sdapi/v1/refresh-{what}" for what in ("loras", "checkpoints")}
    names = "txt2img img2img progress interrupt skip options sd-models samplers schedulers loras"
    paths |= {f"/sdapi/v1/{name}" for name in [*names.split(), *EMPTY_LISTS]}
    assert document["paths"].keys() == paths
    responses = document["paths"][ENDPOINT]["post"]["responses"]
    for status in ("400", "401", "404", "413", "429", "500", "503", "504"):
        schema = responses[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/Error"}
    required = document["components"]["schemas"]["ErrorBody"]["required"]
    assert set(required) == {"message", "type", "param", "code"}


def test_each_key_opens_and_no_other_does(server: Server) -> None:
    for key, status in [*((key, 200) for key in KEYS), ("third-key", 401)]:
        with server.client(headers=bearer(key)) as client:
            assert client.get("/v1/models").status_code == status
            assert client.get("/stats").status_code == status


def test_the_model_goes_by_the_name_it_was_given(client: httpx2.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [NAME]
    assert client.get(f"/v1/models/{NAME}").json()["id"] == NAME
    for name in (NAME, "flux", None):  # its own id, too, as the peers' clients send it
        assert client.post(ENDPOINT, json=body(model=name)).json()["model"] == NAME
    assert refusal(client.post(ENDPOINT, json=body(model="sdxl")))["code"] == "model_not_found"


# Bodies that are no requests


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_an_oversized_body_is_refused(client: httpx2.Client, is_chunked: bool) -> None:
    size = 20 << 20
    pieces = (b" " * min(1 << 16, size - at) for at in range(0, size, 1 << 16))

    answer = post(client, pieces if is_chunked else b" " * size)

    assert answer.status_code == 413
    assert refusal(answer)["code"] == "body_too_large"


# Requests that are wrong in one place


def wrong(rule: str, *values: Any) -> list[Any]:
    """Cases for one parameter: `rule` is its name, a colon, and a part of the message."""
    name, message = rule.split(": ")
    return [pytest.param(name, value, message, id=f"{name}={value!r:.20}") for value in values]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *wrong("num_inference_steps: from 1 to 1000", 0, -1, 1001),
        *wrong("num_inference_steps: a whole number", 2.5, "50", True, [5], 2**70, 10**400),
        *wrong(
            "guidance_scale: a finite number of at most 3.4e38", 1e308, float("nan"), float("inf"),
            "3", True, 10**400,
        ),
        *wrong("sigmas: a list of finite numbers", [float("nan")], [True], 1.0, "1.0"),
        *wrong("seed: from 0 to 2**63 - 1", -1, 2**63, 2**64, 1.5, "1", True),
        *wrong("n: from 1 to 10", 0, 11, -1, 1.0, "1", True),
        *wrong("timeout_s: seconds above 0", 0, -1, float("inf"), "1", True, 10**400),
        *wrong("prompt: must be a valid string", 5, "\ud800"),
        *wrong("prompt: every request needs one", None),
        *wrong("prompt: an empty list", []),
        *wrong("prompt: must be a valid string", ["a", 5], ["a", ["b"]], ["\ud800"]),
        *wrong("prompt: at most 32000 characters", ["a", "a" * 40_000]),
        *wrong("prompt: at most 10 in one request, which is 10 prompts", ["a"] * 11),
        *wrong("prompt: at most 32000 characters", "a" * 40_000),
        *wrong("negative_prompt: one string", ["a", "b"], 5),
        *wrong("negative_prompt: without lone surrogates", ["\ud800"]),
        *wrong("negative_prompt: without lone surrogates", "\ud800"),
        *wrong("user: must be a valid string", "\ud800"),
        *wrong("output_compression: less than or equal to 100", 101),
        *wrong("style: not supported", "vivid"),
        *wrong("self: no parameter 'self'", 1),
        *wrong("request_id: no parameter 'request_id'", 1, "mine"),
        *wrong("latents: cannot be sent as JSON", {"mask": 1}, [1]),
        *wrong("joint_attention_kwargs: use lora", {"scale": 1}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name_and_rule(
    client: httpx2.Client, name: str, value: Any, message: str
) -> None:
    answer = post(client, json.dumps(body(**{name: value})))

    assert answer.status_code == 400
    told = refusal(answer)
    assert told["param"] == name
    assert message in told["message"]
    assert len(told["message"]) < 300


@pytest.mark.parametrize("width", [0, -64, 3])
def test_a_wrong_width_is_refused_as_a_size(client: httpx2.Client, width: int) -> None:
    told = refusal(client.post(ENDPOINT, json=body(size=None, width=width, height=64)))

    assert (told["param"], told["code"]) == ("size", "size_not_supported")


def test_a_width_that_the_pipeline_rounds_down_is_drawn_and_told(client: httpx2.Client) -> None:
    told = client.post(ENDPOINT, json=body(size=None, width=65, height=64)).json()

    assert told["size"] == "64x64"
    assert told["warnings"] == ["size 65x64 was rounded down to 64x64, multiples of 4"]


def test_sigmas_are_steps_too(client: httpx2.Client) -> None:
    many = [1 - i / 2000 for i in range(2000)]

    assert client.post(ENDPOINT, json=body(sigmas=many, timeout_s=0.2)).status_code == 400


def test_size_and_width_exclude_each_other(client: httpx2.Client) -> None:
    assert "not both" in refusal(client.post(ENDPOINT, json=body(width=64)))["message"]


def test_a_prompt_is_needed(client: httpx2.Client) -> None:
    told = refusal(client.post(ENDPOINT, json={"n": 1}))

    assert (told["code"], told["param"]) == ("missing_parameter", "prompt")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nope"), ("HEAD", "/nope"), ("POST", "/v1/nope"), ("GET", "/%ff")],
)
def test_unknown_paths_are_not_found(client: httpx2.Client, method: str, path: str) -> None:
    answer = client.request(method, path)

    assert answer.status_code == 404
    assert method == "HEAD" or refusal(answer)["code"] == "not_found"


# Ids


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [(b"abc-1.X:2_3", True), (b"x" * 128, True), (b"x" * 129, False), (b"two words", False),
     (b"\xc3\xa9", False), (b"", False)],
)  # fmt: skip
def test_the_clients_own_request_id_is_kept_if_it_is_sane(
    server: Server, sent: bytes, is_kept: bool
) -> None:
    with server.client(headers={"x-request-id": sent}) as client:
        [got] = client.get("/health").headers.get_list("x-request-id")

    assert (got == sent.decode()) if is_kept else got.startswith("req-")
