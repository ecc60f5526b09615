"""Webhooks and uploads of jobs: their checks, and their delivery.

A webhook is an event in OpenAI's format, signed by the Standard Webhooks specification: `openai`'s
`client.webhooks.unwrap` and the libraries of standardwebhooks.com verify it.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from carpool.config import ServeSettings
from carpool.errors import FileNotReady, InvalidValue, SettingRejected, UnsupportedParameter
from carpool.jobs.database import Record
from carpool.jobs.outbox import Courier, waiting
from carpool.jobs.store import JobStore
from carpool.media.fetch_url import check_url, fetch, is_public
from carpool.media.object_store import ObjectStore

_PREFIX, _SECRET_BYTES = "whsec_", range(24, 65)


def deliveries_of(settings: ServeSettings, webhook: Any) -> dict[str, Any]:
    """The deliveries of a new job, for the webhook of its request.

    Raises:
        UnsupportedParameter, InvalidValue: the server sends no webhooks, or it is not a URL.
    """
    deliveries = {"upload": waiting()} if settings.upload else {}
    if webhook is not None:
        if not settings.webhook_secret:
            rule = "this server signs none (--webhook-secret): leave it out, and poll the job"
            raise UnsupportedParameter(f"webhook: {rule}", param="webhook")
        host = check_url(webhook, "webhook").host
        with suppress(ValueError):  # names are resolved, and checked, at delivery
            if not is_public(ip_address(host)) and host not in settings.webhook_host:
                rule = "leads to an address that is not public (--webhook-host allows one)"
                raise InvalidValue(f"webhook: the URL {rule}", param="webhook")
        deliveries["webhook"] = waiting(url=webhook)
    return deliveries


def courier_of(store: JobStore, settings: ServeSettings) -> Courier:
    """The courier of a store; SettingRejected: a setting of its deliveries is invalid."""
    senders: dict[str, Any] = {}
    if settings.upload:
        senders["upload"] = partial(_upload, store, ObjectStore(settings.upload))
    if settings.webhook_secret:
        key = _key(settings.webhook_secret)
        senders["webhook"] = partial(_webhook, store, key, settings.webhook_host)
    return Courier(store, senders)


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        key = b""
    if len(key) not in _SECRET_BYTES:
        rule = f"must be {_PREFIX} and base64 of 24 to 64 random bytes (openssl rand -base64 32)"
        raise SettingRejected(f"webhook_secret {rule}", param="webhook_secret")
    return key


async def _webhook(
    store: JobStore, key: bytes, hosts: Sequence[str], record: Record
) -> Mapping[str, Any]:
    """Send the event of a job; every attempt has the same event id."""
    deliveries = record.deliveries or {}
    data = {"id": record.id, "status": record.state, "model": record.asked.get("model")}
    data |= {"error": record.error, "files": deliveries.get("upload", {}).get("files")}
    event = {"id": f"evt_{record.id}", "object": "event", "type": f"{record.kind}.{record.state}"}
    content = json.dumps({**event, "created_at": int(record.ended_s or 0), "data": data}).encode()
    url, marks = deliveries["webhook"]["url"], f"{event['id']}.{int(store.clock())}"
    digest = hmac.digest(key, f"{marks}.".encode() + content, hashlib.sha256)
    headers = {
        "webhook-id": event["id"],
        "webhook-timestamp": marks.rpartition(".")[2],
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        "content-type": "application/json",
    }
    is_named = check_url(url, "webhook").host in hosts
    is_allowed = (lambda address: True) if is_named else is_public
    await fetch(
        url, max_bytes=0, resolve=_resolve, name="webhook", is_allowed=is_allowed,
        headers=headers, content=content,
    )  # fmt: skip
    return {}


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    return [str(a[4][0]) for a in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


async def _upload(store: JobStore, target: ObjectStore, record: Record) -> Mapping[str, Any]:
    paths = [path for name in record.files if (path := store.file(record, name)) is not None]
    if len(paths) < len(record.files):
        raise FileNotReady(f"files of job {record.id} are not kept any more")
    return {"files": await asyncio.to_thread(target.copy, record.id, paths)}
