"""Measure the duration of forwards by number of rows, with the production engine.

For each width, that many equal requests run in lockstep on a real engine, so forwards and timing
are as in production; the results go into the same cost table. The first forward of each width is
ignored, because it allocates memory and chooses kernels.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import carpool
from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.loop import EngineCore
from carpool.engine.model.libraries import versions
from carpool.engine.model.loaded import LoadedPipeline
from carpool.errors import OutOfMemory
from carpool.schedule.cost import Costs
from carpool.schedule.peers.compatibility import resolution
from carpool.schedule.views import CallKind
from carpool.types import CheckedRequest, Clock
from carpool_lab.check.lockstep import CallStats, Lockstep, OutcomeListener, WarmCosts
from carpool_lab.check.requests import CheckOptions
from carpool_lab.check.results import ComponentTiming, TimingReport
from carpool_lab.check.run import OnForward, Proof

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # requests in a forward
FEW_STEPS = 2  # steps of a request; repeats give enough samples for medians


def timed(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    request: CheckedRequest,
    options: CheckOptions,
    proof: Proof,
    table: StoredCosts,
    tick: OnForward,
) -> tuple[TimingReport, list[str]]:
    """Measure seconds of forwards by rows; returns them with notes on skipped widths.

    Args:
        request: one of the checked requests.
        proof: proof of fast numerics; its timings limit the widths to the budget.
    """
    max_rows = options.max_rows
    while max_rows > 1 and _predicted_s(proof, options, max_rows) > options.budget_s:
        max_rows -= 1
    notes = []
    if max_rows < options.max_rows:
        notes.append(
            f"forwards of more than {max_rows} rows were not timed, as it takes minutes: use "
            f"`--max-rows {options.max_rows}`"
        )
    arguments = dict(request.arguments)
    if "num_inference_steps" in arguments:
        arguments["num_inference_steps"] = min(FEW_STEPS, arguments["num_inference_steps"])
    report = measure(
        replace(loaded, undo=lambda: None),  # further engines need the patches
        replace(settings, numerics="fast"),
        replace(request, arguments=arguments),
        max_rows=max_rows,
        repeats=options.repeats,
        table=table,
        tick=tick,
    )
    return report, notes


def _predicted_s(proof: Proof, options: CheckOptions, max_rows: int) -> float:
    """Upper bound in seconds: batching gains nothing, and all calls are repeated."""
    request_s = 0.0
    for method in proof.methods:
        row_s = min((s / rows for rows, s in method.calls.usual_s().items()), default=0.0)
        request_s += row_s * (FEW_STEPS if method.calls.phase == "denoise" else 1)
    return request_s * sum(n for n in WIDTHS if n <= max_rows) * (options.repeats + 1)


def measure(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    request: CheckedRequest,
    *,
    max_rows: int,
    repeats: int,
    table: StoredCosts,
    clock: Clock = time.monotonic,
    tick: Callable[[], object] = lambda: None,
) -> TimingReport:
    """Measure a model, and store the costs in its table.

    The calling thread becomes the engine's. Curves of other sizes in the table are kept.

    Args:
        request: runs many times, with different seeds.
        max_rows: rows of the widest forward.
        repeats: runs of each width.
        table: cost table of this model and these settings.
        clock: clock of forwards on a CPU.
        tick: called after each run.

    Raises:
        CarpoolError: a request failed for a reason other than memory.
    """
    device, notes, before = loaded.device, WarmCosts(), table.costs
    table.costs = notes
    lockstep = Lockstep(device)
    engine = EngineCore(
        loaded,
        replace(
            settings,
            max_batch_size=max_rows,
            max_decode_size=max_rows,
            conditioning_cache=0.0,  # every forward must run
        ),
        clock=clock,
        off_loop=lambda work: work(),
        observers=[lockstep.ran],
        table=table,
        policy=lockstep,
    )
    engine.enter()
    try:
        count, problem = _run_widths(engine, lockstep, request, max_rows, repeats, tick)
        stats, lockstep.stats = lockstep.stats, {}
        if device.runs_ahead and not problem:  # device events are read at later forwards
            _run(engine, request, 1)
    finally:
        table.costs = Costs({**dict(before), **{k: c for k, c in notes if c.measured}})
        engine.leave()
    return TimingReport(
        model=loaded.source,
        device=device.name,
        dtype=str(device.dtype).removeprefix("torch."),
        versions={"carpool": carpool.__version__, **versions()},
        usual_steps=max(1, loaded.card.steps(loaded.card.defaults)),
        min_gain=settings.min_gain,
        repeats=repeats,
        size=resolution(request.arguments, loaded.card.default_size_px),
        steps=max(1, loaded.card.steps(request.arguments)),
        components=tuple(_components(stats, count, notes)),
        costs=notes,
        problem=problem,
    )


def _run_widths(
    engine: EngineCore,
    lockstep: Lockstep,
    request: CheckedRequest,
    max_rows: int,
    repeats: int,
    tick: Callable[[], object],
) -> tuple[int, str]:
    """Run every width that fits; returns the number of requests, and a problem.

    Widths alternate, so a temporarily slow machine affects all of them equally.
    """
    fitting: list[int] = []
    count, problem = 0, ""
    for width in _widths(lockstep.stats, max_rows):
        count += width
        try:
            _run(engine, request, width)
        except OutOfMemory as error:
            problem = f"{width} at once: {error.message}"
            break
        tick()
        if any(stats.too_wide for stats in _denoisers(lockstep.stats)):
            break
        fitting.append(width)
    for width in fitting * repeats:
        count += width
        _run(engine, request, width)
        tick()
    return count, problem


def _widths(stats: Mapping[CallKind, CallStats], max_rows: int) -> Iterator[int]:
    """Yield width 1, then each larger width that may fit, by the `stats` so far."""
    yield 1
    count = max_rows // max((entry.rows for entry in _denoisers(stats)), default=1)
    yield from (n for n in WIDTHS if 1 < n < count)
    if count > 1:
        yield count


def _denoisers(stats: Mapping[CallKind, CallStats]) -> list[CallStats]:
    return [entry for entry in stats.values() if entry.phase == "denoise"]


def _run(engine: EngineCore, request: CheckedRequest, width: int) -> None:
    """Run `width` equal requests in lockstep, each with its own seed."""
    listeners = [OutcomeListener() for _ in range(width)]
    for seed, listener in enumerate(listeners):
        engine.submit(replace(request, seed=seed, request_id=f"timing-{seed}"), listener)
    while engine.step():
        pass
    for listener in listeners:
        if listener.error is not None:
            raise listener.error


def _components(
    stats: Mapping[CallKind, CallStats], requests: int, costs: WarmCosts
) -> Iterator[ComponentTiming]:
    for kind, entry in stats.items():
        measured = costs.curves[kind].measured if kind in costs.curves else {}
        if seconds := {rows: s for rows, s in measured.items() if rows in entry.finished}:
            calls = entry.calls / requests
            peaks, too_wide = entry.peak_bytes, entry.too_wide
            yield ComponentTiming(kind, entry.phase, entry.rows, calls, seconds, peaks, too_wide)
