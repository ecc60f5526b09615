"""Kinds of people's own code behind `carpool serve --pipeline`: four clients at once."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.custom.base import REQUESTS
from support.custom.harness import TESTS
from support.custom.judge import plain
from support.custom.kinds import KINDS
from support.custom.wrong import WRONG
from support.endpoints import ENDPOINT
from support.server_process import Server, serving

FILE = f"""
import sys

sys.path.append({str(TESTS)!r})
from support.custom.kinds import KINDS


def build():
    return KINDS[NAME].build()[0]
"""
LONG = [{**request, "num_inference_steps": 40 + i} for i, request in enumerate(REQUESTS)]
NAMES = [
    "a counter on self", "torch.randn", "a hook that is added and removed in each call",
    "a class attribute", "a counter in a net's buffer",
    "DeepCache: a helper that wraps forward of the net and a block",
    "autocast around one request's calls", "a lock over each call", "asyncio.run around each call",
]  # fmt: skip


def drawn(server: Server, request: dict[str, Any]) -> Any:
    with server.client(timeout=20) as client:
        answer = client.post(ENDPOINT, json=request)
    assert answer.status_code == 200, answer.text
    picture = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return np.asarray(Image.open(io.BytesIO(picture))).astype(int)


def drawn_alone(name: str, request: dict[str, Any]) -> Any:
    """The same in plain diffusers, as `Custom.shown` makes a picture of it."""
    values = plain(*KINDS[name].build(), request)[0].transpose(1, 2, 0)
    return (np.clip(values / 4 + 0.5, 0, 1) * 255).round().astype(int)


def case(name: str) -> Any:
    xfail = pytest.mark.xfail(reason=WRONG.get(name, ""), strict=True)
    return pytest.param(name, marks=[xfail, pytest.mark.slow] if name in WRONG else [])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", map(case, NAMES))
def test_four_clients_of_a_pipeline_of_ones_own_get_what_it_draws(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace("NAME", repr(name)))
    with (
        serving("--pipeline", f"{file}:build", model="") as server,
        ThreadPoolExecutor(len(LONG)) as clients,
    ):
        pictures = list(clients.map(lambda request: drawn(server, request), LONG))

    gaps = [
        int(np.abs(picture - drawn_alone(name, request)).max())
        for request, picture in zip(LONG, pictures, strict=True)
    ]
    assert max(gaps) <= 1, gaps
