"""API keys: names that stay with their keys, whatever becomes of the file; whose share is used."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import SettingRejected
from carpool.jobs.store import JobStore
from carpool.request.card import Task
from carpool.server.access.keys import Keyring, parse_keys
from carpool.worker import protocol
from support.app import CARD, Grey, open_app
from support.endpoints import ENDPOINT

WORK = {"prompt": "a circle", "seed": 1}
PICTURE = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAAAAAA6mKC9AAAADUlEQVR4nGNgGAXIAAABEAABoJMRpQAA"
    "AABJRU5ErkJggg=="
)  # 16x16, black


def named(key: str) -> str:
    """What a key without a name is called."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


# Names


@given(st.permutations(["one", "two", "three", "a=four"]), st.integers(0, 3))
def test_a_key_keeps_its_name_wherever_it_stands(entries: list[str], gone: int) -> None:
    keys = parse_keys(entries)
    left = parse_keys(entries[:gone] + entries[gone + 1 :])

    assert keys == {named("one"): b"one", named("two"): b"two", named("three"): b"three",
                    "a": b"four"}  # fmt: skip
    assert left.items() <= keys.items()


def test_an_entry_that_stands_twice_is_one_key() -> None:
    assert parse_keys(["one", "a=two", "one", "a=two"]) == {named("one"): b"one", "a": b"two"}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        *((entries, r"one key is called '.*' and '.*'")
          for entries in (["a=one", "b=one"], ["a=one", "one"], ["one", "a=one"])),
        (["one", f"{named('one')}=two"], f"two keys are called '{named('one')}'"),
        (["a=1", "a=2"], "two keys are called 'a'"),
    ],
)  # fmt: skip
def test_one_key_of_two_names_and_two_of_one_are_refused_without_showing_any(
    entries: list[str], says: str
) -> None:
    with pytest.raises(SettingRejected, match=says) as refused:
        parse_keys(entries)

    assert "one'" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"one\na=two\n", b"one\r\na=two\r\n",
        b"\xef\xbb\xbfone\r\n# a comment\r\n\r\n  a=two  \r\n", b"  # one more\none\n\ta=two",
    ],
)  # fmt: skip
def test_a_file_of_keys_may_come_from_any_editor(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    assert set(Keyring([], str(file)).names) == {named("one"), "a"}


@pytest.mark.parametrize("line", ["one two", "a = one", "one # a comment", "a=on\te", "on\u200be"])
def test_a_line_that_is_no_key_is_refused_by_its_number_without_showing_it(
    file: Path, line: str
) -> None:
    file.write_text(f"# ours\n{line}\n", encoding="utf-8")

    with pytest.raises(SettingRejected, match="line 2: a key has no spaces or control") as refused:
        Keyring([], str(file))

    assert line not in str(refused.value)


@pytest.mark.parametrize("entry", ["mobile=", "a=="])
def test_a_name_without_a_key_is_no_key(entry: str) -> None:
    with pytest.raises(SettingRejected, match="entry 2: there is no key behind the name"):
        Keyring(["one", entry])


def test_a_file_that_is_no_utf_8_is_refused(file: Path) -> None:
    file.write_bytes("one\n".encode("utf-16"))

    with pytest.raises(SettingRejected, match="cannot be read"):
        Keyring([], str(file))


# Under a running server


@dataclass
class Clients:
    """An application with keys from a file, before a worker that draws grey."""

    http: httpx2.AsyncClient
    keys: Keyring
    file: Path
    worker: Grey
    store: JobStore

    async def ask(
        self, key: str, path: str = ENDPOINT, method: str = "POST", **more: Any
    ) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if method == "POST" and "files" not in more:
            more.setdefault("json", WORK)
        return await self.http.request(method, path, headers=headers, **more)

    def read(self, text: str) -> None:
        """As SIGHUP does."""
        self.file.write_text(text)
        self.keys.read()


def keyring(file: Path, text: str | None) -> Keyring:
    """Keys from a file; None: there are none."""
    if text is None:
        return Keyring([])
    file.write_text(text)
    return Keyring([], str(file))


@asynccontextmanager
async def clients(
    file: Path, text: str | None, worker: Grey | None = None
) -> AsyncIterator[Clients]:
    worker, keys = worker or Grey(), keyring(file, text)
    async with open_app(worker, runs=False, keys=keys) as opened:
        yield Clients(opened.http, keys, file, worker, opened.runner.store)


async def test_removing_a_line_gives_no_client_another_ones_jobs(file: Path) -> None:
    async with clients(file, "one\ntwo\n") as at:
        accepted = await at.ask("one", json={**WORK, "background_job": True})
        assert accepted.status_code == 202
        path = f"/v1/jobs/{accepted.json()['id']}"

        at.read("two\n")

        for method, url in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await at.ask("two", url, method)).status_code == 404
        assert (await at.ask("one", path, "GET")).status_code == 401
        assert (await at.ask("two", "/v1/jobs", "GET")).json()["data"] == []
        at.read("two\none\n")
        assert (await at.ask("one", path, "GET")).status_code == 200


