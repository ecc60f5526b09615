"""The servers that the live benchmark compares: real ones on loopback, torch on one thread."""

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

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 180.0  # imports of torch and diffusers on a busy machine
QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}


@dataclass(frozen=True, slots=True)
class Party:
    """A way to serve the embedded model."""

    name: str  # in tables
    module: str  # runs with the flags, then a port
    flags: tuple[str, ...] = ()
    mode: BatchingMode | None = None  # batching mode of Carpool

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", self.module, *self.flags, str(port)]


def _carpool(mode: BatchingMode, *flags: str) -> Party:
    always = ("serve", "shapes", "--log-level", "warning", "--batching-mode", mode)
    return Party(f"carpool {mode}", "carpool.cli.main", (*always, *flags, "--port"), mode)


LOCKED = Party("FastAPI, lock", "benchmarks.others.locked_server")
LITSERVE = Party("LitServe", "benchmarks.others.litserve_server")
PARTIES = (
    LOCKED,
    LITSERVE,
    _carpool("off"),
    _carpool("dynamic", "--batching-max-size", "8", "--batching-delay-ms", "5"),
    _carpool("request", "--max-num-seqs", "8", "--request-batch-max-wait-ms", "20"),
    _carpool("continuous"),
)
"""Batch sizes and waits equal the simulated ones (`carpool_lab.simulate.scenario.MODES`)."""


@contextlib.asynccontextmanager
async def running(party: Party, cache: Path) -> AsyncIterator[str]:
    """Start a server and yield its URL when healthy; at the end all its processes are killed.

    Args:
        cache: folder for compiled Python, so only the first start is slow.

    Raises:
        RuntimeError: it stopped, or was not healthy in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("CARPOOL_")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        environ |= QUIET | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPYCACHEPREFIX": str(cache),
            "CARPOOL_COST_TABLE": str(Path(folder) / "costs.json"),  # starts without learned costs
        }
        process = await asyncio.create_subprocess_exec(
            *party.command(port),
            cwd=ROOT,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await _healthy(url := f"http://127.0.0.1:{port}", party, process)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):  # already stopped
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe's children survive it
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
