"""A real `carpool serve` in a process of its own, for tests that speak HTTP to it.

`serving()` starts one, waits until it is ready, and at the end has it drain; leaving a process
behind fails the test. Processes are found by a mark in their environment, or by the server's log
that they have open, so none can hide by losing its parent. Fronts and workers are forked from two
processes that have all imported already (`forked_front`; `carpool.worker.forkserver`, which servers
have for themselves), unless a test asks for the real start. What all tests serve and draw stands
here once: `MODEL` and `DRAW`.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from carpool.config import FAULT_VARIABLE, FORKSERVER_VARIABLE
from carpool.worker.startup import PROCESS_NAME
from support import forked_front
from support.endpoints import ENDPOINT
from support.forked_front import Front
from support.tiny import checkpoint

FAMILY = "flux"
MODEL: str = str(checkpoint(FAMILY))  # what is served: a folder, or "shapes"
MODEL_ID = FAMILY  # what the server calls it
SIZE = (64, 64)
DRAW: dict[str, Any] = {"num_inference_steps": 3, "max_sequence_length": 48}
PATIENCE_S = 100  # for a start, which takes 5 s where the processor has nothing else to do
MARK = "SERVING_TEST"  # an environment variable
OWN_VARIABLES = (MARK, "TMPDIR", "XDG_STATE_HOME", "PYTEST_CURRENT_TEST")  # of a server, or a test


def body(prompt: str = "a red circle", **others: Any) -> dict[str, Any]:
    """A request as JSON, small and quick unless said otherwise."""
    return {"prompt": prompt, "size": f"{SIZE[0]}x{SIZE[1]}", "seed": 1, **DRAW, **others}


def drawn_by_diffusers(prompt: str, seed: int, **arguments: Any) -> Image.Image:
    """The picture that plain diffusers draws: nothing of Carpool is involved."""
    import torch

    from support.engine_driver import plain

    image = plain(FAMILY)(
        prompt=prompt, width=SIZE[0], height=SIZE[1], generator=torch.Generator().manual_seed(seed),
        **{**DRAW, **arguments},
    ).images[0]  # fmt: skip
    assert isinstance(image, Image.Image)
    return image


def eventually(is_so: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll until something is so; fail with `what` when it takes too long."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


@dataclass
class Server:
    """A running `carpool serve`."""

    process: subprocess.Popen[bytes] | Front
    folder: Path  # of its stdout and stderr
    mark: str
    url: str = ""

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def client(self, **options: Any) -> httpx2.Client:
        # a server without TLS: to read all authorities' certificates would take 20 ms a client
        options = {"timeout": PATIENCE_S, "trust_env": False, "verify": False, **options}
        return httpx2.Client(base_url=self.url, **options)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)

    def draw(self, **others: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(ENDPOINT, json=body(**others))

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/stats").json()
        return answer

    def health(self) -> int | None:
        """The status of `/health`; None when nothing answers."""
        try:
            return self.get("/health").status_code
        except httpx2.TransportError:
            return None

    def processes(self) -> list[int]:
        """Every living process that this server started, itself included."""
        wanted = f"{MARK}={self.mark}".encode()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and int(entry.name) != os.getpid()
            if wanted in _environ(entry) or self._has_log(entry)
        ]

    def _has_log(self, entry: Path) -> bool:
        """Whether a process has the server's output open."""
        logs = {str(self.folder / "stdout"), str(self.folder / "stderr")}
        try:
            return any(os.readlink(one) in logs for one in (entry / "fd").iterdir())
        except OSError:  # it ended just now, or is another user's
            return False

    def workers(self) -> list[int]:
        """The processes that hold a model, or load one."""
        return sorted(pid for pid in self.processes() if is_worker(pid))

    def worker(self) -> int:
        """The process that holds the model."""
        [pid] = self.workers()
        return pid

    def wait_listening(self) -> None:
        """Wait until it answers at all; it still loads its model then."""
        eventually(lambda: self._find("stderr"), PATIENCE_S, "the server listens")

    def wait_ready(self) -> None:
        eventually(self._is_greeting, PATIENCE_S, "it says where it serves")
        eventually(lambda: self.health() == 200, 10, "/health is 200")

    def _is_greeting(self) -> bool:
        """Does it say so? On stderr where the log is for machines."""
        return self._find("stderr" if '"Serving ' in self.stderr else "stdout")

    def _find(self, stream: str) -> bool:
        text = (self.folder / stream).read_text()
        assert self.process.poll() is None, f"the server ended:\n{self.stderr}"
        if found := re.search(r"http://[0-9.]+:[0-9]+", text):
            self.url = found[0]
        return bool(found)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 20) -> int:
        """Wait for its end, and for that of everything it started; gives the exit status."""
        status = self.process.wait(within_s)
        eventually(lambda: not self.processes(), 3, "every process is gone")
        return status


