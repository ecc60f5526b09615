"""The ComfyUI node, loaded as ComfyUI loads it, against a server on a loopback port."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.app import Grey
from support.forms import BOTH, worker_of
from support.running import Running

FILE = Path(__file__).parents[2] / "clients" / "comfyui" / "__init__.py"


@pytest.fixture(scope="module")
def node() -> Any:
    spec = importlib.util.spec_from_file_location("carpool_comfyui", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS["CarpoolDraw"]()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Grey, str]]:
    worker = worker_of(BOTH)
    with Running(worker) as url:
        yield worker, url


def test_the_node_draws_from_a_text(node: Any, running: tuple[Grey, str]) -> None:
    worker, url = running

    (images,) = node.draw(
        url, "a cat", 7, 2, negative_prompt="dogs", width=32, height=48, steps=3,
        more='{"true_cfg_scale": 2.0}',
    )  # fmt: skip

    assert (images.shape, images.dtype) == ((2, 16, 16, 3), torch.float32)
    assert torch.allclose(images, torch.full_like(images, 128 / 255))
    assert [job.seed for job in worker.jobs[-2:]] == [7, 8]
    assert worker.jobs[-1].arguments == {
        "prompt": "a cat", "negative_prompt": "dogs", "width": 32, "height": 48,
        "num_inference_steps": 3, "true_cfg_scale": 2.0,
    }  # fmt: skip


def test_the_node_draws_anew_where_the_mask_is_one(node: Any, running: tuple[Grey, str]) -> None:
    worker, url = running
    image, mask = torch.rand(1, 64, 64, 3), torch.zeros(1, 64, 64)
    mask[:, :, 32:] = 1

    node.draw(url, "a cat", 1, 1, strength=0.5, image=image, mask=mask)

    arguments = worker.jobs[-1].arguments
    sent = np.asarray(arguments["image"], dtype=np.float32) / 255
    assert np.abs(sent - image[0].numpy()).max() < 1 / 255
    white = [arguments["mask_image"].getpixel((x, 32)) for x in (2, 60)]
    assert (white, arguments["strength"]) == ([0, 255], 0.5)


def test_the_inputs_are_those_of_the_function(node: Any) -> None:
    kinds = node.INPUT_TYPES()
    names = [*kinds["required"], *kinds["optional"]]
    code = type(node).draw.__code__

    assert names == list(code.co_varnames[1 : code.co_argcount])


def test_the_node_says_what_the_server_says(node: Any, running: tuple[Grey, str]) -> None:
    with pytest.raises(RuntimeError, match="num_inference_steps=100000"):
        node.draw(running[1], "a", 1, 1, steps=100_000)
    with pytest.raises(RuntimeError, match="more must be a JSON object"):
        node.draw(running[1], "a", 1, 1, more="[")
    with pytest.raises(RuntimeError, match="no server answers"):
        node.draw("http://127.0.0.1:9", "a", 1, 1)
    with pytest.raises(RuntimeError, match="is no server"):
        node.draw("file:///etc", "a", 1, 1)
