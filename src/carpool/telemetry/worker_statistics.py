"""Finds single workers in the statistics of a worker, a pool or a fleet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The statistics of one worker that has loaded its model."""

    model: str
    worker: str | None  # its number, if there are several
    statistics: Mapping[str, Any]


def models_of(model: str, statistics: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The statistics of each model.

    Args:
        model: the name of a single model.
    """
    models: Mapping[str, Mapping[str, Any]] = statistics.get("models", {model: statistics})
    return models


def workers_of(model: str, statistics: Mapping[str, Any]) -> list[WorkerStatistics]:
    """The statistics of each ready worker; arguments as in `models_of`."""
    has_names = "models" in statistics
    workers = []
    for name, of_model in models_of(model, statistics).items():
        for entry in of_model.get("workers", [of_model]):
            if "memory" in entry:  # otherwise it loads, or its model is not loaded
                number = entry.get("worker", 0 if has_names else None)
                workers.append(
                    WorkerStatistics(name, None if number is None else str(number), entry)
                )
    return workers
