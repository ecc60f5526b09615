"""How worker processes start: forked where that is safe, else as new interpreters."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.config import FORKSERVER_VARIABLE
from carpool.errors import SettingRejected
from carpool.worker import start
from carpool.worker.start import ForkingStarter, Process, check_python
from support.server_process import eventually, serving, starting

# A fork server whose workers say how they were started, and end when they are told to.
SERVER = """
import json, os, socket, sys, threading
from carpool.worker import forkserver, process, startup

def run(connection):
    startup.die_with_parent()
    with socket.socket(fileno=connection) as front:
        environ = {name: text for name, text in os.environ.items() if name.startswith("CARPOOL_")}
        said = dict(pid=os.getpid(), parent=os.getppid(), folder=os.getcwd(), environ=environ)
        front.send(json.dumps(said | {"session": os.getsid(0)}).encode())
        os._exit(7 if front.recv(9) == b"end" else 0)

process.run, startup.import_engine = run, lambda: EXTRA
forkserver.main()
"""
A_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
A_DEVICE = "os.open('/dev/ptmx', os.O_RDWR)"


class Front:
    """A front that starts such workers."""

    def __init__(self) -> None:
        self.starter = ForkingStarter()
        self.processes: list[Process] = []
        self.modules: list[str] = []  # that were started as new interpreters

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """In the end its workers and its fork server have ended."""
        try:
            async with asyncio.timeout(30):
                yield
                for process in self.processes:
                    await process.wait()
        finally:
            await self.starter.close()

    async def start(self) -> tuple[Process, socket.socket, dict[str, Any]]:
        """A worker, the socket to it, and what it said."""
        ours, theirs = socket.socketpair()
        try:
            process = await self.starter.start(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.processes.append(process)
        ours.setblocking(False)
        said = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        return process, ours, json.loads(said) if said else {}


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Front:
    extra = getattr(request, "param", "None")
    program = SERVER.replace("EXTRA", extra)

    front = Front()

    def command(module: str, inherited: socket.socket, python: str) -> list[str]:
        front.modules.append(module.rpartition(".")[2])
        new = "import os, sys; os.write(int(sys.argv[1]), b'{\"is_new\": true}')"
        source = new if module == "carpool.worker.process" else program
        return [python, "-c", source, str(inherited.fileno())]

    monkeypatch.delenv(FORKSERVER_VARIABLE, raising=False)
    monkeypatch.setattr(start, "_command", command)
    return front


async def test_forked_workers_inherit_what_the_front_has_now_but_no_secrets(
    front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARPOOL_API_KEY", "a-secret")

    async with front.ending():
        _, one, first = await front.start()
        monkeypatch.setenv("CARPOOL_MAX_QUEUE", "7")
        monkeypatch.chdir(tmp_path)
        _, two, second = await front.start()
        one.close()
        two.close()

        assert (first["environ"], second["environ"]) == ({}, {"CARPOOL_MAX_QUEUE": "7"})
        assert second["folder"] == str(tmp_path)
        assert first["parent"] == second["parent"] != os.getpid()
        assert first["session"] == first["pid"]  # Ctrl-C does not reach it


@pytest.mark.parametrize("front", ["None", A_DEVICE], indirect=True)
def test_a_fork_server_that_was_started_before_the_event_loop_is_used(front: Front) -> None:
    front.starter.start_server()

    async def story() -> None:
        async with front.ending():
            worker, channel, words = await front.start()

            assert front.modules == ["forkserver"]
            assert worker.pid == words["pid"]
            channel.send(b"end")
            channel.close()
            assert await worker.wait() == worker.returncode == 7

    asyncio.run(story())


def environ_of(pid: int) -> str | None:
    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((n[13:].decode() for n in lines if n.startswith(b"CARPOOL_MARK=")), None)


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """An interpreter of another environment: it sets a variable."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nCARPOOL_MARK=other exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


async def test_workers_run_in_the_environment_of_the_python_that_is_named(
    front: Front, other_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORKSERVER_VARIABLE, "/nowhere")  # of the server's own environment
    front.starter = ForkingStarter(other_python)

    async with front.ending():
        _, one, said = await front.start()
        one.close()
        server = front.starter._server
        assert server is not None
        assert said["parent"] == server.pid
        assert environ_of(server.pid) == "other"


def test_a_python_without_this_version_of_carpool_is_refused(
    other_python: str, tmp_path: Path
) -> None:
    check_python(other_python)
    older = tmp_path / "older"
    older.write_text("#!/bin/sh\necho 0.0.1\n")
    older.chmod(0o755)

    with pytest.raises(
        SettingRejected, match=r"must have carpool .*pip install.*has carpool 0.0.1"
    ):
        check_python(str(older))
    with pytest.raises(SettingRejected, match="must be the python of an environment"):
        check_python(str(tmp_path / "missing"))


