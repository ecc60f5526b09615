"""`/v1/set_lora`: defaults belong to the key itself, and no input is the server's failure."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool.config import ServeSettings
from carpool.server.access.keys import Keyring
from carpool.server.app import create_app
from carpool.worker import protocol
from support.app import CARD, Grey, app_of, client_of, fleet_of, idle_jobs
from support.endpoints import ENDPOINT

OUTLINED = {"lora_nickname": "outlined"}
LISTED = "/v1/list_loras"


class Reading(Grey):
    """A fake worker that finds adapters in a folder when it is told to look."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def reload(self) -> None:
        names = [file.stem for file in self._folder.glob("*.safetensors")]
        self.ready = protocol.WorkerReady(replace(CARD, lora=(*CARD.lora, *names)), {}, 0.0)


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
        await http.post("/v1/set_lora", json=OUTLINED, headers=bearer("a-key"))
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
        await http.post("/v1/set_lora", json=OUTLINED, headers=bearer("a-key"))
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
    app = app_of(Reading(folder), api_key=("ada=a-key",), lora_dir=str(folder))

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
