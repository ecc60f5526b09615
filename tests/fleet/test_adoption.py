"""Workers that Ray places: taken over, replaced, unreachable for a while; by fakes, without Ray."""

import asyncio
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import SettingRejected
from carpool.fleet import ray, ray_connector
from carpool.fleet.host import WorkerHost
from carpool.fleet.ray import RayCluster
from carpool.fleet.ray_connector import RayConnector
from carpool.fleet.remote_connection import RemoteConnection, WorkerAddress
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.requests import Moved
from carpool.worker.supervisor import Supervisor, WorkerListener
from support.app import CARD
from support.fake_hosts import FakeChild, until

SECRET = bytes(32)
READY = protocol.WorkerReady(CARD, {}, 0.5)
SHAPES = protocol.LoadModel("shapes", EngineSettings())
REQUEST = CheckedRequest("one", 1, {"prompt": "a cat"})

# Made for these tests, and used nowhere else.
CERTIFICATE, KEY, ANOTHER = (
    (Path(__file__).parent / "recorded" / f"{name}.pem").read_text()
    for name in ("certificate", "key", "another")
)


class FakeCluster(RayCluster):
    """Actors are names; where they listen is said by the test."""

    def __init__(self, *found: str) -> None:
        super().__init__(ServeSettings())
        self._found = {"shapes": list(found)}
        self.made, self.ended = 0, list[str]()
        self.at: dict[str, WorkerAddress | OSError | None] = {}

    def workers(self, model: str) -> int:
        return len(self._found.get(model, []))

    def take(self, model: str, ranks: int = 1) -> str:
        found = self._found.get(model)
        if found:
            return str(found.pop(0))
        self.made += 1
        return f"new-{self.made}"

    def end(self, actor: str) -> None:
        self.ended.append(actor)

    async def join(self, actor: str) -> WorkerAddress | None:
        where = self.at.get(actor, WorkerAddress("127.0.0.1", 1, SECRET))
        if isinstance(where, OSError):
            raise where
        return where


class Fronts(WorkerListener):
    """What a pool would be."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1


async def address_only(address: WorkerAddress, spool: Path | None) -> Any:
    return address


async def test_workers_of_an_earlier_front_are_taken_first_and_then_new_ones_made() -> None:
    cluster = FakeCluster("old-1", "old-2")
    cluster.at = {name: WorkerAddress(name, 1, SECRET) for name in ("old-1", "old-2", "new-1")}
    connectors = [RayConnector(cluster, "shapes", None, address_only) for _ in range(3)]
    where: list[Any] = [await one.open() for one in connectors]
    assert [one.host for one in where] == ["old-1", "old-2", "new-1"]
    again: Any = await connectors[0].open()
    assert again.host == "old-1"  # it stays with the worker that it has


async def test_a_worker_that_is_gone_is_replaced_and_one_that_is_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_connector, "BEAT_S", 0.0)

    cluster = FakeCluster("away")
    cluster.at = {"away": ConnectionError("it restarts")}
    connector = RayConnector(cluster, "shapes", None, address_only)
    opening = asyncio.create_task(connector.open())
    await asyncio.sleep(0.05)
    cluster.at["away"] = WorkerAddress("back", 1, SECRET)
    where: Any = await opening
    assert (where.host, cluster.made) == ("back", 0)
    await connector.end()
    assert cluster.ended == ["away"]

    cluster = FakeCluster("gone")
    cluster.at = {"gone": None, "new-1": WorkerAddress("here", 1, SECRET)}
    connector = RayConnector(cluster, "shapes", None, address_only)
    where = await connector.open()
    assert (where.host, cluster.made) == ("here", 1)
    await connector.end()
    assert cluster.ended == ["new-1"]


class Suspecting(FakeCluster):
    """Notes which nodes are suspected when a worker is placed."""

    def __init__(self, *found: str) -> None:
        super().__init__(*found)
        self.avoided = list[list[str]]()

    def take(self, model: str, ranks: int = 1) -> str:
        self.avoided.append(self._lost_nodes())
        return super().take(model, ranks)


async def lost_worker(cluster: Suspecting) -> RayConnector:
    """A connector to a worker on the node `n1` that was reached, and then is not any more."""
    cluster.at = {"old": WorkerAddress("old", 1, SECRET, node="n1")}
    connector = RayConnector(cluster, "shapes", None, address_only)
    await connector.open()
    cluster.at = {"old": ConnectionError("no answer")}
    return connector


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connector, "BEAT_S", 0.0)
    monkeypatch.setattr(ray_connector, "CONNECT_S", 0.0)


async def test_in_the_place_of_a_lost_worker_one_comes_on_another_node(at_once: None) -> None:
    connector = await lost_worker(cluster := Suspecting("old"))
    cluster.at["new-1"] = WorkerAddress("new", 1, SECRET, node="n2")
    where: Any = await connector.open()
    assert where.host == "new"
    assert cluster.avoided == [[], ["n1"]]
    assert cluster.ended == ["old"]  # should it come back, nobody needs it
    cluster.at["new-1"] = WorkerAddress("again", 1, SECRET, node="n2")
    where = await connector.open()
    assert (where.host, cluster.made) == ("again", 1)


async def test_a_lost_worker_that_answers_first_stays_and_the_other_is_ended(at_once: None) -> None:
    connector = await lost_worker(cluster := Suspecting("old"))
    cluster.at["new-1"] = ConnectionError("it has no place yet")
    opening = asyncio.create_task(connector.open())
    await until(lambda: cluster.made == 1)
    cluster.at["old"] = WorkerAddress("old", 1, SECRET, node="n1")
    where: Any = await opening
    assert (where.host, cluster.ended) == ("old", ["new-1"])
    assert cluster._lost_nodes() == []  # its node is trusted again


async def test_a_worker_that_found_no_place_is_asked_for_anew_on_any_node(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then Ray itself knows which nodes are gone."""
    monkeypatch.setattr(ray_connector, "NOTICED_S", 0.0)
    monkeypatch.setattr(ray, "NOTICED_S", 0.0)

    connector = await lost_worker(cluster := Suspecting("old"))
    cluster.at["new-1"] = ConnectionError("it has no place")
    where: Any = await connector.open()
    assert where.host == "127.0.0.1"  # the second one's
    assert cluster.avoided[-1] == []
    assert cluster.ended == ["new-1", "old"]


