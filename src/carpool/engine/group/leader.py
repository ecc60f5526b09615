"""The leader of a group, rank 0: starts the followers, and has them run each forward with it.

The leader's denoisers are wrapped: a call first sends its arguments to the followers, then all
ranks run the same forward. So any caller of a denoiser (requests, warm-up, comparisons in exact
numerics) runs it in all ranks. If a forward fails in all ranks, the request at fault fails alone. A
rank that dies, or fails alone, ends the group at once (`at_loss`): the others would wait for it
forever in a collective operation.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from carpool.config import EngineSettings
from carpool.engine.adapters.hooks import AdapterPlan, Adapters
from carpool.engine.adapters.parts import packed
from carpool.engine.digests import raw_bytes
from carpool.engine.group import context_parallel, messages, packing
from carpool.engine.nested import tensors_in
from carpool.engine.numerics import Exact
from carpool.errors import LoadFailed, PipelineFailed, named

log = logging.getLogger("carpool")

GRACE_S = 10.0  # if one rank fails in a forward, all others must fail within this time
END_S = 5.0  # timeout of followers' exit


class Followers:
    """The followers of this process, and the shared forwards.

    Args:
        source: the model, from `carpool.models.source.find`.
        settings: the settings of each follower, with its device.
        device: this rank's device.
        components: components that are computed together.
        spare_components: the other components of the model.
    """

    def __init__(
        self,
        source: str,
        settings: Sequence[EngineSettings],
        device: torch.device,
        components: Sequence[str],
        spare_components: Sequence[str],
    ) -> None:
        context_parallel.check_process()
        self.ranks, self.device = 1 + len(settings), device
        self.kind = settings[0].context_parallel_kind
        self.at_loss: Callable[[], object] = lambda: os._exit(1)
        self._packer = packing.Packer(device)
        self._adapters: Adapters | None = None
        self._broadcasts: set[tuple[str, str]] = set()  # sent adapters: name and component
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._devices = [str(device), *(rank_settings.device for rank_settings in settings)]
        self._news = threading.Condition()
        self._errors: dict[int, str | None] = {}  # latest forward, by rank; None: it ran
        self._running: int | None = None  # number of the running forward
        self._failed: int | None = None  # number of the last forward that failed in this rank
        self._number = self._bytes = self._tensors = self._reused = 0
        self._send_s = 0.0  # processor time
        self._is_closed = self._is_lost = False
        self._watching = threading.Thread(target=self._watch, name="carpool-group", daemon=True)
        for rank, rank_settings in enumerate(settings, start=1):
            own_end, follower_end = Pipe()
            with follower_end:
                command = [sys.executable, "-m", "carpool.engine.group.follower"]
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(follower_end.fileno())], pass_fds=[follower_end.fileno()],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                             "TRANSFORMERS_VERBOSITY": "error"},
                    )
                )  # fmt: skip
            self._connections.append(own_end)
            self._tell(
                messages.LoadFollower(
                    source, msgspec.json.encode(rank_settings), list(components),
                    list(spare_components), rank, self.ranks,
                ),
                only=rank,
            )  # fmt: skip

    def join(self, modules: Mapping[str, nn.Module]) -> None:
        """Wait until the followers have loaded; from then on compute these modules together.

        Raises:
            LoadFailed, SettingRejected: a rank failed.
        """
        for rank in range(1, self.ranks):
            loaded = self._hear(rank)
            assert isinstance(loaded, messages.Loaded)
            self._devices[rank] = loaded.device
        with context_parallel.listen() as listener:
            port = listener.getsockname()[1]
            self._tell(messages.Join(port))
            context_parallel.join(0, self.ranks, self.device, port, listener)
        context_parallel.enable(modules, self.ranks, self.kind, self.device)
        for rank in range(1, self.ranks):
            assert isinstance(self._hear(rank), messages.Joined)
        for name, module in modules.items():
            vars(module)["forward"] = self._leading(name, module.forward)
        self._watching.start()
        log.info("%d ranks compute together (%s): %s", self.ranks, self.kind, self._devices)

    def attach(self, adapters: Adapters) -> None:
        """Use these adapters in forwards from now on."""
        if self._broadcasts:
            self._tell(messages.Forget())
            self._broadcasts.clear()
        self._adapters = adapters

    def close(self) -> None:
        """End the followers."""
        self._is_closed = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(messages.encode(messages.EndFollower()))
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()
        if self._watching.ident is not None and self._watching is not threading.current_thread():
            self._watching.join()
        for connection in self._connections:
            connection.close()
        context_parallel.leave()

    def statistics(self) -> dict[str, Any]:
        """The ranks with their processes and devices, and the traffic to the followers.

        `send_s` is processor time; `known` counts the `tensors` that the followers already
        had.
        """
        pids = [os.getpid(), *(process.pid for process in self._processes)]
        return {
            "kind": self.kind,
            "ranks": [
                {"rank": rank, "pid": pid, "device": device}
                for rank, (pid, device) in enumerate(zip(pids, self._devices, strict=True))
            ],
            "forwards": self._number,
            "sent_bytes": self._bytes,
            "tensors": self._tensors,
            "known": self._reused,
            "kept_bytes": self._packer.kept_bytes,
            "send_s": self._send_s,
        }

    # Forwards, on the engine's thread

    def _leading(self, component: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._send(component, args, kwargs)
            try:
                answer = original(*args, **kwargs)
            except BaseException as error:
                self._compare(number, error)
                raise
            finally:
                self._running = None
            return answer

        forward.leads = True  # type: ignore[attr-defined]
        return forward

    def _send(self, component: str, args: Any, kwargs: Any) -> int:
        """Start a forward in the followers; returns its number."""
        if self._is_lost:
            raise PipelineFailed("context_parallel: the group has ended")
        began_s = time.thread_time()
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        exact = next((mode for mode in modes if isinstance(mode, Exact)), None)
        with torch._C.DisableTorchFunction():  # the mode is for the forward only
            arguments, new = self._packer.pack((args, kwargs), f"{component}.forward")
            tensors = list(tensors_in((args, kwargs)))
            self._tensors += len(tensors)
            self._reused += len(tensors) - len(new)
            try:
                self._send_adapters(component)
                marks = {}
                if exact is not None:
                    tensors_marks = [(tensor, exact.mark_of(tensor)) for tensor in tensors]
                    marks = {self._packer.key_of(t): mark for t, mark in tensors_marks if mark}
                with self._news:
                    self._number += 1
                    self._running = self._number
                    self._errors.clear()
                message = messages.RunForward(
                    self._number, component, arguments,
                    [packing.described(key, tensor, self.device) for key, tensor in new],
                    self._packer.forgotten(),
                    None if exact is None else list(exact.rows), marks, *self._applied,
                )  # fmt: skip
                self._broadcast(message, [tensor for _, tensor in new])
            except BaseException as error:  # the followers may have received a part
                self._lose(f"a forward could not be sent: {named(error)}")
                raise
        self._send_s += time.thread_time() - began_s
        return self._number

    @property
    def _applied(self) -> tuple[AdapterPlan | None, bool]:
        return (None, True) if self._adapters is None else self._adapters.running

    def _send_adapters(self, component: str) -> None:
        """Send the layers of the next forward's adapters for a component, once."""
        plan, _ = self._applied
        for run in plan.runs if plan is not None else ():
            assert self._adapters is not None
            if (run.name, component) in self._broadcasts:
                continue
            layers = self._adapters.parts_of(run.name).items()
            parts = packed({path: part for (owner, path), part in layers if owner == component})
            self._bytes += self._tell(messages.Adapter(run.name, component, parts))
            self._broadcasts.add((run.name, component))

    def _broadcast(self, message: messages.RunForward, tensors: list[torch.Tensor]) -> None:
        self._bytes += self._tell(message)
        for tensor in tensors:
            if tensor.device.type == self.device.type and tensor.numel():
                dist.broadcast(raw_bytes(tensor), src=0)
                self._bytes += tensor.nbytes

    def _compare(self, number: int, error: BaseException) -> None:
        """End the group unless the followers failed in the same forward as this rank."""
        with self._news:
            self._failed = number
            self._news.wait_for(
                lambda: self._is_lost or len(self._errors) == self.ranks - 1, GRACE_S
            )
            have_failed = [error for error in self._errors.values() if error is not None]
        if len(have_failed) < self.ranks - 1:
            self._lose(f"rank 0 failed alone in a forward: {named(error)}")

    # Messages

    def _tell(self, message: messages.ToFollower, only: int | None = None) -> int:
        """Send a message to all followers, or to one; returns the number of bytes."""
        body = messages.encode(message)
        connections = self._connections if only is None else [self._connections[only - 1]]
        for connection in connections:
            try:
                connection.send_bytes(body)
            except OSError as error:
                rank = 1 + self._connections.index(connection)
                self._lose(f"rank {rank} has ended")
                raise self._ended(rank) from error
        return len(body) * len(connections)

    def _hear(self, rank: int) -> messages.ToLeader:
        """Receive the next message of a follower, before the first forward.

        Raises:
            LoadFailed: it has ended, or cannot continue.
        """
        while True:
            try:
                message = messages.to_leader(self._connections[rank - 1].recv_bytes())
            except (EOFError, OSError) as error:
                raise self._ended(rank) from error
            if isinstance(message, messages.Failed):
                raise LoadFailed(f"context_parallel: rank {rank}: {message.message}")
            if not isinstance(message, messages.Said):
                return message
            log.log(message.level, "rank %d: %s", rank, message.line)

    def _ended(self, rank: int) -> LoadFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank - 1].wait(1)
        code = self._processes[rank - 1].returncode
        text = f"context_parallel: rank {rank} ended while the group was formed (exit code {code})"
        error = LoadFailed(text)
        error.was_killed = code is not None and code < 0  # killed by a signal
        return error

    def _lose(self, why: str) -> None:
        """End the group: its ranks are out of step."""
        with self._news:
            if self._is_lost or self._is_closed:
                return
            self._is_lost = True
            self._news.notify_all()
        if self._watching.ident is not None:  # otherwise no forward has run yet
            log.critical("the group ends; its requests continue in the next one: %s", why)
            self.at_loss()

    # On the watching thread

    def _watch(self) -> None:
        """Receive from the followers; end the group when one has died, or failed alone."""
        failed: tuple[str, int, float] | None = None  # the reason, the forward, the time of failure
        while True:
            for ready in wait(self._connections, None if failed is None else 0.1):
                assert isinstance(ready, Connection)
                rank = 1 + self._connections.index(ready)
                try:
                    message = messages.to_leader(ready.recv_bytes())
                except (EOFError, OSError):
                    self._lose(f"rank {rank} (process {self._processes[rank - 1].pid}) has ended")
                    return
                if isinstance(message, messages.Said):
                    log.log(message.level, "rank %d: %s", rank, message.line)
                elif isinstance(message, messages.Ran):
                    with self._news:
                        if message.number == self._number:
                            self._errors[rank] = message.error
                            self._news.notify_all()
                    if message.error is not None:
                        why = f"rank {rank} failed alone in a forward: {message.error}"
                        failed = failed or (why, message.number, time.monotonic())
            if failed is None:
                continue
            why, number, since_s = failed
            if self._failed == number:
                failed = None
            elif self._running != number or time.monotonic() - since_s > GRACE_S:
                self._lose(why)
                return
