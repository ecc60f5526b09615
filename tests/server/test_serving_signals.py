"""A deployed server: signals, a Unix socket, a path under a proxy, logs for machines, keys."""

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from support.endpoints import ENDPOINT
from support.lora_files import adapter
from support.server_process import (
    MODEL,
    MODEL_ID,
    PATIENCE_S,
    Server,
    body,
    eventually,
    serving,
    starting,
)

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
ENDLESS = 1000  # steps; some 15 s where nothing else runs


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def over_socket(path: Path) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=str(path))
    with httpx2.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
        yield client


def lines(server: Server) -> list[dict[str, Any]]:
    """Its log, of which every line but those of the greeting is an object."""
    return [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server reads: adapters, rules, keys."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "lora").mkdir()
    (folder / "keys").write_text("mobile=one\n")
    (folder / "rules.json").write_text('[{"model_contains": "x", "max_batch_size": 2}]')
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = {
        "--lora-dir": folder / "lora", "--api-key-file": folder / "keys", "--api-key": "desk=two",
        "--batching-mode": "dynamic", "--batching-config": folder / "rules.json",
        "--root-path": "/draw/", "--log-format": "json",
    }  # fmt: skip
    with serving(*(str(word) for flag in flags.items() for word in flag)) as server:
        yield server


def adapters(server: Server, key: str = "two") -> list[str]:
    with server.client(headers=bearer(key)) as client:
        offered: list[str] = client.get("/v1/models").json()["data"][0]["lora"]
        return offered


def test_the_front_writes_nothing_but_objects(server: Server) -> None:
    said = [line["message"] for line in lines(server)]

    assert f"Loading {MODEL} ..." in said
    assert any(one.startswith(f"Serving {MODEL_ID} ") for one in said)
    assert server.stdout == ""
    assert "Warning" not in server.stderr  # of a framework that takes the path otherwise


def test_a_hangup_brings_new_adapters_keys_and_rules_without_a_restart(
    server: Server, folder: Path
) -> None:
    worker = server.worker()
    assert adapters(server) == []
    new = adapter(folder / "lora", "flux", 1)
    (folder / "keys").write_text("mobile=three\n")

    server.signal(signal.SIGHUP)

    eventually(lambda: adapters(server) == [new.stem], 20, "/v1/models shows the adapter")
    with server.client(headers=bearer("three")) as client:
        answer = client.post(ENDPOINT, json=body(lora=[{"id": new.stem}]))
        assert answer.status_code == 200
    with server.client(headers=bearer("one")) as client:
        assert client.get("/v1/models").status_code == 401
    assert server.worker() == worker


def test_a_hangup_with_broken_files_is_told_and_changes_nothing(
    server: Server, folder: Path
) -> None:
    before = adapters(server)
    (folder / "rules.json").write_text("{")
    (folder / "lora" / "broken.safetensors").write_text("no weights")
    (folder / "keys").unlink()

    server.signal(signal.SIGHUP)

    def told() -> int:
        return sum("not reloaded" in line["message"] for line in lines(server))

    eventually(lambda: told() == 3, 20, "it tells of keys, adapter and rules")
    assert adapters(server) == adapters(server, "three") == before


def test_a_proxy_may_cut_the_path_off_or_not(server: Server) -> None:
    assert server.get("/draw/livez").json() == server.get("/livez").json()
    assert server.get("/openapi.json").json()["servers"] == [{"url": "/draw"}]


def test_a_server_out_of_descriptors_waits_quietly_and_answers_once_it_has_some(
    server: Server,
) -> None:
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard  # it took what it may have
    address = urlsplit(server.url)
    descriptors = len([*Path(f"/proc/{pid}/fd").iterdir()])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors + 20, hard))

    def complaints() -> int:
        return server.stderr.count("out of system resource")

    with ExitStack() as clients:
        for _ in range(40):
            connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
            clients.enter_context(closing(connection))
        eventually(lambda: complaints() >= 2, 10, "it has tried again")
        assert complaints() < 10

    eventually(lambda: server.health() == 200, 10, "it answers")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_socket_serves_and_is_gone_after_the_drain(tmp_path: Path) -> None:
    path = tmp_path / "carpool.sock"
    with starting("--uds", str(path), "--state-dir", "none") as server:
        eventually(lambda: f"unix:{path}" in server.stdout, PATIENCE_S, "it says where it serves")
        assert f"--unix-socket {path} http://localhost" in server.stdout
        with over_socket(path) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == MODEL_ID
            secure = {"x-forwarded-proto": "https"}  # as the proxy in front says
            linked = client.post(ENDPOINT, json=body(response_format="url"), headers=secure)
            assert linked.json()["data"][0]["url"].startswith("https://localhost/v1/files/")
            with ThreadPoolExecutor() as pool:
                running = pool.submit(client.post, ENDPOINT, json=body(num_inference_steps=100))
                eventually(lambda: client.get("/stats").json()["running"] == 1, 10, "it runs")

                server.signal()

                assert running.result(20).status_code == 200  # it was drained
        assert server.wait() == 0
        assert not path.exists()


def test_a_socket_that_cannot_be_made_ends_it_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "carpool.sock"
    with starting("--uds", str(path), "--state-dir", "none", "--log-level", "warning") as server:
        assert server.wait() == 1
        [_, told] = server.stderr.splitlines()

    assert f"cannot listen on {path}: " in told


def test_a_hangup_during_the_start_ends_nothing_and_a_second_signal_ends_a_drain(
    tmp_path: Path,
) -> None:
    """Although clients hold connections."""
    os.mkfifo(config := tmp_path / "config.yaml")
    with starting("--config", str(config)) as server:
        with config.open("w") as file:  # open as soon as the server reads its settings
            server.signal(signal.SIGHUP)
            file.write("drain_timeout: 60")
        server.wait_listening()
        server.signal(signal.SIGHUP)
        server.wait_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as idle, ThreadPoolExecutor() as pool:
            running = pool.submit(server.draw, num_inference_steps=ENDLESS)
            eventually(lambda: server.stats()["running"] == 1, 10, "it runs")
            server.signal()
            eventually(lambda: server.health() == 503, 5, "it drains")
            os.kill(server.process.pid, signal.SIGHUP)  # no end either

            server.signal()

            assert server.wait(5) == 0
            assert running.result(5).status_code == 503
            idle.close()
