"""Workers on the nodes of a Ray cluster. The only module that imports Ray.

Ray places workers, hands out their address and the fleet's secret, and starts them again on another
node when one is lost; requests go over our own connections (`remote.py`). Each worker is a detached
actor that keeps a worker's process (`host.py`): a front that starts again under the same fleet name
finds it, with its model loaded.

Source: the placement of vLLM's `RayExecutorV2`: Ray starts, own messages carry the work.
"""

import asyncio
import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from carpool.errors import SettingRejected, nearest
from carpool.fleet.handshake import new_secret
from carpool.fleet.host import WorkerHost
from carpool.fleet.remote import Address, RemoteConnection
from carpool.version import __version__

log = logging.getLogger("carpool")

JOIN_S = 30.0  # for an actor to say where it listens, once Ray has placed it
SLOW_S = 20.0  # until a worker that Ray does not place is worth a line
AGAIN_S = 0.5
INSTALL = "pip install 'carpool[ray]'"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """How workers are placed.

    Args:
        address: of the cluster; `auto`: that of this machine.
        fleet: fronts of the same name take over each other's workers.
        gpus: of each worker.
        workers_per_node: at most; None: as many as have room.
        keep_s: how long workers keep their models without a front.
        certificate, key: PEM of the workers' ends; empty: no TLS.
    """

    address: str = "auto"
    fleet: str = "carpool"
    gpus: float | None = None
    workers_per_node: int | None = None
    keep_s: float = 600.0
    certificate: str = ""
    key: str = field(default="", repr=False)
