"""The servers that are compared here: real ones on loopback, torch on one thread."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

from carpool.config import BatchingMode

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 300.0  # imports of torch and diffusers on a busy machine
QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}


@dataclass(frozen=True, slots=True)
class Party:
    """A way to serve a model."""

    name: str  # in tables
    module: str  # run with the folder of the model, flags, and a port
    flags: tuple[str, ...] = ()
    mode: BatchingMode | None = None  # of Carpool's

    def command(self, folder: Path, port: int) -> list[str]:
        place = ("serve", str(folder)) if self.mode else (str(folder),)
        return [sys.executable, "-m", self.module, *place, *self.flags, str(port)]


def _carpool(mode: BatchingMode, name: str, *flags: str) -> Party:
    always = ("--log-level", "warning", "--batching-mode", mode, *flags, "--port")
    return Party(f"Carpool `{mode}`{name}", "carpool.cli.main", always, mode)


LOCKED = Party("plain diffusers, lock", "benchmarks.peers.locked_server")


def parties(caps: tuple[int, ...] = (4, 8), flags: str = "") -> list[Party]:
    """All of them; batches of at most so many requests; `flags`: of one more `continuous` each."""
    party_list = [LOCKED, _carpool("off", "")]
    for cap in caps:
        size, name = str(cap), f", {cap}"
        batches = ("--batching-max-size", size, "--batching-delay-ms", "5")
        party_list += [
            Party(f"LitServe{name}", "benchmarks.peers.litserve_server", (size,)),
            _carpool("dynamic", name, *batches),
            _carpool("continuous", name, "--max-batch-size", size),
        ]
        if flags:
            options = ("--max-batch-size", size, *flags.split())
            party_list.append(_carpool("continuous", f"{name}, {flags}", *options))
    return party_list


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs."""

    url: str
    pid: int | None = None  # of its first process; None: its CPU time is not known

    def cpu_s(self) -> float | None:
        """Seconds that its processes and those that they have seen the end of used so far."""
        return None if self.pid is None else _cpu_s(self.pid)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task").glob("*/children")
        below = [int(child) for file in children for child in file.read_text().split()]
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_s, below))


@contextlib.asynccontextmanager
async def running(party: Party, folder: Path) -> AsyncIterator[Server]:
    """Start a server and give it once it is healthy; in the end all its processes are gone.

    Args:
        folder: of the model.

    Raises:
        RuntimeError: it ended by itself, or was not healthy in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("CARPOOL_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as scratch:
        environ |= QUIET | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CARPOOL_COST_TABLE": str(Path(scratch) / "costs.json"),  # nothing is known beforehand
        }
        process = await asyncio.create_subprocess_exec(
            *party.command(folder, port),
            cwd=ROOT,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await _healthy(url := f"http://127.0.0.1:{port}", party, process)
            yield Server(url, process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe's children outlive it
            await process.wait()


async def _healthy(url: str, party: Party, process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(START_LIMIT_S), httpx2.AsyncClient(trust_env=False) as http:
            while process.returncode is None:
                with contextlib.suppress(httpx2.RequestError):
                    if (await http.get(f"{url}/health")).is_success:
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RuntimeError(f"{party.name} is not healthy after {START_LIMIT_S:g} s") from None
    raise RuntimeError(f"{party.name} ended with {process.returncode}; what it said is above")