@pytest.mark.parametrize("before", ["one\ntwo\n", "a=one\nb=two\n"])
@pytest.mark.parametrize("after", ["two\n", "a=two\n", "# gone\ntwo\n", "two\nthree\n"])
async def test_a_life_is_told_to_the_key_that_made_the_request_whatever_names_become(
    file: Path, before: str, after: str
) -> None:
    asked: list[list[str]] = []

    async def lives(request_ids: list[str]) -> list[dict[str, Any]]:
        asked.append(request_ids)
        return []

    async with clients(file, before) as at:
        at.worker.timelines = lives  # type: ignore[assignment, method-assign]
        drawn = (await at.ask("one")).headers["x-request-id"]
        await at.ask("one", f"/v1/requests/{drawn}", "GET")
        assert len(asked) == 1  # the worker knows nothing of it, but it was looked for

        at.read(after)

        assert (await at.ask("two", f"/v1/requests/{drawn}", "GET")).status_code == 404
        assert len(asked) == 1


async def test_another_key_under_an_old_name_sees_nothing_of_the_old_one(file: Path) -> None:
    async with clients(file, "mobile=old\n") as at:
        headers = {"idempotency-key": "k"}
        first = await at.http.post(
            ENDPOINT,
            json={**WORK, "background_job": True},
            headers={"authorization": "Bearer old", **headers},
        )

        at.read("mobile=new\n")

        assert (await at.ask("new", "/v1/jobs", "GET")).json()["data"] == []
        second = await at.http.post(
            ENDPOINT,
            json={**WORK, "background_job": True},
            headers={"authorization": "Bearer new", **headers},
        )
        assert second.status_code == 202
        assert second.json()["id"] != first.json()["id"]


async def test_keys_that_are_read_again_while_a_request_is_made_mix_nobody_up(file: Path) -> None:
    """Name and owner are of one reading: nothing of a client is looked up by its name later."""

    async with clients(file, "a=one\nb=two\n") as at:
        client_of = at.keys.client_of

        def swapped(token: bytes) -> Any:
            client = client_of(token)
            at.read("a=two\nb=one\n" if token == b"one" else "a=one\nb=two\n")
            return client

        at.keys.client_of = swapped  # type: ignore[method-assign]
        for _ in range(4):
            for key in ("one", "two"):
                answer = await at.ask(key, json={**WORK, "background_job": True})
                assert answer.status_code == 202
        at.keys.client_of = client_of  # type: ignore[method-assign]
        at.read("a=one\nb=two\n")

        mine, yours = [
            {job["id"] for job in (await at.ask(key, "/v1/jobs", "GET")).json()["data"]}
            for key in ("one", "two")
        ]
        assert (len(mine), len(yours), mine & yours) == (4, 4, set())


