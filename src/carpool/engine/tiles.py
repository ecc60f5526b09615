"""Retry calls that run out of device memory: first with freed memory, then in tiles.

A forward of several calls is cut in two instead: see `execute.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from carpool.engine.execute import RunCalls
from carpool.engine.request import RequestState
from carpool.engine.sweep import wait_for_others


class Tiles:
    """Runs the calls of one engine that run out of memory.

    Args:
        free: releases cached device memory before a retry.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free

    def around(self, run: RunCalls) -> RunCalls:
        """Wrap a forward: retry a single call that runs out of memory up to twice."""

        def fitting(states: Sequence[RequestState]) -> list[Any]:
            try:
                return run(states)
            except torch.OutOfMemoryError:
                if len(states) > 1:
                    raise
            # Out of the `except`, so that the traceback no longer holds the forward's activations.
            self._free_last()
            try:
                return run(states)
            except torch.OutOfMemoryError:
                module = states[0].call.target.module
                if not hasattr(module, "enable_tiling") or getattr(module, "use_tiling", True):
                    raise
            self._free_last()
            return self._in_tiles(run, states[0])

        return fitting

    def _in_tiles(self, run: RunCalls, state: RequestState) -> list[Any]:
        target = state.call.target
        module: Any = target.module
        module.enable_tiling()
        try:
            answers = run([state])
        finally:
            module.use_tiling = False
        state.warnings.append(
            f"{target.component}.{target.method} did not fit the device's memory and ran in tiles: "
            "seams may show; a smaller size needs none"
        )
        return answers

    def _free_last(self) -> None:
        wait_for_others()
        self._free()
