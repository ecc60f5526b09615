"""A follower: a process that runs each forward of its group's denoisers along with the leader.

The leader starts it as `python -m carpool.engine.group.follower FD` with one end of a socket pair.
It loads the denoisers only. A thread reads messages, so that it notices the leader's death even
during a forward: then the process exits at once.
"""

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.adapters.parts import unpacked
from carpool.engine.group import context_parallel, messages, packing
from carpool.engine.model.assembly import read
from carpool.engine.model.device import Device
from carpool.engine.model.libraries import log_as_others
from carpool.engine.model.prepare import apply
from carpool.engine.numerics import Exact
from carpool.errors import CarpoolError, named
from carpool.telemetry import standard_streams

_SET_PDEATHSIG = 1  # Linux: prctl(2)


class Follower:
    """The follower's end of the socket pair."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="carpool-leader", daemon=True).start()

    def serve(self) -> None:
        """Load, join the group, and run forwards until the leader ends."""
        first = self._next()
        assert isinstance(first, messages.LoadFollower)
        try:
            settings = msgspec.json.decode(first.settings, type=EngineSettings)
            device = Device(settings)
            pipe, modules = load(first, settings, device)
            self.send(messages.Loaded(str(device.torch)))
            join = self._next()
            assert isinstance(join, messages.Join)
            context_parallel.join(first.rank, first.ranks, device.torch, join.port)
            kind = settings.context_parallel_kind
            context_parallel.enable(modules, first.ranks, kind, device.torch)
        except CarpoolError as error:
            self.send(messages.Failed(str(error)))
            return
        except Exception as error:  # files and libraries may raise anything
            self.send(messages.Failed(named(error)))
            return
        device.enter(sum(w.numel() for module in modules.values() for w in module.parameters()))
        torch.set_grad_enabled(False)
        self.send(messages.Joined())
        forwards = Forwards(modules, device.torch, Adapters(pipe, device.torch))
        while True:
            message = self._next()
            if isinstance(message, messages.RunForward):
                self.send(messages.Ran(message.number, forwards.run(message)))
            elif isinstance(message, messages.Adapter):
                forwards.add(message)
            elif isinstance(message, messages.Forget):
                forwards.forget()
            elif isinstance(message, messages.EndFollower):
                return

    def send(self, message: messages.ToLeader) -> None:
        try:
            self._connection.send_bytes(messages.encode(message))
        except OSError:
            os._exit(0)

    def _next(self) -> messages.ToFollower:
        return messages.to_follower(self._inbox.get())

    def _read(self) -> None:
        while True:
            try:
                self._inbox.put(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the leader is gone: nothing reads the answers


def load(
    order: messages.LoadFollower, settings: EngineSettings, device: Device
) -> tuple[Any, dict[str, nn.Module]]:
    """Read the group's components and prepare them like the leader.

    Returns:
        A pipeline of these modules only, and the modules by name.
    """
    pipe = read(order.source, settings, device, only=order.components)
    modules: dict[str, nn.Module] = {name: getattr(pipe, name) for name in order.components}
    for module in modules.values():
        module.eval().requires_grad_(False).to(device.torch)
    placeholders = {name: nn.Module() for name in order.spare_components}  # settings may name them
    apply({**placeholders, **modules}, settings, device, ExitStack())
    return pipe, modules


class Forwards:
    """Runs the same forwards as the leader.

    Args:
        modules: the modules by component.
        device: this rank's device.
        adapters: the modules' adapters.
    """

    def __init__(
        self, modules: dict[str, nn.Module], device: torch.device, adapters: Adapters
    ) -> None:
        self._modules, self._device, self._adapters = modules, device, adapters
        self._unpacker = packing.Unpacker(device, self._receive)

    def _receive(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=0)
        return buffer

    def run(self, message: messages.RunForward) -> str | None:
        """Run a forward; returns its error as text, or None."""
        self._unpacker.take(message.tensors)
        args, kwargs = self._unpacker.value(message.arguments)
        mode: Any = nullcontext()
        if message.exact is not None:
            mode = Exact(message.exact)
            for key, mark in message.marks.items():
                mode.mark(self._unpacker.tensors[key], mark)
        self._adapters.settle()
        before = self._adapters.swap((message.plan, message.is_even))
        try:
            with mode:
                self._modules[message.component](*args, **kwargs)
        except BaseException as error:  # the leader raises, too, or ends the group
            return named(error)
        finally:
            self._adapters.swap(before)
            self._unpacker.forget(message.forget)
        return None

    def add(self, message: messages.Adapter) -> None:
        """Add an adapter's layers for a component."""
        parts, component = unpacked(message.parts, self._device), message.component
        self._adapters.take(message.name, {(component, path): p for path, p in parts.items()})

    def forget(self) -> None:
        """Remove all adapters."""
        self._adapters.remove()


class _ToLeader(logging.Handler):
    """Sends warnings to the leader, for its log."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(logging.WARNING)
        self._follower = follower

    def emit(self, record: logging.LogRecord) -> None:
        self._follower.send(messages.Said(record.levelno, record.getMessage()))


def main() -> None:
    if sys.platform == "linux":  # a stopped follower would outlive the leader
        prctl = ctypes.CDLL(None).prctl
        prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal: the leader decides
    standard_streams.protect()
    log_as_others(bars=False)
    follower = Follower(Connection(int(sys.argv[1])))
    logging.getLogger().addHandler(_ToLeader(follower))
    follower.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
