"""Timings and memory of an answer, with the field names of vLLM-Omni's load clients."""

import asyncio
import contextlib

from carpool.errors import CarpoolError
from carpool.server.bodies.schema import StageMetrics
from carpool.server.state import AppState
from carpool.telemetry.worker_statistics import workers_of
from carpool.types import Timings

PATIENCE_S = 1.0  # timeout of the workers' statistics


async def peak_memory_mb(state: AppState, model: str) -> float | None:
    """Peak memory of a model's workers so far, in 10**6 bytes; None if unknown."""
    with contextlib.suppress(CarpoolError, TimeoutError):
        if (pool := state.fleet.of(model).pool) is not None:
            async with asyncio.timeout(PATIENCE_S):
                statistics = await pool.statistics()
            memory = [worker.statistics["memory"] for worker in workers_of("", statistics)]
            peaks = [sizes["peak_bytes"] for sizes in memory]
            return round(max(peaks) / 1e6, 3) if peaks else None
    return None


def stage_durations(timings: Timings) -> dict[str, float]:
    """Seconds of each phase, and total milliseconds without the queue (`_gen_ms`)."""
    phases = ("queue", "encode", "denoise", "decode")
    durations = {name: round(getattr(timings, f"{name}_s"), 6) for name in phases}
    return durations | {"stage_0_gen_ms": round(1000 * (timings.total_s - timings.queue_s), 3)}


async def stage_metrics(state: AppState, model: str, timings: Timings) -> StageMetrics:
    """The metrics of an answer."""
    return StageMetrics(
        stage_durations=stage_durations(timings), peak_memory_mb=await peak_memory_mb(state, model)
    )
