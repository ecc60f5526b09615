"""diffusers' context parallelism: check that a model has a plan for it, and enable it.

Each rank computes attention's share of a sequence; diffusers' hooks split the inputs of a denoiser
and gather its outputs, so every rank must make the same calls with the same inputs. Sequences need
not be divisible by the number of ranks (`ulysses_anything`, `ring_anything`).
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from carpool.errors import LoadFailed, SettingRejected
from carpool.settings.engine import ContextParallelKind
from carpool.settings.preparation import is_denoiser

log = logging.getLogger("carpool")

LOOPBACK = "127.0.0.1"
WRONG = {"LTX2VideoTransformer3DModel": "divides neither its rotary positions nor its sound"}
"""Plans of diffusers 0.42 that give wrong images, or none."""

PROVEN = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel", "WanTransformer3DModel",
)  # fmt: skip
"""Classes for which tests prove that a group and one process draw the same images."""

PATIENCE = timedelta(minutes=5)  # limit for joining, and for any collective operation
BACK_ENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def check_classes(classes: Mapping[str, type], ranks: int) -> list[str]:
    """Check a model's classes; returns the components that a group computes together.

    Args:
        classes: the classes of the model's modules, by component.

    Raises:
        SettingRejected: a denoiser has no plan; the text names an alternative.
    """
    denoisers = {name: cls for name, cls in classes.items() if is_denoiser(name)}
    for name, cls in denoisers.items():
        if cls.__name__ in WRONG:
            raise SettingRejected(
                f"context_parallel={ranks}: diffusers' plan for {name} ({cls.__name__}) "
                f"{WRONG[cls.__name__]}: serve this model with workers={ranks}",
                param="context_parallel",
            )
    for name, cls in denoisers.items() or [("denoiser", nn.Module)]:
        if getattr(cls, "_cp_plan", None) is None:
            raise SettingRejected(
                f"context_parallel={ranks}: diffusers has no plan for the {name} of this model "
                f"({cls.__name__}); it has one for {', '.join(_planned())}. Serve this model with "
                f"workers={ranks}: each request on one device",
                param="context_parallel",
            )
    return list(denoisers)


def _planned() -> list[str]:
    names = [name for name in dir(diffusers) if "Transformer" in name and name.endswith("Model")]
    return [
        name
        for name in names
        if name not in WRONG and getattr(getattr(diffusers, name), "_cp_plan", None)
    ]


def listen() -> socket.socket:
    """A free port of the loopback address, for the ranks to find each other."""
    return socket.create_server((LOOPBACK, 0))


def join(
    rank: int, ranks: int, device: torch.device, port: int, listener: socket.socket | None = None
) -> None:
    """Make this process a member of the group; returns when all ranks are members.

    Args:
        port: rank 0's port.
        listener: rank 0's listening socket; None in other ranks.

    Raises:
        LoadFailed: the ranks did not connect in time.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # default: the host name's
        os.environ.setdefault(variable, loopback)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, ranks, is_master=listener is not None, timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
        dist.init_process_group(
            BACK_ENDS[device.type], store=store, rank=rank, world_size=ranks, timeout=PATIENCE
        )
    except (RuntimeError, ValueError) as error:
        raise LoadFailed(f"context_parallel: rank {rank} could not join: {error}") from error


def leave() -> None:
    """End this process's membership."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_process() -> None:
    """Raise if this process is a member of another group: torch supports one at a time."""
    if dist.is_initialized():
        raise LoadFailed(
            "context_parallel: this process has initialized torch.distributed already: serve from "
            "another process, as carpool serve does"
        )


def enable(
    modules: Mapping[str, nn.Module], ranks: int, kind: ContextParallelKind, device: torch.device
) -> None:
    """Enable context parallelism, in all ranks at the same time.

    Raises:
        SettingRejected: diffusers refuses it, for example because of the attention back end.
    """
    is_ring = kind == "ring"
    shape = (ranks, 1) if is_ring else (1, ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
    for name, module in modules.items():
        if type(module).__name__ not in PROVEN and dist.get_rank() == 0:
            log.warning(
                "%s (%s): diffusers has a plan for its context parallelism, but no test shows "
                "that images are the same: compare some with context_parallel=1",
                name, type(module).__name__,
            )  # fmt: skip
        config = ContextParallelConfig(
            ring_degree=ranks if is_ring else 1,
            ulysses_degree=1 if is_ring else ranks,
            ulysses_anything=not is_ring,
            ring_anything=is_ring,
            mesh=mesh,
        )
        try:
            with _counted_devices():
                module.enable_parallelism(config=config)  # type: ignore[operator]
        except (ValueError, RuntimeError) as error:
            raise SettingRejected(f"context_parallel: {name}: {error}") from error


@contextlib.contextmanager
def _counted_devices() -> Iterator[None]:
    """Report one accelerator on a machine without any: diffusers 0.42 divides by their number."""
    count = torch.accelerator.device_count
    if count() == 0:
        torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count
