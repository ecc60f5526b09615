"""Two tenants of a real server: whatever the one sends, the other is served, and memory is bounded.

Each attack lasts half a second, from a few connections.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image

from support.endpoints import EDITS, ENDPOINT
from support.pictures import saved
from support.server_process import Server, body, serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
ATTACKED_S = 0.5
MOST_S = 2.0  # of a picture that takes 30 ms when nothing else happens, on any machine
MOST_MIB = 300
JPEG, PNG = "JPEG", "PNG"


def form(content: bytes) -> tuple[bytes, str]:
    """A form with a picture, and its type."""
    fields = {"prompt": "a", "size": "64x64", "num_inference_steps": "1"}
    files = {"image": ("a", content)}
    request = httpx2.Request("POST", "http://x", data=fields, files=files)
    return request.read(), request.headers["content-type"]


def fill() -> tuple[bytes, str]:
    small = saved(Image.new("RGB", (64, 64)), JPEG)
    return form(small[:-2] + b"\xff" * (30 << 20) + small[-2:])


def deep() -> tuple[bytes, str]:
    return form(saved(Image.fromarray(np.zeros((5656, 5656), np.uint16)), PNG))


def large() -> tuple[bytes, str]:
    return form(saved(Image.new("RGB", (5656, 5656)), JPEG))


def objects() -> tuple[bytes, str]:
    return b'{"prompt": "a", "images": [' + b"{}," * (20 << 20) + b"{}]}", "application/json"


def values() -> tuple[bytes, str]:
    said = {"prompt": "a", "x": [[]] * 4990, "y": '"' * 400_000}
    return json.dumps(said).encode(), "application/json"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", "hostile=h", "--api-key", "other=o", "--state-dir", "none") as server:
        yield server


@pytest.mark.parametrize("attack", [fill, deep, large, objects, values])
def test_another_tenant_is_served_and_the_front_stays_small(
    server: Server, attack: Callable[[], tuple[bytes, str]]
) -> None:
    content, kind = attack()
    calm_picture_s, calm_look_s = calm(server)
    before_mib = resident_mib(server)
    most_mib, pictures_s, alive_s = before_mib, list[float](), list[float]()

    async def scene() -> None:
        ends_s = time.monotonic() + ATTACKED_S
        hostile = {"authorization": "Bearer h", "content-type": kind}
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=60, trust_env=False, verify=False
        ) as client:

            async def strike() -> None:
                while time.monotonic() < ends_s:
                    await client.post(EDITS, content=content, headers=hostile)

            async def draw() -> None:
                headers = {"authorization": "Bearer o"}
                while time.monotonic() < ends_s:
                    began_s = time.monotonic()
                    sent = body(num_inference_steps=1)
                    answer = await client.post(ENDPOINT, json=sent, headers=headers)
                    assert answer.status_code == 200, answer.text
                    pictures_s.append(time.monotonic() - began_s)

            def look() -> None:  # in a thread: sending attacks holds up this one
                nonlocal most_mib
                with server.client() as calm_client:
                    while time.monotonic() < ends_s:
                        began_s = time.monotonic()
                        assert calm_client.get("/livez").status_code == 200
                        alive_s.append(time.monotonic() - began_s)
                        most_mib = max(most_mib, resident_mib(server))
                        time.sleep(0.01)

            attacks = (strike() for _ in range(4))
            await asyncio.gather(*attacks, draw(), asyncio.to_thread(look))

    asyncio.run(scene())

    assert max(pictures_s) < max(MOST_S, 20 * calm_picture_s)
    assert max(alive_s) < max(MOST_S / 2, 20 * calm_look_s)
    assert most_mib - before_mib < MOST_MIB


def calm(server: Server) -> tuple[float, float]:
    """The longest waits of the same tenant when nobody attacks: other processes may run, too."""
    pictures_s, looks_s = list[float](), list[float]()
    headers = {"authorization": "Bearer o"}
    with server.client(headers=headers) as client:
        for waits_s, ask in (
            (pictures_s, partial(client.post, ENDPOINT, json=body(num_inference_steps=1))),
            (looks_s, partial(client.get, "/livez")),
        ):
            for _ in range(5):
                began_s = time.monotonic()
                assert ask().status_code == 200
                waits_s.append(time.monotonic() - began_s)
    return max(pictures_s[1:]), max(looks_s[1:])  # the first picture is of a model never used yet


def resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
