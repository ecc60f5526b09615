"""A `carpool serve` that restarts after every death, as under systemd.

Port, state folder and flags are always the same. All lives share one log file.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

import carpool.models
from carpool.config import FAULT_VARIABLE
from carpool.worker.startup import PROCESS_NAME

MARK = "RELIABILITY_PROOF"  # environment variable that identifies the processes
START_LIMIT_S = 180.0  # imports of torch and diffusers on a busy machine
RESTART_S = 0.1  # systemd's RestartSec
MODELS = ("one", "two")  # names of a fleet's models
_TICKS = os.sysconf("SC_CLK_TCK")


def now_s() -> float:
    """Seconds since boot: the clock of `start_of`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class House:
    """One server and its folder."""

    folder: Path  # folder of its log
    flags: tuple[str, ...] = ()
    model: str = "shapes"  # "": set by the flags
    fault: str = ""  # additional faults; see `carpool.engine.faults`
    port: int = field(default_factory=lambda: _free_port())
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    def start(self) -> None:
        """Start the front, which starts a worker."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CARPOOL_")}
        environ |= {MARK: self.mark, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environ |= {FAULT_VARIABLE: f"{os.environ.get(FAULT_VARIABLE, '')},{self.fault}"}
        environ |= {"CARPOOL_COST_TABLE": str(self.folder / "costs.json")}
        command = [sys.executable, "-m", "carpool.cli.main", "serve"]
        command += [*([self.model] if self.model else []), "--port"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self.port), *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    @property
    def front(self) -> int:
        """The front's process id."""
        assert self.process is not None
        return self.process.pid

    def workers(self) -> list[int]:
        """Processes that hold or load a model; the newest last."""
        return sorted(self.processes(PROCESS_NAME.encode()), key=start_of)

    def fork_servers(self) -> list[int]:
        """Processes that workers are forked from."""
        return self.processes(b"carpool-fork")

    def processes(self, name: bytes = b"") -> list[int]:
        """All live processes, with any parent, or those of a name."""
        marker = f"{MARK}={self.mark}".encode()
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        pids = [pid for pid in pids if marker in _read(pid, "environ")]
        return [pid for pid in pids if not name or _read(pid, "comm").strip() == name]

    def signal_worker(self, number: signal.Signals, place: int = -1) -> int | None:
        """Send a signal to a worker, by default the newest; returns its process id, if any."""
        workers = self.workers()
        if not workers:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid := workers[place % len(workers)], number)
        return pid

    def kill_front(self) -> None:
        """Kill the front, and wait until the process is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def ready(
        self, http: httpx2.AsyncClient, workers: int = 1, within_s: float = START_LIMIT_S
    ) -> float:
        """Wait until the server accepts requests; returns the time, by `now_s`.

        Args:
            workers: of several workers, all must have loaded their model.

        Raises:
            RuntimeError: the front exited, or the wait is too long.
        """
        deadline_s = now_s() + within_s
        while now_s() < deadline_s:
            if await self.is_ready(http) and (workers == 1 or await self.is_whole(http, workers)):
                return now_s()
            self.check_alive()
            await asyncio.sleep(0.05)
        raise RuntimeError(f"not ready after {within_s:g} s:\n{self.last_words()}")

    def check_alive(self) -> None:
        """Raise RuntimeError if the front has exited."""
        assert self.process is not None
        if (status := self.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {status}:\n{self.last_words()}")

    async def is_whole(self, http: httpx2.AsyncClient, workers: int) -> bool:
        """Return whether every worker is ready."""
        try:
            health = (await http.get(f"{self.url}/health", timeout=2.0)).json()
        except httpx2.RequestError:
            return False
        states = [worker["state"] for worker in health.get("workers", [])]
        return workers == 1 or (len(states) == workers and set(states) == {"ready"})

    async def is_ready(self, http: httpx2.AsyncClient) -> bool:
        """Return whether the server accepts requests."""
        try:
            return (await http.get(f"{self.url}/health", timeout=2.0)).status_code == 200
        except httpx2.RequestError:
            return False

    def last_words(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-2000:]

    def kill_all(self) -> None:
        """Kill all processes of the server, and wait for the front's end."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


@contextlib.asynccontextmanager
async def open_house(
    house: House, http: httpx2.AsyncClient, workers: int = 1
) -> AsyncIterator[House]:
    """Start a server and wait until it is ready; at the end all its processes are killed."""
    try:
        house.start()
        await house.ready(http, workers)
        yield house
        assert house.process is not None
        house.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(house.process.wait, 40)
    finally:
        house.kill_all()


def fleet_of(folder: Path, workers: int) -> tuple[str, ...]:
    """Flags of a server of two models with `workers` workers in total."""
    counts = zip(MODELS, (workers - 1, 1), strict=True)
    entries = [f"  - {{model: shapes, name: {name}, workers: {count}}}\n" for name, count in counts]
    (file := folder / "fleet.yaml").write_text("models:\n" + "".join(entries))
    return "--config", str(file)


def adapters(folder: Path) -> tuple[str, ...]:
    """Flags of a server with an adapter folder: one valid and one truncated file."""
    (place := folder / "adapters").mkdir()
    adapter = Path(str(carpool.models.__file__)).parent / "shapes_lora" / "outlined.safetensors"
    shutil.copy(adapter, place / "ink.safetensors")
    (place / "torn.safetensors").write_bytes(adapter.read_bytes()[:1000])
    return "--lora-dir", str(place)


def start_of(pid: int) -> float:
    """The start of a process, by `now_s`; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) / _TICKS if fields else 0.0


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """Fields of `/proc/PID/stat` from the state on (proc_pid_stat(5), field 3)."""
    return _read(pid, "stat").rpartition(b") ")[2].split()


def _read(pid: int, entry: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{entry}").read_bytes()
    except OSError:  # it has exited, or is another user's
        return b""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port: int = door.getsockname()[1]
    return port
