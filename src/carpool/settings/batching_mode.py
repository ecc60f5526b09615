"""Which batching mode the given settings choose."""

from collections.abc import Mapping
from typing import Any, Literal

from carpool.errors import SettingRejected

BatchingMode = Literal["continuous", "dynamic", "request", "off"]

MODES_OF: Mapping[str, BatchingMode] = {
    "batching_max_size": "dynamic",
    "batching_delay_ms": "dynamic",
    "batching_config": "dynamic",
    "enable_batching_metrics": "dynamic",
    "batching_metrics_format": "dynamic",
    "max_num_seqs": "request",
    "request_batch_max_wait_ms": "request",
}
"""Settings that mean nothing outside of one mode: they choose it."""


def with_chosen_mode(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with the mode that they choose where `batching_mode` is not given.

    Args:
        defaults: of all settings. A value that is its setting's default chooses nothing and
            clashes with nothing.

    Raises:
        SettingRejected: they are for two modes, or for another one than `batching_mode`.
    """
    of_modes: dict[BatchingMode, str] = {}  # by mode: the first setting for it
    for name in given:
        if (mode := MODES_OF.get(name)) and given[name] != defaults[name]:
            of_modes.setdefault(mode, name)
    said = given.get("batching_mode")
    if said is not None:
        for mode, name in of_modes.items():
            if mode != said:
                raise SettingRejected(
                    f"{name}={given[name]!r} is for batching_mode {mode!r}, and batching_mode is "
                    f"{said!r}: leave one of them out",
                    param=name,
                )
    elif len(of_modes) > 1:
        (one, first), (other, second) = of_modes.items()
        raise SettingRejected(
            f"{first} is for batching_mode {one!r}, and {second} for {other!r}: a server has one "
            "mode, so leave one of them out",
            param=second,
        )
    elif of_modes:
        return {**given, "batching_mode": next(iter(of_modes))}
    return dict(given)