async def test_a_worker_of_an_earlier_front_that_never_answers_is_replaced(at_once: None) -> None:
    cluster = Suspecting("old")
    cluster.at["old"] = ConnectionError("no answer")
    where: Any = await RayConnector(cluster, "shapes", None, address_only).open()
    assert where.host == "127.0.0.1"
    assert (cluster.avoided, cluster.ended) == ([[], []], ["old"])  # where it was is not known


async def test_a_front_that_ends_while_a_worker_is_lost_leaves_that_one_only(at_once: None) -> None:
    connector = await lost_worker(cluster := Suspecting("old"))
    cluster.at["new-1"] = ConnectionError("it has no place yet")
    opening = asyncio.create_task(connector.open())
    await until(lambda: cluster.made == 1)
    opening.cancel()
    await asyncio.wait([opening])
    assert (opening.cancelled(), cluster.ended) == (True, ["new-1"])


@pytest.mark.parametrize("found", [(), ("old",)])
async def test_a_worker_that_is_asked_for_as_its_front_ends_is_not_left_behind(
    found: tuple[str, ...], at_once: None
) -> None:
    """Nobody would know it: it would keep a place in the cluster."""

    cluster, asked, go_on = FakeCluster(*found), threading.Event(), threading.Event()
    cluster.at["old"] = ConnectionError("no answer")
    take = cluster.take

    def slowly(model: str, ranks: int = 1) -> str:
        if not cluster.workers(model):
            asked.set()
            go_on.wait(10)
        return take(model, ranks)

    cluster.take = slowly  # type: ignore[method-assign]
    opening = asyncio.create_task(RayConnector(cluster, "shapes", None, address_only).open())
    await until(asked.is_set)
    opening.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([opening])
    await until(lambda: cluster.made == 1)
    assert (opening.cancelled(), cluster.ended) == (True, ["new-1"])


async def test_a_worker_that_ray_does_not_place_is_worth_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_connector, "NOTICED_S", 0.01)

    cluster = FakeCluster()
    waiting = asyncio.Event()

    async def join(actor: str) -> WorkerAddress:
        await waiting.wait()
        return WorkerAddress("here", 1, SECRET)

    cluster.join = join  # type: ignore[method-assign]
    opening = asyncio.create_task(RayConnector(cluster, "shapes", None, address_only).open())
    await until(lambda: "`ray status`" in caplog.text)
    waiting.set()
    where: Any = await opening
    assert where.host == "here"


def host_of_ready_workers() -> tuple[WorkerHost, list[FakeChild]]:
    """A host whose workers are ready at once, and the workers that it will have started."""
    children: list[FakeChild] = []

    async def opened(spool: Path) -> FakeChild:
        children.append(FakeChild())
        children[-1].told.put_nowait(READY)
        return children[-1]

    return WorkerHost(SECRET, keep_s=1000, at_end=lambda: None, open_child=opened), children


