"""`/sdapi/v1/interrupt` ends all that runs for its key, whatever ids the client has chosen."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from PIL import Image

from support.app import AppClient, open_app
from support.forms import BOTH, worker_of
from support.pictures import saved
from support.running import Timed

API = "/sdapi/v1/"
KEYS = "a=one", "b=two"
PICTURE = base64.b64encode(saved(Image.new("RGB", (64, 64)), "PNG")).decode()


def sent(
    opened: AppClient, key: str, path: str, request_id: str, method: str = "POST", **body: Any
) -> Any:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    asking = opened.http.request(method, API + path, json=body or None, headers=headers)
    return asyncio.create_task(asking)


@pytest.mark.parametrize("ids", [("same", "same", "same"), ("a", "b", "a"), ("a", "b", "c")])
@pytest.mark.parametrize("path", ["interrupt", "skip"])
async def test_all_requests_of_a_key_are_interrupted_also_those_of_one_id(
    ids: Sequence[str], path: str
) -> None:
    worker = Timed(is_slow=True)
    async with open_app(worker, api_key=KEYS) as opened:
        mine = [sent(opened, "one", "txt2img", name, prompt="a") for name in ids]
        other = sent(opened, "two", "txt2img", "same", prompt="a")
        await worker.until(lambda: worker.running == 4)
        told = (await sent(opened, "one", "progress", "x", method="GET")).json()
        assert told["state"]["job_count"] == 3  # none of another key
        await sent(opened, "one", path, "same")
        answers: list[httpx2.Response] = await asyncio.gather(*mine)
        assert [one.json()["images"] for one in answers] == [[]] * 3
        await worker.until(lambda: worker.running == 1)
        assert not other.done()
        await sent(opened, "two", path, "x")
        assert (await other).json()["images"] == []


async def test_the_end_of_one_leaves_the_other_of_the_same_id_to_be_interrupted() -> None:
    """Whichever way it came: here an edit stays, and a client that leaves is the first to end."""

    worker = worker_of(BOTH)
    worker.is_slow = True
    async with open_app(worker) as opened:
        first = sent(opened, "", "txt2img", "same", prompt="a")
        await worker.until(lambda: worker.running == 1)
        second = sent(opened, "", "img2img", "same", prompt="b", init_images=[PICTURE])
        await worker.until(lambda: worker.running == 2)
        first.cancel()
        await worker.until(lambda: worker.running == 1)
        await sent(opened, "", "interrupt", "x")
        assert (await second).json()["images"] == []
