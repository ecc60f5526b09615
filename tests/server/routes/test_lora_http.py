"""Adapters over HTTP: registered when the server starts, named by requests, never by path."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from PIL import Image

from support.engine_driver import fresh
from support.lora_files import adapter
from support.pictures import ALIKE, gap, picture
from support.server_process import DRAW, MODEL_ID, SIZE, Server, serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
CHOICES: list[list[dict[str, Any]]] = [
    [{"id": "one"}],
    [{"id": "two", "scale": 0.5}],
    [{"id": "one", "scale": -0.7}, {"id": "two"}],
    [],
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {"one": adapter(folder, "flux", 1), "two": adapter(folder, "flux", 2)}


@pytest.fixture(scope="module")
def server(files: dict[str, Path]) -> Iterator[Server]:
    flags = [flag for name, path in files.items() for flag in ("--lora", f"{name}={path}")]
    with serving(*flags) as server:
        yield server


def alone(files: dict[str, Path], lora: list[dict[str, Any]], seed: int) -> Image.Image:
    """The picture that plain diffusers draws with these adapters."""
    pipe = fresh("flux")
    pipe.set_progress_bar_config(disable=True)
    for one in lora:
        file = files[one["id"]]
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=one["id"])
    if lora:
        pipe.set_adapters([one["id"] for one in lora], [one.get("scale", 1.0) for one in lora])
    arguments = {**DRAW, "width": SIZE[0], "height": SIZE[1]}
    chance = torch.Generator().manual_seed(seed)
    image = pipe("a red circle", **arguments, generator=chance).images[0]
    assert isinstance(image, Image.Image)
    return image


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_clients_with_different_adapters_each_get_their_own_picture(
    server: Server, files: dict[str, Path]
) -> None:
    def draw(seed: int) -> httpx2.Response:
        return server.draw(seed=seed, lora=CHOICES[seed])

    with ThreadPoolExecutor(len(CHOICES)) as clients:
        answers = list(clients.map(draw, range(len(CHOICES))))

    for seed, (answer, lora) in enumerate(zip(answers, CHOICES, strict=True)):
        assert answer.status_code == 200, answer.text
        drawn = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        assert gap(drawn, alone(files, lora, seed)) <= ALIKE
        if lora:
            assert gap(drawn, alone(files, [], seed)) > 10


def test_the_model_says_which_adapters_it_has_and_not_where(server: Server) -> None:
    answer = server.get(f"/v1/models/{MODEL_ID}")

    assert answer.json()["lora"] == ["one", "two"]
    assert ".safetensors" not in answer.text


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ([{"id": "tow"}], "did you mean 'two'"),
        ([{"id": "../one"}], "no adapter '../one'"),
        ([{"id": "one", "path": "/etc"}], 'must be {"id": NAME'),
        ("one", "must be a list"),
        ([{"id": "one", "scale": "much"}], "scale 'much'"),
    ],
)
def test_what_is_no_adapter_is_refused_with_the_rule(server: Server, lora: Any, said: str) -> None:
    answer = server.draw(lora=lora)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora"
    assert said in answer.json()["error"]["message"]