async def test_a_front_goes_on_trying_to_reach_its_first_worker_instead_of_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.worker.restarts.BACKOFF_S", (0.0,))

    host, _ = host_of_ready_workers()
    cluster = FakeCluster("first")
    cluster.at = {"first": ConnectionError("nobody answers")}
    front = Supervisor(SHAPES, RayConnector(cluster, "shapes", None))
    running = front.start()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not running.done()
    cluster.at = {"first": WorkerAddress("127.0.0.1", await host.listen("127.0.0.1"), SECRET)}
    await front.wait_ready()
    await front.stop()
    await host.close()


async def test_what_a_lost_worker_ran_is_moved_and_the_worker_is_taken_over_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.worker.restarts.BACKOFF_S", (0.0,))

    host, children = host_of_ready_workers()
    cluster = FakeCluster("first")
    cluster.at = {"first": WorkerAddress("127.0.0.1", await host.listen("127.0.0.1"), SECRET)}
    listener = Fronts()
    front = Supervisor(
        SHAPES, RayConnector(cluster, "shapes", None), listener=listener, journals=Journals()
    )
    front.start()
    await front.wait_ready()
    asked = asyncio.create_task(front.submit(REQUEST))
    await until(lambda: children[0].of(protocol.Submit) == 1)

    connection = front._connection
    assert isinstance(connection, RemoteConnection)
    connection._stream._writer.transport.abort()  # the network between them is cut
    with pytest.raises(Moved):
        await asked
    await until(lambda: children[0].of(protocol.Reset) == 1)
    children[0].told.put_nowait(READY)  # its requests have ended
    await until(lambda: front.takes_requests)
    assert len(children) == 1

    again = asyncio.create_task(front.submit(REQUEST))
    await until(lambda: children[0].of(protocol.Submit) == 2)
    done = protocol.Done("one", 1, [], Timings(), protocol.TokenUsage(0, 0))
    children[0].told.put_nowait(done)
    assert await again == done
    await front.stop()
    await host.close()


@pytest.mark.parametrize("trusted", [CERTIFICATE, ANOTHER], ids=["its own", "another"])
async def test_with_a_certificate_workers_are_reached_by_tls_and_only_with_that_one(
    trusted: str,
) -> None:
    async def opened(spool: Path) -> FakeChild:
        child = FakeChild()
        child.told.put_nowait(READY)
        return child

    tls = ray.server_tls(CERTIFICATE, KEY)
    host = WorkerHost(SECRET, keep_s=9, at_end=lambda: None, tls=tls, open_child=opened)
    port = await host.listen("127.0.0.1")
    if trusted == ANOTHER:
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await RemoteConnection.open(WorkerAddress("127.0.0.1", port, SECRET, trusted))
    else:
        front = await RemoteConnection.open(WorkerAddress("127.0.0.1", port, SECRET, trusted))
        front.send(SHAPES)
        assert await anext(front.messages()) == READY
        assert front._stream._writer.get_extra_info("cipher") is not None
        await front.close()
    await host.close()
    await asyncio.sleep(0.05)


def test_the_secret_shows_in_no_line_of_a_log() -> None:
    assert "secret" not in repr(WorkerAddress("host", 1, SECRET))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(SettingRejected, match=r"pip install 'ray>="):
        ray.connected(ServeSettings(ray="auto"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fleet_cert": "one.pem"}, "give both, or none"),
        ({"fleet_cert": "none.pem", "fleet_key": "none.pem"}, "fleet_cert='none.pem' cannot be"),
    ],
)
def test_files_of_tls_are_read_before_anything_is_placed(
    settings: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingRejected, match=why):
        ray.connected(ServeSettings(ray="auto", **settings))


def test_names_of_models_are_fit_for_actors_and_do_not_collide() -> None:
    names = [ray._named(one) for one in ("a/b", "a-b", "shapes", "/m/x", "/m/y")]
    assert len(set(names)) == len(names)
    assert all("|" not in one and "/" not in one for one in names)


def test_an_address_where_nothing_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Ray that would try for ever."""

    class Patient:
        @staticmethod
        def init(*_: Any, **__: Any) -> None:
            raise AssertionError("Ray was asked")

    monkeypatch.setitem(sys.modules, "ray", Patient)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SettingRejected, match=r"there is no Ray cluster .*`ray start --head`"):
        ray.connected(ServeSettings(ray=f"127.0.0.1:{port}"))
