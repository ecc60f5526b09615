"""Measure the duration of forwards by their number of rows, with the engine that serves.

For each width, that many equal requests run in lockstep on a real `Engine`, so that forwards and
timing are those of production; the results go into the same cost table. The first forward of each
width is ignored, because it allocates memory and chooses kernels.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import carpool
from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import LoadedPipeline, versions
from carpool.errors import OutOfMemory
from carpool.request.parameters import check
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.peers.compatibility import cost, resolution
from carpool.schedule.views import CallKind
from carpool.settings.peers.sglang_rules import Resolution
from carpool.types import CheckedRequest, Clock, Request
from carpool_lab.tune.lockstep import CallStats, Lockstep, OutcomeListener, WarmCosts
from carpool_lab.tune.results import ComponentResult, SizeResult, TuneReport

PROMPT = "a red circle"
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # widths, in requests
FEW_STEPS = 4  # of a request: enough for a median


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The settings of a measurement."""

    sizes: Sequence[Resolution] = ()  # none: the model's own
    max_rows: int = 16  # widest forward
    repeats: int = 5  # runs of each width
    steps: int | None = None  # of each request; None: a few
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of all requests


def tune(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    wanted: TuneSettings,
    *,
    table: StoredCosts,
    clock: Clock = time.monotonic,
    tick: Callable[[], object] = lambda: None,
) -> TuneReport:
    """Measure a model, and keep what was learned in its table.

    The calling thread becomes the engine's. Curves of other sizes in the table stay.

    Args:
        table: of this model and these settings.
        clock: of forwards on a CPU.
        tick: called after each run.

    Raises:
        Rejected: the model does not take such requests, as one that needs a picture.
        CarpoolError: a request failed, and not for want of memory.
    """
    device, notes, before = loaded.device, WarmCosts(), table.costs
    sizes: Sequence[Resolution | None] = wanted.sizes or [None]
    requests = [_request(loaded, size, wanted) for size in sizes]  # refused at once
    table.costs = notes
    lockstep = Lockstep(device)
    engine = EngineCore(
        loaded,
        replace(
            settings,
            max_batch_size=wanted.max_rows,
            max_decode_size=wanted.max_rows,
            conditioning_cache=0.0,  # every forward is to run
        ),
        clock=clock,
        off_loop=lambda work: work(),
        observers=[lockstep.ran],
        table=table,
        policy=lockstep,
    )
    engine.enter()
    try:
        measured = [_measure(engine, lockstep, request, wanted, tick) for request in requests]
        fitting = [
            request
            for request, (_, _, problem) in zip(requests, measured, strict=True)
            if not problem
        ]
        lockstep.seen = {}
        if device.runs_ahead and fitting:  # the last events are read when other forwards follow
            _run(engine, fitting[0], 1)
    finally:
        table.costs = Costs({**dict(before), **{k: c for k, c in notes if c.measured}})
        engine.leave()
    return TuneReport(
        model=loaded.source,
        device=device.name,
        dtype=str(device.dtype).removeprefix("torch."),
        versions={"carpool": carpool.__version__, **versions()},
        usual_steps=max(1, loaded.card.steps(loaded.card.defaults)),
        min_gain=settings.min_gain,
        repeats=wanted.repeats,
        sizes=tuple(
            _sized(loaded, request, *one, notes)
            for request, one in zip(requests, measured, strict=True)
        ),
        costs=notes,
        speed_factor=_speed_factor(dict(before), notes),
    )


def _measure(
    engine: EngineCore,
    lockstep: Lockstep,
    request: CheckedRequest,
    wanted: TuneSettings,
    tick: Callable[[], object],
) -> tuple[dict[CallKind, CallStats], int, str]:
    """Run one size at every width that fits; gives what was seen, requests run, and a problem.

    Widths take turns, so that a machine that is slow for a while is slow for all of them.
    """
    seen = lockstep.seen = {}
    fitting: list[int] = []
    requests, problem = 0, ""
    for width in _widths(seen, wanted.max_rows):
        requests += width
        try:
            _run(engine, request, width)
        except OutOfMemory as error:
            problem = f"{width} at once: {error.message}"
            break
        tick()
        if any(one.too_wide for one in _denoisers(seen)):
            break
        fitting.append(width)
    for width in fitting * wanted.repeats:
        requests += width
        _run(engine, request, width)
        tick()
    return seen, requests, problem


def _widths(seen: Mapping[CallKind, CallStats], max_rows: int) -> Iterator[int]:
    """One request, and then as many as are worth a try; `seen` has the first one by then."""
    yield 1
    most = max_rows // max((one.rows for one in _denoisers(seen)), default=1)
    yield from (n for n in STEPS if 1 < n < most)
    if most > 1:
        yield most


def _denoisers(seen: Mapping[CallKind, CallStats]) -> list[CallStats]:
    return [one for one in seen.values() if one.phase == "denoise"]


def _run(engine: EngineCore, request: CheckedRequest, width: int) -> None:
    """Run `width` equal requests in lockstep, each with its own seed."""
    listeners = [OutcomeListener() for _ in range(width)]
    for seed, listener in enumerate(listeners):
        engine.submit(replace(request, seed=seed, request_id=f"tune-{seed}"), listener)
    while engine.step():
        pass
    for listener in listeners:
        if listener.error is not None:
            raise listener.error


def _speed_factor(before: Mapping[CallKind, Curve], now: Costs) -> float:
    """Seconds now over those of an earlier table: the median of widths that are in both."""
    ratios = [
        seconds / old
        for kind, curve in now
        if kind in before
        for rows, seconds in curve.measured.items()
        if (old := before[kind].measured.get(rows))
    ]
    return statistics.median(ratios) if ratios else 1.0


def _request(
    loaded: LoadedPipeline, size: Resolution | None, wanted: TuneSettings
) -> CheckedRequest:
    card = loaded.card
    usual = card.steps(card.defaults) or FEW_STEPS  # a distilled model may have no more
    offered: dict[str, Any] = {
        "prompt": PROMPT,
        "output_type": "pt",
        "num_inference_steps": wanted.steps or min(FEW_STEPS, usual),
    }
    taken = {name: value for name, value in offered.items() if card.tasks[0].takes(name)}
    if size is not None:
        taken |= {"width": size[0], "height": size[1]}
    return check(card, Request(**{"prompt": None, "seed": 0, **taken, **wanted.parameters}))


def _sized(
    loaded: LoadedPipeline,
    request: CheckedRequest,
    seen: Mapping[CallKind, CallStats],
    requests: int,
    problem: str,
    costs: WarmCosts,
) -> SizeResult:
    size = resolution(request.arguments, loaded.card.default_size_px)
    frames = int(request.arguments.get("num_frames") or 1)
    curves = costs.curves
    components = [
        ComponentResult(
            kind,
            one.phase,
            one.rows,
            one.calls / requests,
            {n: s for n, s in curves[kind].measured.items() if n in one.done},
            one.peak_bytes,
            one.too_wide,
            {n: curves[kind].sd(n) for n in curves[kind].samples if n in one.done},
            {n: len(s) for n, s in curves[kind].samples.items() if n in one.done},
        )
        for kind, one in seen.items()
        if kind in curves
    ]
    return SizeResult(
        size,
        max(1, loaded.card.steps(request.arguments)),
        cost(size, frames=frames, vae_scale_px=loaded.vae_scale_px),
        tuple(one for one in components if one.seconds),
        problem,
    )
