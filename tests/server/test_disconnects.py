"""A client that disconnects ends what runs for it, whichever endpoint it asked."""

import asyncio
from typing import Any

import pytest

from support.app import Grey, open_app
from support.artifacts_app import BELL, SOUND, Making
from support.endpoints import ENDPOINT, VIDEOS
from support.video_app import Filming

DRAW = {"prompt": "a cat"}
CHAT = {"messages": [{"role": "user", "content": "a cat"}]}


@pytest.mark.parametrize(
    ("worker", "path", "body"),
    [
        (Grey(is_slow=True), ENDPOINT, DRAW), (Grey(is_slow=True), "/sdapi/v1/txt2img", DRAW),
        (Grey(is_slow=True), "/v1/chat/completions", CHAT),
        (Grey(is_slow=True), "/", {"inputs": "a cat"}), (Filming(), f"{VIDEOS}/sync", DRAW),
        (Making(BELL, is_slow=True), SOUND, DRAW),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_a_disconnect_cancels_the_work(worker: Grey, path: str, body: Any) -> None:
    worker.is_slow = True
    async with open_app(worker) as opened:
        asking = asyncio.create_task(opened.http.post(path, json=body))
        await worker.until(lambda: worker.running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await worker.until(lambda: worker.running == 0)
        if path.startswith(VIDEOS):
            [video] = (await opened.http.get(VIDEOS)).json()["data"]
            assert video["error"]["code"] == "cancelled"
