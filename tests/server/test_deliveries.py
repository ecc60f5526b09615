"""Webhooks and uploads of jobs, to receivers and an S3 on loopback."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from carpool.config import ServeSettings
from carpool.errors import SettingRejected
from carpool.jobs.outbox import Courier
from carpool.server.deliveries import courier_of
from support.app import AppClient, Grey, open_app
from support.endpoints import ENDPOINT, VIDEOS
from support.pictures import picture
from support.receivers import Site, listening, name_in_environment
from support.video_app import Filming

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
SIGNED: dict[str, Any] = {"webhook_secret": SECRET, "webhook_host": ("127.0.0.1",)}
JOB = {"background_job": True}


async def delivered(opened: AppClient, path: str, body: dict[str, Any], **settings: Any) -> Any:
    """A job as it shows once it has ended and all its deliveries are settled."""
    store = opened.runner.store
    own = courier_of(store, ServeSettings(**settings))
    courier = Courier(store, own._senders, (0.0, 0.0))
    opened.runner.listen(courier)
    running = asyncio.create_task(courier.run())
    try:
        answer = await opened.http.post(path, json={"prompt": "a", **body})
        assert answer.is_success, answer.text
        await opened.ended(answer.json()["id"])
        async with asyncio.timeout(30):
            while True:
                job = (await opened.http.get(f"/v1/jobs/{answer.json()['id']}")).json()
                if all(entry["state"] != "waiting" for entry in job["deliveries"].values()):
                    return job
                await asyncio.sleep(0.01)
    finally:
        running.cancel()


def sent(worker: Grey, path: str, body: dict[str, Any], **settings: Any) -> Any:
    async def talk() -> Any:
        async with open_app(worker, **settings) as opened:
            return await delivered(opened, path, body, **settings)

    return asyncio.run(talk())


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_openai_sdk_checks_the_event_of_a_video(is_broken: bool) -> None:
    worker = Filming()
    worker.is_broken = is_broken
    with listening(Site(503, 302)) as receiver:
        job = sent(worker, VIDEOS, {"webhook": f"{receiver.url}/hook?a=b"}, **SIGNED)

    assert [path for path, _, _ in receiver.got] == ["/hook?a=b"] * 3
    _, headers, content = receiver.got[-1]
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    event: Any = client.webhooks.unwrap(content, headers)
    assert event.type == ("video.failed" if is_broken else "video.completed")
    assert event.data.id == job["id"]
    assert {headers["webhook-id"] for _, headers, _ in receiver.got} == {event.id}
    webhook = job["deliveries"]["webhook"]
    assert (webhook["state"], webhook["attempts"], webhook["error"]) == ("delivered", 3, None)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(content + b" ", headers)


def test_a_webhook_to_an_address_that_is_not_public_is_never_connected_to() -> None:
    with listening(Site()) as receiver:
        body = {**JOB, "webhook": receiver.url.replace("127.0.0.1", "localhost")}
        job = sent(Grey(), ENDPOINT, body, webhook_secret=SECRET)

    webhook = job["deliveries"]["webhook"]
    assert (receiver.got, webhook["state"], webhook["attempts"]) == ([], "failed", 3)
    assert "not public" in webhook["error"]


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        ({"webhook": "https://a.example"}, SIGNED, "background_job"),
        ({"webhook": "https://a.example", **JOB}, {}, "--webhook-secret"),
        ({"webhook": "ftp://a", **JOB}, SIGNED, "http: or https:"),
        ({"webhook": "https://me@a", **JOB}, SIGNED, "names a user"),
        ({"webhook": "http://169.254.169.254/a", **JOB}, SIGNED, "not public"),
        ({"webhook": "http://[::1]:80", **JOB}, SIGNED, "not public"),
    ],
)
async def test_a_webhook_that_cannot_be_sent_is_refused(
    body: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    async with open_app(Grey(), runs=False, **settings) as opened:
        error = (await opened.http.post(ENDPOINT, json={"prompt": "a", **body})).json()["error"]
    assert error["param"] == "webhook"
    assert message in error["message"]


def test_files_are_copied_to_s3_before_the_webhook_tells_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    with listening(Site(403)) as s3, listening(Site()) as receiver:
        name_in_environment(s3.url, tmp_path, monkeypatch)
        body = {**JOB, "webhook": receiver.url}
        job = sent(Grey(), ENDPOINT, body, upload="s3://shop/made", **SIGNED)

    path, headers, content = s3.got[-1]
    assert (path, headers["content-type"]) == (f"/shop/made/{job['id']}/0.png", "image/png")
    assert picture(content).size == (16, 16)
    assert "Credential=me/" in headers["authorization"]
    upload, files = job["deliveries"]["upload"], [f"s3://shop/made/{job['id']}/0.png"]
    assert (upload["files"], upload["attempts"]) == (files, 2)
    assert json.loads(receiver.got[0][2])["data"]["files"] == files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"webhook_secret": "whsec_abc"}, "base64 of 24 to 64 random bytes"),
        ({"upload": "file:///tmp"}, "must begin with s3://"),
        ({"upload": "s3://"}, "upload='s3://': "),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_start(settings: Any, message: str) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(SettingRejected, match=message):
        courier_of(None, ServeSettings(**settings))  # type: ignore[arg-type]
