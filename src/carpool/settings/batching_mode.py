"""Infer the batching mode from other settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from carpool.errors import SettingRejected
from carpool.settings.engine import BatchingMode, EngineSettings

MODES_OF: Mapping[str, BatchingMode] = {
    "batching_max_size": "dynamic", "batching_delay_ms": "dynamic", "batching_config": "dynamic",
    "enable_batching_metrics": "dynamic", "batching_metrics_format": "dynamic",
    "max_num_seqs": "request", "request_batch_max_wait_ms": "request",
}  # fmt: skip
"""Settings that only one mode has: they select that mode."""


def with_mode(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the inferred `batching_mode` to settings without one.

    A value that equals its default selects no mode and conflicts with none.

    Raises:
        SettingRejected: settings belong to two modes, or to a mode other than `batching_mode`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(EngineSettings)}
    of_modes: dict[BatchingMode, str] = {}  # by mode: its first setting
    for name in settings:
        if (mode := MODES_OF.get(name)) and settings[name] != defaults[name]:
            of_modes.setdefault(mode, name)
    explicit = settings.get("batching_mode")
    if explicit is not None:
        for mode, name in of_modes.items():
            if mode != explicit:
                problem = f"is for batching_mode {mode!r}, and batching_mode is {explicit!r}"
                text = f"{name}={settings[name]!r} {problem}: leave one of them out"
                raise SettingRejected(text, param=name)
    elif len(of_modes) > 1:
        (mode_1, first), (mode_2, second) = of_modes.items()
        problem = f"{first} is for batching_mode {mode_1!r}, and {second} for {mode_2!r}"
        rule = "a server has one mode, so leave one of them out"
        raise SettingRejected(f"{problem}: {rule}", param=second)
    elif of_modes:
        return {**settings, "batching_mode": next(iter(of_modes))}
    return dict(settings)
