"""Timings and memory of an answer, under the names that vLLM-Omni's load clients read."""

import asyncio
import contextlib

from carpool.errors import CarpoolError
from carpool.server.bodies.peers import stage_durations
from carpool.server.bodies.schema import StageMetrics
from carpool.server.state import AppState
from carpool.types import Timings

PATIENCE_S = 1.0  # for the worker's word on memory


async def peak_memory_mb(state: AppState) -> float | None:
    """The most memory of the device that was in use so far, 10**6 bytes; None without a worker."""
    with contextlib.suppress(CarpoolError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            statistics = await state.backend.statistics()
            return round(float(statistics["memory"]["peak_bytes"]) / 1e6, 3)
    return None


async def stage_metrics(state: AppState, timings: Timings) -> StageMetrics:
    """The metrics of an answer."""
    return StageMetrics(
        stage_durations=stage_durations(timings), peak_memory_mb=await peak_memory_mb(state)
    )
