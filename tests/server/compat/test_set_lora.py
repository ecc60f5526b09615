"""`/v1/set_lora`, `/v1/list_loras`, `/v1/unmerge_lora_weights`: as SGLang's clients send them."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.server.access.keys import Keyring
from carpool.server.app import create_app
from carpool.worker import protocol
from support.app import (
    CARD,
    AppClient,
    Grey,
    app_of,
    client_of,
    fleet_of,
    idle_jobs,
    open_app,
    refusal,
)
from support.endpoints import ENDPOINT

KEYED: dict[str, Any] = {"api_key": ("ada=a-key", "bob=b-key")}
OUTLINED = {"lora_nickname": "outlined", "lora_path": None, "target": "all", "strength": 0.5}
"""What SGLang's own functions send: every field."""


class Folded(Grey):
    """A fake worker with an adapter folder: it reads it when it is told to, and not at once."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def reload(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self._read)

    def _read(self) -> None:
        assert self.folder is not None
        files = [file for file in self.folder.glob("*.safetensors") if file.stem != "foreign"]
        names = sorted({*CARD.lora, *(file.stem for file in files)})
        self.ready = protocol.WorkerReady(replace(CARD, lora=tuple(names)), {}, 0.0)


def adapter_like(file: Path) -> None:
    """A safetensors file without weights: the fake worker does not read it."""
    file.write_bytes((2).to_bytes(8, "little") + b"{}")


async def ask(
    opened: AppClient, path: str, body: Any = None, key: str = "a-key"
) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    return await opened.http.request(method, path, json=body, headers=headers)


async def drawn_with(opened: AppClient, worker: Grey, key: str = "a-key", **body: Any) -> Any:
    answer = await ask(opened, ENDPOINT, {"prompt": "a", **body}, key)
    assert answer.status_code == 200, answer.text
    return worker.jobs[-1].lora


async def test_a_default_is_for_requests_of_its_key_without_adapters_until_it_goes() -> None:
    worker = Grey()

    async with open_app(worker, **KEYED) as opened:
        set_ = await ask(opened, "/v1/set_lora", OUTLINED)
        told = set_.json()
        assert (set_.status_code, told["status"]) == (200, "ok")
        assert "outlined at 0.5" in told["message"]

        assert await drawn_with(opened, worker) == (("outlined", 0.5),)
        assert await drawn_with(opened, worker, lora=[]) == ()
        own = [{"id": "outlined", "scale": -1}]
        assert await drawn_with(opened, worker, lora=own) == (("outlined", -1.0),)
        assert await drawn_with(opened, worker, "b-key") == ()  # another client's pictures

        listed = (await ask(opened, "/v1/list_loras")).json()
        [loaded] = listed["loaded_adapters"]
        assert (loaded["nickname"], loaded["path"]) == ("outlined", None)
        [active] = listed["active"]["transformer"]
        assert (active["nickname"], active["strength"], active["merged"]) == (
            "outlined", 0.5, False,
        )  # fmt: skip
        assert (await ask(opened, "/v1/list_loras", key="b-key")).json()["active"] == {}

        off = await ask(opened, "/v1/unmerge_lora_weights", {"target": "all"})
        assert off.status_code == 200
        assert await drawn_with(opened, worker) == ()
        assert (await ask(opened, "/v1/list_loras")).json()["active"] == {}


async def test_a_job_keeps_the_adapters_that_it_was_accepted_with() -> None:
    worker = Grey()

    async with open_app(worker, **KEYED) as opened:
        await ask(opened, "/v1/set_lora", OUTLINED)
        job = (await ask(opened, ENDPOINT, {"prompt": "a", "background_job": True})).json()
        await ask(opened, "/v1/unmerge_lora_weights", {})
        await opened.runner.ended(job["id"], Keyring(KEYED["api_key"]).client_of(b"a-key").owner)

    assert [one.lora for one in worker.jobs] == [(("outlined", 0.5),)]


async def test_lists_are_of_one_length_and_one_value_counts_for_all(tmp_path: Path) -> None:
    (tmp_path / "ink.safetensors").touch()
    worker = Folded(tmp_path)
    worker._read()

    async with open_app(worker, **KEYED) as opened:
        both = {"lora_nickname": ["ink", "outlined"]}
        assert (await ask(opened, "/v1/set_lora", both | {"strength": 0.3})).status_code == 200
        assert await drawn_with(opened, worker) == (("ink", 0.3), ("outlined", 0.3))
        assert (await ask(opened, "/v1/set_lora", both | {"strength": [1, 0.2]})).status_code == 200
        assert await drawn_with(opened, worker) == (("ink", 1.0), ("outlined", 0.2))
        told = refusal(await ask(opened, "/v1/set_lora", both | {"strength": [1, 2, 3]}))
        assert told["message"] == "strength has 3 entries: must be 2, as many as lora_nickname has"


async def test_a_new_file_of_the_folder_is_read_before_the_answer(tmp_path: Path) -> None:
    worker = Folded(tmp_path)

    async with open_app(worker, lora_dir=str(tmp_path), **KEYED) as opened:
        adapter_like(tmp_path / "ink.safetensors")
        for path in ("ink.safetensors", str(tmp_path / "ink.safetensors")):
            sent = {"lora_nickname": "ink", "lora_path": path}
            answer = await ask(opened, "/v1/set_lora", sent)
            assert answer.status_code == 200, answer.text
            assert await drawn_with(opened, worker) == (("ink", 1.0),)


@pytest.mark.parametrize(
    ("sent", "param", "says"),
    [
        ({"lora_nickname": "outlind"}, "lora_nickname", "did you mean 'outlined'"),
        ({"lora_nickname": "outlined", "strength": "much"}, "lora_nickname", "from -10 to 10"),
        ({"lora_nickname": "outlined", "target": "transformer_2"}, "target", "leave it out"),
        ({"lora_nickname": "outlined", "merge_mode": "merge"}, "merge_mode", "auto or dynamic"),
        ({"lora_nickname": "outlined", "lora_alpha": 8}, "lora_alpha", "the adapter's file"),
        ({"lora_nickname": "outlined", "model": "other"}, None, "use 'grey'"),
        ({"lora_nickname": "a", "lora_path": "/etc/passwd"}, "lora_path", "must be named as"),
        ({"lora_nickname": "a", "lora_path": "/etc/a.safetensors"}, "lora_path", "--lora-dir only"),
        ({"lora_nickname": "a", "lora_path": "../a.safetensors"}, "lora_path", "--lora-dir only"),
        ({"lora_nickname": "a", "lora_path": "b/a"}, "lora_path", "must be named as"),
        ({"lora_nickname": "torn", "lora_path": "torn.safetensors"}, "lora_path", "not a readable"),
        ({"lora_nickname": "foreign", "lora_path": "foreign.safetensors"}, "lora_path", "no adap"),
        ({"lora_nickname": []}, "lora_nickname", "or a list of some"),
        ({"lora_nickname": 5}, "lora_nickname", "must be the name of an adapter"),
        ({"lora_nickname": "a", "lora_path": 5}, "lora_path", "or null"),
        ({"lora_nickname": "outlined", "strenght": 0.5}, "strenght", "is unknown here"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_set_is_refused_and_changes_nothing(
    sent: dict[str, Any], param: str | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "torn.safetensors").write_bytes(b"\x08" + b"\0" * 20)
    adapter_like(folder / "foreign.safetensors")  # the worker takes it for no adapter of its model
    worker = Folded(folder)

    async with open_app(worker, lora_dir=str(folder), **KEYED) as opened:
        answer = await ask(opened, "/v1/set_lora", sent)
        told = refusal(answer)
        assert told["param"] == param
        assert says in told["message"]
        assert str(folder) not in told["message"]
        assert await drawn_with(opened, worker) == ()


async def test_without_api_keys_nobody_sets_what_others_draw() -> None:
    worker = Grey()

    async with open_app(worker) as opened:
        for path, body in (("set_lora", OUTLINED), ("unmerge_lora_weights", {})):
            answer = await opened.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 403
            assert refusal(answer)["code"] == "api_key_required"
            assert "--api-key" in answer.json()["error"]["message"]
        assert (await opened.http.get("/v1/list_loras")).json()["active"] == {}

    async with open_app(worker, **KEYED) as opened:
        assert (await ask(opened, "/v1/set_lora", OUTLINED, "c-key")).status_code == 401
        assert (await ask(opened, "/v1/list_loras", key="c-key")).status_code == 401


# Defaults belong to the key itself, and no input is the server's failure


NAMED = {"lora_nickname": "outlined"}
LISTED = "/v1/list_loras"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


@pytest.mark.parametrize("rotated", ["ada=new", "ada=new\nold=a-key"], ids=["gone", "renamed"])
async def test_a_new_key_under_an_old_name_gets_none_of_the_old_keys_defaults(
    rotated: str, tmp_path: Path
) -> None:
    """And one that gets another name keeps its own: they belong to the key."""
    (file := tmp_path / "keys").write_text("ada=a-key\nbob=b-key")
    keys, worker = Keyring((), str(file)), Grey()
    settings = ServeSettings(port=0, api_key_file=str(file))
    app = create_app(fleet_of(worker), settings, idle_jobs(), keys=keys)

    async with client_of(app) as http:
        await http.post("/v1/set_lora", json=NAMED, headers=bearer("a-key"))
        file.write_text(f"{rotated}\nbob=b-key")
        keys.read()
        new = (await http.get(LISTED, headers=bearer("new"))).json()
        assert new["active"] == {}
        await http.post(ENDPOINT, json={"prompt": "a"}, headers=bearer("new"))
        assert list(worker.jobs[-1].lora) == []

        old = await http.get(LISTED, headers=bearer("a-key"))
        assert old.status_code == (200 if "a-key" in rotated else 401)
        if old.is_success:
            await http.post(ENDPOINT, json={"prompt": "a"}, headers=bearer("a-key"))
            assert worker.jobs[-1].lora == (("outlined", 1.0),)
        assert (worker.jobs[-1].tenant == "old") is old.is_success


async def test_what_a_key_takes_off_stays_on_for_the_key_that_had_its_name(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("ada=a-key")
    keys = Keyring((), str(file))
    settings = ServeSettings(port=0, api_key_file=str(file))
    app = create_app(fleet_of(Grey()), settings, idle_jobs(), keys=keys)

    async with client_of(app) as http:
        await http.post("/v1/set_lora", json=NAMED, headers=bearer("a-key"))
        file.write_text("ada=new")
        keys.read()
        await http.post("/v1/unmerge_lora_weights", json={}, headers=bearer("new"))
        file.write_text("ada=a-key")  # back again
        keys.read()
        assert (await http.get(LISTED, headers=bearer("a-key"))).json()["active"] != {}


ODD: list[Any] = [
    None, 0, -1, True, 10**400, "", " ", "\n", "a" * 300, "a" * 5000, "é" * 200, "\U0001f600" * 80,
    "x/" * 3000 + "a.safetensors", "a\0", "a\0.safetensors", "\ud800", "\ud800.safetensors",
    "~", "~nobody-of-this-name/a.safetensors", "~root/a.safetensors", "..", "../a.safetensors",
    "/", "//", "/etc/passwd", ".safetensors", "a.safetensors/a.safetensors", "folder.safetensors",
    "loop.safetensors", "dangling.safetensors", "memory.safetensors", "pipe.safetensors",
    "a\u202e.safetensors",
    [], [None], [[]], ["a"], ["a", "a"], {}, {"a": 1},
]  # fmt: skip
FIELDS = ("lora_nickname", "lora_path", "strength", "target", "merge_mode", "lora_alpha", "model")


def test_no_name_path_or_type_is_the_servers_failure(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    (folder / "folder.safetensors").mkdir(parents=True)
    (folder / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "dangling.safetensors").symlink_to("nothing")
    (folder / "memory.safetensors").symlink_to("/proc/self/mem")  # cannot be read
    os.mkfifo(folder / "pipe.safetensors")
    good = {"lora_nickname": "a", "lora_path": "a.safetensors"}
    app = app_of(Folded(folder), api_key=("ada=a-key",), lora_dir=str(folder))

    def bodies(odd: Any) -> list[Any]:
        stem = Path(odd).stem if isinstance(odd, str) else odd
        whole = str(folder / odd) if isinstance(odd, str) else odd
        pairs = [{"lora_nickname": stem, "lora_path": path} for path in (odd, whole)]
        several = [{"lora_nickname": [stem], "lora_path": [odd]}, odd, good | {"\ud800": odd}]
        return [*pairs, *several, *(good | {name: odd} for name in FIELDS)]

    async def scene() -> list[tuple[int, str]]:
        async with client_of(app) as http:
            answers = []
            sent = [("/v1/set_lora", body) for odd in ODD for body in bodies(odd)]
            sent += [
                ("/v1/unmerge_lora_weights", one) for odd in ODD for one in (odd, {"target": odd})
            ]
            for path, body in [("/v1/set_lora", good), *sent]:
                content = json.dumps(body)
                answer = await http.post(path, content=content, headers=bearer("a-key"))
                answers.append((answer.status_code, f"{path} {content[:80]}"))
            return answers

    answers = asyncio.run(scene())

    assert answers[0][0] == 200
    assert [one for one in answers if one[0] >= 500] == []
