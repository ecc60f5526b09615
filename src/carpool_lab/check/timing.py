"""Time forwards by their rows, within a budget."""

from dataclasses import replace

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.model.load import LoadedPipeline
from carpool.types import CheckedRequest
from carpool_lab.check.requests import CheckOptions
from carpool_lab.check.run import OnForward, Proof
from carpool_lab.tune.measure import STEPS, TuneSettings, tune
from carpool_lab.tune.results import TuneReport

FEW_STEPS = 2  # of each request: enough for medians, as each width runs several times


def timed(
    loaded: LoadedPipeline,
    settings: EngineSettings,
    request: CheckedRequest,
    wanted: CheckOptions,
    proof: Proof,
    table: StoredCosts,
    tick: OnForward,
) -> tuple[TuneReport, list[str]]:
    """Measure seconds of forwards by rows; returns them with notes on widths that were left out.

    Args:
        request: one of those that were run.
        proof: of fast numerics, whose seconds tell how many widths the budget allows.
    """
    widest = wanted.max_rows
    while widest > 1 and _predicted_s(proof, wanted, widest) > wanted.budget_s:
        widest -= 1
    notes = []
    if widest < wanted.max_rows:
        notes.append(
            f"forwards of more than {widest} rows were not timed, which takes minutes: use "
            "`carpool tune`"
        )
    settings = replace(settings, numerics="fast")
    most = TuneSettings(
        max_rows=widest,
        repeats=wanted.repeats,
        steps=min(FEW_STEPS, wanted.steps) if _may_choose(request) else None,
        parameters=wanted.parameters,
    )
    unchanged = replace(loaded, undo=lambda: None)
    return tune(unchanged, settings, most, table=table, tick=tick), notes


def _may_choose(request: CheckedRequest) -> bool:
    return "num_inference_steps" in request.arguments


def _predicted_s(proof: Proof, wanted: CheckOptions, widest: int) -> float:
    """Seconds at worst: rows gain nothing, and all of a request's calls are repeated."""
    row_s = 0.0
    for method in proof.methods:
        usual = method.seen.usual_s()
        one = min((s / rows for rows, s in usual.items()), default=0.0)
        row_s += one * (FEW_STEPS if method.seen.phase == "denoise" else 1)
    return row_s * sum(n for n in STEPS if n <= widest) * (wanted.repeats + 1)
