"""Four kinds of clients of an unreliable server: each retries until it has its picture.

    waits     POST, with the picture in the answer; retries with the same Idempotency-Key
    streams   the same with server-sent events; restarts when the stream breaks
    polls     submits a job, polls it, downloads the file, deletes some jobs
    vanishes  disconnects at a random time, and never returns

They retry like SDKs: after a broken connection, and after answers with a retry hint, at the hinted
time.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from proof.diary import Diary, Ending, file_of
from proof.history import ENDS, Seen
from proof.tickets import ENDPOINT, Ticket

PATIENCE_S = 150.0  # timeout of a request, then lost
SILENCE_S = 60.0  # timeout of an answer
MOST_HINT_S = 5.0  # limit for retry hints
AGAIN_S = 0.2  # retry delay after a broken connection
REMOVED = 0.2  # fraction of deleted jobs
EARLY_S = 1.0  # latest time of a disconnect


class _Again(Exception):
    """Retry after `after_s` seconds."""

    def __init__(self, why: str, after_s: float) -> None:
        super().__init__(why)
        self.why, self.after_s = why, after_s


class _Told(Exception):
    """The server reported a failure with this code."""


@dataclass(slots=True)
class Clients:
    """Clients of one server, running until `is_over`."""

    http: httpx2.AsyncClient
    tickets: Sequence[Ticket]
    diary: Diary
    think_s: float = 0.5  # longest pause between requests
    has_keys: bool = True  # send Idempotency-Keys, also with synchronous requests
    silence_s: float = SILENCE_S
    is_over: bool = False

    async def run(self, kind: str, number: int, seed: int) -> None:
        """Run one client."""
        rng = random.Random(f"{seed} {kind} {number}")
        do = {"waits": self._wait, "streams": self._stream, "polls": self._poll}.get(kind)
        clock = asyncio.get_running_loop().time
        while not self.is_over:
            await asyncio.sleep(rng.uniform(0, self.think_s))
            ticket = rng.choice(self.tickets)
            if do is None:
                await self.vanish(ticket, rng)
                continue
            began_s, files, failure = clock(), list[bytes](), ""
            try:
                files = await do(ticket, rng)
            except _Told as error:
                failure = str(error)
            self.diary.endings.append(Ending(kind, ticket, files, failure, clock() - began_s))

    async def _patiently(self, kind: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Call `ask` with retries; returns its result.

        Raises:
            _Told: a permanent failure, or the timeout.
        """
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(self.silence_s):
                    return await ask()
            except _Again as again:
                why, after_s = again.why, again.after_s
            except httpx2.RequestError:
                why, after_s = "connection broken", AGAIN_S
            except TimeoutError:
                raise _Told(f"no answer within {self.silence_s:g} s") from None
            self.diary.again[kind, why] += 1
            if clock() > deadline_s:
                raise _Told(f"after {PATIENCE_S:g} s still {why}")
            await asyncio.sleep(after_s)

    async def _wait(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        headers = {"idempotency-key": uuid.uuid4().hex} if self.has_keys else {}

        async def ask() -> list[bytes]:
            answer = await self.http.post(ENDPOINT, json=ticket.body, headers=headers)
            return [file_of(entry) for entry in _read(answer)["data"]]

        files: list[bytes] = await self._patiently("waits", ask)
        return files

    async def _stream(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        body = ticket.body | {"stream": True, "partial_images": rng.randint(0, 2)}

        async def ask() -> list[bytes]:
            async with self.http.stream("POST", ENDPOINT, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _read(answer)
                return await _completed(answer)

        files: list[bytes] = await self._patiently("streams", ask)
        return files

    async def _poll(self, ticket: Ticket, rng: random.Random) -> list[bytes]:
        jobs, request = self.diary.jobs, uuid.uuid4().hex
        headers = {"idempotency-key": request}
        body = ticket.body | {"background_job": True}
        jobs.append(Seen("submit", request=request))

        async def call(method: str, path: str, **options: Any) -> httpx2.Response:
            answer = await self.http.request(method, path, **options)
            if answer.status_code != 404:
                _check(answer)
            return answer

        accepted = await self._patiently(
            "polls", partial(call, "POST", ENDPOINT, json=body, headers=headers)
        )
        job_id = accepted.json()["id"]
        jobs.append(Seen("ack", job_id, request=request))
        path, clock = f"/v1/jobs/{job_id}", asyncio.get_running_loop().time
        job: dict[str, Any] = {"status": "queued"}
        deadline_s = clock() + PATIENCE_S
        while job["status"] not in ENDS:
            if clock() > deadline_s:
                raise _Told(f"after {PATIENCE_S:g} s still {job['status']}")
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            answer = await self._patiently("polls", partial(call, "GET", path))
            self._note(job_id, answer)
            if answer.status_code == 404:
                raise _Told("the job is not found")
            job = answer.json()
        if job["status"] != "completed":
            raise _Told(job["error"]["code"])
        fetched = [
            await self._patiently("polls", partial(call, "GET", file["url"]))
            for file in job["files"]
        ]
        files = [answer.content for answer in fetched]
        jobs += [Seen("result", job_id, digest=hashlib.sha256(data).hexdigest()) for data in files]
        if rng.random() < REMOVED:
            await self._patiently("polls", partial(call, "DELETE", path))
            jobs.append(Seen("removed", job_id))
            self._note(job_id, await self._patiently("polls", partial(call, "GET", path)))
        return files

    def _note(self, job_id: str, answer: httpx2.Response) -> None:
        if answer.status_code == 404:
            self.diary.jobs.append(Seen("missing", job_id))
        else:
            job = answer.json()
            self.diary.jobs.append(Seen("poll", job_id, "", job["status"], job["progress"]))

    async def last_look(self) -> None:
        """Poll all jobs that the server still knows once more."""
        after: dict[str, str] = {}
        while True:
            answer = await self.http.get("/v1/jobs", params={"limit": "100", **after})
            page = answer.raise_for_status().json()
            for job in page["data"]:
                event = Seen("poll", job["id"], "", job["status"], job["progress"])
                self.diary.jobs.append(event)
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}

    async def vanish(self, ticket: Ticket, rng: random.Random) -> None:
        """Send a request, and disconnect soon."""
        body = ticket.body | ({"stream": True} if rng.random() < 0.5 else {})
        with contextlib.suppress(TimeoutError, httpx2.RequestError):
            async with asyncio.timeout(rng.uniform(0, EARLY_S)):
                await self.http.post(ENDPOINT, json=body)
        self.diary.gone += 1


def _check(answer: httpx2.Response) -> None:
    if answer.is_success:
        return
    code = answer.json()["error"]["code"]
    if answer.headers.get("x-should-retry") == "true":
        hint_s = float(answer.headers.get("retry-after-ms", 1000)) / 1000
        raise _Again(f"{answer.status_code} {code}", min(hint_s, MOST_HINT_S))
    raise _Told(code)


def _read(answer: httpx2.Response) -> dict[str, Any]:
    _check(answer)
    data: dict[str, Any] = answer.json()
    return data


async def _completed(answer: httpx2.Response) -> list[bytes]:
    """Read the pictures of a stream; raises `_Again` if it breaks before [DONE]."""
    files, event, is_ended = list[bytes](), "", False
    async for line in answer.aiter_lines():
        name, _, text = line.partition(":")
        if name == "event":
            event = text.strip()
        elif name == "data" and text.strip() == "[DONE]":
            is_ended = True
        elif name == "data" and event == "error":
            code = json.loads(text)["error"]["code"]
            if code in ("worker_lost", "draining"):
                raise _Again(f"event error {code}", AGAIN_S)
            raise _Told(code)
        elif name == "data" and event.endswith(".completed"):
            files.append(file_of(json.loads(text)))
    if not is_ended:
        raise _Again("stream broken", AGAIN_S)
    return files