async def test_the_keys_are_compared_once_a_request(file: Path) -> None:
    async with clients(file, "a=one\nb=two\n") as at:
        client_of, compared = at.keys.client_of, list[bytes]()

        def counted(token: bytes) -> Any:
            compared.append(token)
            return client_of(token)

        at.keys.client_of = counted  # type: ignore[method-assign]
        for path, body in (
            (ENDPOINT, WORK),
            (ENDPOINT, {**WORK, "background_job": True}),
            ("/v1/images/edits", WORK),
            ("/v1/videos", WORK),
            *(
                (path, None)
                for path in ("/v1/models", "/v1/jobs", "/v1/videos/v", "/v1/requests/r")
            ),
        ):
            compared.clear()
            if body is None:
                answer = await at.ask("two", path, "GET")
            else:
                answer = await at.ask("two", path, json=body)
            assert answer.status_code != 401
            assert compared == [b"two"], path


# Whose share a request uses


USERS = [
    ({}, ""), ({"user": "u"}, "u"), ({"safety_identifier": "s", "user": "u"}, "s"),
    ({"user": "b"}, "b"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "user"), USERS)
@pytest.mark.parametrize("path", [ENDPOINT, "/v1/images/edits"])
@pytest.mark.parametrize("way", [{}, {"background_job": True}, {"stream": True}])
def test_the_tenant_of_pictures_is_the_key_and_the_body_names_a_user_of_it(
    file: Path, said: dict[str, Any], user: str, path: str, way: dict[str, Any]
) -> None:
    assert used(file, "a=one\nb=two\n", path, {**said, **way}) == ("a", user)


@pytest.mark.parametrize(("said", "user"), USERS)
@pytest.mark.parametrize("path", [ENDPOINT, "/v1/images/edits"])
def test_without_keys_every_user_is_a_tenant(
    file: Path, said: dict[str, Any], user: str, path: str
) -> None:
    assert used(file, None, path, said) == (user, "")


@pytest.mark.parametrize(("said", "user"), USERS)
def test_the_tenant_of_a_video_is_the_key_and_the_body_names_a_user_of_it(
    file: Path, said: dict[str, Any], user: str
) -> None:
    assert used(file, "a=one\nb=two\n", "/v1/videos", said) == ("a", user)
    assert used(file, None, "/v1/videos", said) == (user, "")


@pytest.mark.parametrize("name", ["tenant", "request_id"])
async def test_no_body_names_its_tenant(file: Path, name: str) -> None:
    async with clients(file, "a=one\n") as at:
        answer = await at.ask("one", json={**WORK, name: "b"})
        assert answer.json()["error"]["code"] == "unknown_parameter"


def used(file: Path, keys: str | None, path: str, said: dict[str, Any]) -> tuple[str, str]:
    """The tenant and user whose share a request uses."""
    card, found = CARD, list[tuple[str, str]]()
    if path == "/v1/videos":
        card = replace(CARD, tasks=(replace(CARD.tasks[0], name="text-to-video"),))
    elif path != ENDPOINT:
        card = replace(CARD, tasks=(*CARD.tasks, edit()))
        said = {**said, "images": [{"image_url": PICTURE}]}

    async def scene() -> None:
        worker = Grey()
        worker.ready = protocol.WorkerReady(card, {}, 0.0)
        async with clients(file, keys, worker) as at:
            answer = await at.ask("one" if keys else "", path, json={**WORK, **said})
            assert answer.status_code in (200, 202), answer.text
            owner = at.keys.client_of(b"one").owner
            found.extend((job.tenant, job.user) for job in worker.jobs)
            for record in at.store.page(owner)[0]:
                found.extend((job["tenant"], job["user"]) for job in record.work["jobs"])

    asyncio.run(scene())
    [one] = found
    return one


def edit() -> Task:
    own = CARD.tasks[0]
    image = replace(own.parameters[-1], name="image")
    return replace(own, name="image-to-image", parameters=(*own.parameters, image))
