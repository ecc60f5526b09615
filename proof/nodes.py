"""Two nodes of a Ray cluster on this machine, for `chaos`: killed, stopped, and cut off.

It needs Ray (`make .venv/ray`). A node's processes are the descendants of its raylet. A worker's
host, the actor between its process and the front, stands for its network.
"""

import contextlib
import os
import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from carpool.config import FAULT_VARIABLE
from proof.house import MARK, House, parent_of

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}  # room for two workers
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # everything listens on this machine only
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Nodes:
    """The nodes of a cluster with room for workers."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes = [cluster.add_node(**NODE) for _ in range(2)]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a server with workers on this cluster."""
        return "--ray", self._cluster.address, "--fleet-name", "chaos", "--device", "cpu"

    def kill(self, rng: random.Random) -> None:
        """Kill a node with all its processes."""
        node = self._nodes.pop(rng.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        """Add a node."""
        self._nodes.append(self._cluster.add_node(**NODE))

    def processes(self, rng: random.Random, house: House) -> list[int]:
        """The processes of a random node."""
        infos = rng.choice(self._nodes).all_processes["raylet"]
        raylet = infos[0].process.pid
        return [pid for pid in house.processes() if raylet in ancestors(pid)]

    @staticmethod
    def host(rng: random.Random, house: House) -> list[int]:
        """The process that connects a random worker to the front."""
        workers = house.workers()
        return [parent_of(rng.choice(workers))] if workers else []


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process and its ancestors."""
    while pid > 1:
        yield pid
        pid = parent_of(pid)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the live ones of these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def nodes(mark: str, folder: str, fault: str) -> Iterator[Nodes]:
    """Start a cluster whose processes a `House` with this mark finds; stop it at the end.

    Args:
        folder: folder for its workers' files.
        fault: faults of its workers; see `carpool.engine.faults`.
    """
    environ = {**ENVIRONMENT, MARK: mark, "XDG_CACHE_HOME": folder, FAULT_VARIABLE: fault}
    with patch.dict(os.environ, environ):
        from ray.cluster_utils import Cluster  # reads the environment

        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield Nodes(cluster)
        finally:
            cluster.shutdown()