async def test_the_front_is_told_how_a_forked_worker_ended(front: Front) -> None:
    async with front.ending():
        one, first, said = await front.start()
        two, second, _ = await front.start()
        assert one.pid == said["pid"]

        two.kill()
        assert (await two.wait(), two.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
        assert not two.has_lost_parent
        first.send(b"end")
        assert (await one.wait(), one.returncode) == (7, 7)
        first.close()
        second.close()


async def test_workers_end_with_their_fork_server_and_the_next_one_comes_from_a_new_one(
    front: Front,
) -> None:
    async with front.ending():
        one, first, said = await front.start()

        os.kill(said["parent"], signal.SIGKILL)
        assert await one.wait() == -signal.SIGKILL
        assert one.has_lost_parent
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
        server = front.starter._server
        assert server is not None
        await server.wait()
        _, second, then = await front.start()
        first.close()
        second.close()

        assert then["parent"] not in (said["parent"], os.getpid())


async def test_a_worker_whose_front_closes_its_request_is_killed_even_if_it_is_stopped(
    front: Front,
) -> None:
    async with front.ending():
        one, first, _ = await front.start()
        os.kill(one.pid, signal.SIGSTOP)

        one._writer.close()  # type: ignore[union-attr]  # as the end of the front does
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
        first.close()
        await one.wait()


async def test_a_worker_with_other_variables_for_libraries_is_a_new_interpreter(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front.ending():
        _, first, _ = await front.start()
        monkeypatch.setenv("HF_HOME", "/elsewhere")
        process, second, other = await front.start()
        await process.wait()
        monkeypatch.delenv("HF_HOME")
        _, third, again = await front.start()
        for one in (first, second, third):
            one.close()

        assert other == {"is_new": True}
        assert "parent" in again


@pytest.mark.parametrize("front", [A_THREAD, A_DEVICE], indirect=True)
async def test_a_process_that_must_not_be_forked_becomes_the_worker(front: Front) -> None:
    async with front.ending():
        one, first, said = await front.start()
        other, second, then = await front.start()
        first.send(b"end")

        assert (one.pid, said["parent"]) == (said["pid"], os.getpid())
        assert (await one.wait(), one.returncode) == (7, 7)
        await other.wait()
        assert then == {"is_new": True}
        first.close()
        second.close()


@pytest.mark.parametrize("front", ["sys.exit(1)"], indirect=True)
async def test_where_the_fork_server_cannot_start_workers_are_new_interpreters(
    front: Front,
) -> None:
    async with front.ending():
        process, ours, said = await front.start()
        await process.wait()
        ours.close()

        assert said == {"is_new": True}


async def test_a_start_that_is_given_up_leaves_no_worker(front: Front) -> None:
    async with front.ending():
        _, first, said = await front.start()
        os.kill(said["parent"], signal.SIGSTOP)
        given_up = asyncio.create_task(front.start())
        done, _ = await asyncio.wait([given_up], timeout=0.2)
        given_up.cancel()
        await asyncio.wait([given_up])
        os.kill(said["parent"], signal.SIGCONT)
        _, second, then = await front.start()  # after the one that was given up

        assert not done
        wanted = {said["pid"], then["pid"]}
        await asyncio.to_thread(
            eventually, lambda: children(said["parent"]) == wanted, 10, "there are two"
        )
        first.close()
        second.close()


async def test_a_fork_server_that_is_late_starts_no_second_worker_on_the_same_socket(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front.ending():
        _, first, said = await front.start()
        os.kill(said["parent"], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(start, "FORK_S", 0.2)
            new, second, words = await front.start()
        await new.wait()
        os.kill(said["parent"], signal.SIGCONT)
        _, third, _ = await front.start()  # after the request that was given up

        assert words == {"is_new": True}
        assert await asyncio.get_running_loop().sock_recv(second, 1 << 16) == b""
        for channel in (first, second, third):
            channel.close()


def children(pid: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_server_replaces_its_worker_by_a_fork() -> None:
    with serving(forkserver="") as server:
        expected = server.draw().json()["data"]
        before = server.worker()

        os.kill(before, signal.SIGKILL)
        eventually(lambda: server.workers() not in ([], [before]), 30, "there is another worker")
        eventually(lambda: server.health() == 200, 30, "it is ready")

        assert server.draw().json()["data"] == expected
        names = sorted(Path(f"/proc/{pid}/comm").read_text() for pid in server.processes())
        assert names[:2] == ["carpool-fork\n", "carpool-worker\n"]


async def test_without_a_fork_server_the_worker_is_a_new_interpreter(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORKSERVER_VARIABLE, "off")
    front.starter = ForkingStarter()
    async with front.ending():
        _, ours, said = await front.start()
        ours.close()
        assert (said, front.modules) == ({"is_new": True}, ["process"])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_nothing_stays_of_a_server_that_ends_while_its_fork_server_imports(
    end: signal.Signals,
) -> None:
    with starting(forkserver="") as server:
        server.wait_listening()
        eventually(lambda: len(server.processes()) == 2, 30, "its fork server has started")

        server.signal(end)

        server.wait(30)  # for all of its processes
