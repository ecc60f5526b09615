"""Report how the heavy calls of a model fuse, by the evidence on this machine."""

from pathlib import Path

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.intercept import Interception
from carpool.engine.language.tokens import reader_of
from carpool.engine.model.libraries import versions
from carpool.engine.model.load import load
from carpool.engine.probation.verdicts import Verdicts
from carpool.engine.reach import private_reasons


def lines(model: str | Path, settings: EngineSettings) -> list[dict[str, str]]:
    """A line for each method or kind of call: `call`, `fuses` (table, proven, ...), `why`.

    A task with private rides has its own line.

    Raises:
        CarpoolError: the model cannot be loaded.
    """
    loaded = load(model, settings)
    loaded.device.enter(loaded.parameters)
    path = StoredCosts(loaded, settings).path.with_suffix(".fusing.json")
    verdicts = Verdicts(path, versions())
    report = []
    for target in Interception(loaded.modules).targets:
        call = f"{target.component}.{target.method}"
        kind = f"{type(target.module).__name__}.{target.method}("
        evidence = verdicts.of(target.module, kind)
        if target.spec is not None:
            report.append({"call": call, "fuses": "table", "why": ""})
        elif target.method == "generate":
            fuses = "alone" if reader_of(target.module) is None else "table"
            why = "writes text: prompts, and tokens that cannot be packed, run alone"
            report.append({"call": call, "fuses": fuses, "why": why})
        elif not settings.infer_specs:
            report.append(
                {"call": call, "fuses": "alone", "why": "has no table; infer_specs is off"}
            )
        elif not evidence:
            why = "has no table; nothing is proven yet"
            report.append({"call": call, "fuses": "probation", "why": why})
        for text, entry in evidence.items():
            how, why = entry.status
            report.append({"call": call, "fuses": how, "why": f"{why} {text}"})
    report += [
        {"call": task, "fuses": "private", "why": reason}
        for task, pipe in loaded.originals.items()
        for reason in private_reasons(pipe)[:1]
    ]
    return report