def is_worker(pid: int) -> bool:
    """Whether a process is a worker; not, if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME
    except OSError:
        return False


def _forkserver() -> str:
    """The socket of the fork server of all tests in this process, once it listens."""
    path = _begun_forkserver()
    eventually(lambda: Path(path).exists(), PATIENCE_S, "the fork server listens")
    return path


@cache  # who waited in vain has begun no second one: the next test waits for the same
def _begun_forkserver() -> str:
    """Start the fork server of all tests in this process; it ends with the process."""
    folder = tempfile.mkdtemp(prefix="forkserver-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = f"{folder}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "carpool.worker.forkserver", path, *OWN_VARIABLES],
        stdin=subprocess.DEVNULL,
        env=_environ_of_servers(),
    )
    atexit.register(process.wait)
    atexit.register(process.kill)  # before the wait
    return path


@cache
def _front_server() -> str:
    """The socket of the process that forks fronts; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="fronts-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    process = forked_front.start_server(path := f"{folder}/socket", _environ_of_servers())
    atexit.register(process.wait)
    atexit.register(process.kill)  # before the wait
    return path


def _environ_of_servers() -> dict[str, str]:
    """This process's, without settings of Carpool's, and what torch's compiler sets in tests."""
    others = ("CARPOOL_", "TORCHINDUCTOR_", "TRITON_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(others)}
    return environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _environ(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:  # it ended just now, or is another user's
        return b""


def ended(*arguments: str) -> tuple[int, str]:
    """Run `carpool`, which must end and load no torch; returns its status and what it said.

    It runs in a process forked from one that has imported the front.
    """
    with tempfile.TemporaryFile() as said:
        front = Front(_front_server(), arguments, _environ_of_servers(), said, said)
        try:
            status = front.wait(50)
        finally:
            front.kill()
        said.seek(0)
        return status, said.read().decode()


@contextmanager
def starting(
    *flags: str, model: str = MODEL, fault: str = "", forkserver: str | None = None
) -> Iterator[Server]:
    """Start a server, which may be loading still; in the end every process is gone.

    Args:
        fault: as `carpool.engine.faults` has it, beside those that this process has.
        forkserver: as `carpool.worker.start` has it: empty for the server's own one; None: one for
            all tests, and the front is forked, too.
    """
    mark = uuid.uuid4().hex
    environ = _environ_of_servers()
    environ |= {FAULT_VARIABLE: f"{os.environ.get(FAULT_VARIABLE, '')},{fault}"}
    environ |= {FORKSERVER_VARIABLE: _forkserver() if forkserver is None else forkserver}
    environ |= {MARK: mark}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ |= {"CARPOOL_COST_TABLE": str(folder / "costs.json")}
        environ |= {"XDG_STATE_HOME": str(folder / "state")}
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            arguments = ["serve", *filter(None, [model]), "--port", "0", *flags]
            process: subprocess.Popen[bytes] | Front
            if forkserver is None:
                process = Front(_front_server(), arguments, environ, stdout, stderr)
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", "carpool.cli.main", *arguments],
                    stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ,
                )  # fmt: skip
        server = Server(process, folder, mark)
        try:
            yield server
            if process.poll() is None:
                server.signal()
            server.wait()
        finally:
            for pid in server.processes():
                os.kill(pid, signal.SIGKILL)
            process.wait()


@contextmanager
def serving(
    *flags: str, model: str = MODEL, fault: str = "", forkserver: str | None = None
) -> Iterator[Server]:
    """Start a server and wait until it is ready."""
    with starting(*flags, model=model, fault=fault, forkserver=forkserver) as server:
        server.wait_ready()
        yield server
