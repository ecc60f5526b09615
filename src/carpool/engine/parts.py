"""The shared parts of one engine, built once."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from carpool.config import EngineSettings
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.conditioning_cache import MOST_MIB, MOST_SHARE, ConditioningCache
from carpool.engine.containment import Stages
from carpool.engine.delivery import OffLoop, RunOffLoop, deliver
from carpool.engine.faults import Faults
from carpool.engine.flattened_encoders import add_aliases
from carpool.engine.intercept import Interception, tell_of_compilations
from carpool.engine.isolation import Isolation
from carpool.engine.language.tokens import reader_of
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.model.settings_used import SettingsUsed
from carpool.engine.model.stopwatch import Stopwatch
from carpool.engine.observe import truncation
from carpool.engine.observe.stats import LoopProgress, Stats
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.queue import RequestQueue
from carpool.engine.request import RequestState
from carpool.engine.specs.infer import reads_caches
from carpool.engine.sweep import Sweeps
from carpool.engine.tokenizers import Tokenizers
from carpool.types import Clock


class Installation:
    """The patches of an engine on modules and libraries while it runs. For its thread.

    The order matters: isolation records the modules before they are patched, so it is created
    first and removed last.
    """

    def __init__(self, loaded: LoadedPipeline, heartbeat: LoopProgress, *, is_exact: bool) -> None:
        self._loaded, self._heartbeat = loaded, heartbeat
        pipelines = loaded.originals.values()
        self.isolation = Isolation(loaded.modules, loaded.device.torch, pipelines)
        self.interception = Interception(loaded.modules, partial(reader_of, is_exact=is_exact))
        truncation.install()
        self._tokenizers = Tokenizers(loaded.pipe.components)
        self.adapters = Adapters(loaded.pipe, loaded.device.torch, is_exact=is_exact)
        self._undo = ExitStack()

    def install(self) -> None:
        self.interception.install()
        modules, heartbeat = self._loaded.modules.values(), self._heartbeat
        self._undo.callback(tell_of_compilations(modules, heartbeat.compiling, heartbeat.compiled))
        self.isolation.install()
        self._tokenizers.install()
        add_aliases(modules, self._undo)

    def remove(self) -> None:
        self.interception.remove()
        self._tokenizers.remove()
        self._undo.close()
        self.adapters.remove()
        self.isolation.remove()
        if not self._loaded.device.is_lost:
            self._loaded.undo()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One engine's model, settings, clock, and shared services."""

    loaded: LoadedPipeline
    settings: EngineSettings
    clock: Clock
    faults: Faults | None  # None: no fault injection
    stages: Stages
    heartbeat: LoopProgress
    stats: Stats
    timelines: TimelineStore
    queue: RequestQueue
    installation: Installation
    watch: Stopwatch  # times forwards on the device
    sweeps: Sweeps | None  # None: no streamed weights
    off_loop: OffLoop
    deliver: Callable[[RequestState, Any, Exception | None, float], None]  # see `delivery`
    conditioning: ConditioningCache

    @property
    def adapters(self) -> Adapters:
        return self.installation.adapters

    @classmethod
    def of(
        cls,
        loaded: LoadedPipeline,
        settings: EngineSettings,
        clock: Clock,
        run_off_loop: RunOffLoop | None,
    ) -> Self:
        """The parts of a new engine."""
        faults = Faults.from_environment(os.environ)
        stages, heartbeat, timelines = Stages(faults), LoopProgress(clock), TimelineStore()
        is_exact = settings.numerics == "exact"
        installation = Installation(loaded, heartbeat, is_exact=is_exact)
        watch, streamer, off_loop = Stopwatch(loaded.device), loaded.streamer, OffLoop(run_off_loop)
        adapters, progressed = installation.adapters, heartbeat.progressed
        sweeps = None if streamer is None else Sweeps(streamer, adapters, clock, watch, progressed)
        queue = RequestQueue(settings.max_queue, clock, timelines)
        deliver_here = partial(
            deliver, device=loaded.device, files=loaded.files, stages=stages,
            settings=SettingsUsed(loaded, settings), off_loop=off_loop.finish,
        )  # fmt: skip
        return cls(
            loaded, settings, clock, faults, stages, heartbeat, Stats(clock), timelines, queue,
            installation, watch, sweeps, off_loop, deliver_here,
            _conditioning(loaded, settings, adapters, stages),
        )  # fmt: skip


def _conditioning(
    loaded: LoadedPipeline, settings: EngineSettings, adapters: Adapters, stages: Stages
) -> ConditioningCache:
    limit_mib = settings.conditioning_cache
    if limit_mib is None:
        limit_mib = min(MOST_MIB, MOST_SHARE * loaded.device.all_bytes / 2**20)
    return ConditioningCache(
        int(limit_mib * 2**20),
        adapters,
        stages,
        is_by_tenant=settings.conditioning_sharing == "per-key",
        is_exact=settings.numerics == "exact",
        reads_caches=reads_caches(type(loaded.pipe)),
        has_storages=loaded.streamer is None,
    )
