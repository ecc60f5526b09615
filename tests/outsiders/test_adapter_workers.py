"""Adapters of several workers and models: one name is one file, in the folder of its model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import InvalidValue
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.pool import Pool
from carpool.request.adapter_names import AdapterInfo
from carpool.request.card import Card
from carpool.request.lora import check_lora
from carpool.server.app import create_app
from carpool.worker import protocol
from carpool.worker.supervisor import WorkerListener
from support.app import CARD, idle_jobs
from support.engine_driver import driving
from support.fake_workers import FakeWorker
from support.lora_files import adapter, weights, write


class Shelved(FakeWorker):
    """A worker that has read two adapters, of which one may be another file than elsewhere."""

    def read(self, ink: str, problem: str = "") -> None:
        adapters = (AdapterInfo("ink", digest=ink, problem=problem), AdapterInfo("b", digest="b"))
        ids = tuple(one.id for one in adapters if not one.problem)
        self.load()
        self.ready = protocol.WorkerReady(replace(CARD, lora=ids, adapters=adapters), {}, 0.5)
        self.listener.changed()


def pool_of(workers: list[Shelved], count: int) -> Pool:
    def make(device: str, listener: WorkerListener) -> Shelved:
        workers.append(Shelved(device, listener))
        return workers[-1]

    return Pool(make, ["cpu"] * count, EngineSettings())


def card_of(pool: Pool) -> Card:
    assert pool.ready is not None
    return pool.ready.card


async def test_an_id_of_which_workers_have_read_different_files_is_refused_until_they_are_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = list[Shelved]()
    pool = pool_of(workers, 3)
    for worker in workers:
        worker.read("old")
    assert card_of(pool).lora == ("ink", "b")

    workers[1].die()
    workers[1].read("new")  # its file was changed meanwhile
    card = card_of(pool)
    assert card.lora == ("b",)
    with pytest.raises(InvalidValue, match="'ink', which cannot be used: its file was changed"):
        check_lora([{"id": "ink"}], card.lora, card.adapters)
    assert check_lora([{"id": "b"}], card.lora, card.adapters) == (("b", 1.0),)
    assert "adapters ink: its file was changed" in caplog.text

    for worker in (workers[0], workers[2]):
        worker.die()
        worker.read("new")
    assert card_of(pool).lora == ("ink", "b")


async def test_a_worker_that_cannot_read_a_file_differs_from_none() -> None:
    workers = list[Shelved]()
    pool = pool_of(workers, 2)
    workers[0].read("old")
    workers[1].read("", problem="it is torn")
    assert card_of(pool).lora == ("ink", "b")


def test_a_changed_file_has_another_digest_and_a_copy_the_same(tmp_path: Path) -> None:
    state = weights("flux", 1)
    name = min(state)
    changed = {**state, name: state[name] * 1.5}
    entries = (
        f"a={adapter(tmp_path, 'flux', 1)}",
        f"b={write(tmp_path / 'b.safetensors', state)}",
        f"c={write(tmp_path / 'c.safetensors', changed)}",
    )

    with driving("flux", lora=entries) as drive:
        first, copy, other = (one.digest for one in drive.engine.loaded.card.adapters)

    assert first == copy != other
    assert first


class Reading(FakeWorker):
    """Finds adapters in a folder when it is told to look."""

    def __init__(self, folder: Path, device: str, listener: WorkerListener) -> None:
        super().__init__(device, listener)
        self._folder = folder

    def reload(self) -> None:
        names = [file.stem for file in self._folder.glob("*.safetensors")]
        self.ready = protocol.WorkerReady(replace(CARD, lora=(*CARD.lora, *names)), {}, 0.0)


async def test_set_lora_reads_a_new_file_from_the_folder_of_its_model(tmp_path: Path) -> None:
    own, common = tmp_path / "own", tmp_path / "common"
    deployments = []
    for name, folder in (("with-own", own), ("another", common), ("without", None)):
        settings = EngineSettings(lora_dir=None if folder is None else str(folder))
        if folder is not None:
            write(folder / f"of-{name}.safetensors", weights("flux", 1))

        def pool(folder: Path = folder or tmp_path, settings: Any = settings) -> Pool:
            return Pool(lambda *of: Reading(folder, *of), ["cpu", "cpu"], settings)

        deployments.append(Deployment(name, pool))

    fleet = Fleet(deployments)
    settings = ServeSettings(port=0, api_key=("a=secret",), lora_dir=str(common))
    app, running = create_app(fleet, settings, idle_jobs()), fleet.start()
    for deployment in deployments:
        assert deployment.pool is not None
        for worker in deployment.pool.handles:
            assert isinstance(worker, FakeWorker)
            worker.load()
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url="http://localhost",
        headers={"authorization": "Bearer secret"},
    ) as http:
        answers = {
            (model, file): await http.post(
                "/v1/set_lora",
                json={
                    "model": model, "lora_nickname": file, "lora_path": f"{file}.safetensors",
                },
            )
            for model in ("with-own", "another", "without")
            for file in ("of-with-own", "of-another")
        }  # fmt: skip
    running.cancel()
    await fleet.stop()
    codes = {place: answer.status_code for place, answer in answers.items()}
    assert codes.pop(("with-own", "of-with-own")) == 200, answers
    assert codes.pop(("another", "of-another")) == 200, answers
    assert set(codes.values()) == {400}, codes
