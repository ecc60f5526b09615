"""Pictures with adapters: as plain diffusers draws them, and as an engine does."""

from pathlib import Path
from typing import Any

from torch import Tensor

from support.engine_driver import Drive, called, for_inference, fresh
from support.prepared import drawn
from support.tiny import ARGUMENTS

SCALE = -0.7  # unless it is said


def pictures(pipe: Any, family: str) -> Tensor:
    """What plain diffusers draws."""
    return drawn(vars(called(for_inference(pipe), 0, prompt="a cat", **ARGUMENTS[family])))


def by_diffusers(file: Path, family: str, scale: float = SCALE) -> Tensor:
    pipe: Any = fresh(family)
    pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="x")
    pipe.set_adapters(["x"], [scale])
    return pictures(pipe, family)


def by_carpool(
    drive: Drive, lora: list[dict[str, Any]] | None, family: str
) -> tuple[Tensor, tuple[str, ...]]:
    request = drive.submit("a cat", lora=lora, **ARGUMENTS[family])
    other = drive.submit("a cat", seed=5, **ARGUMENTS[family])  # shares its forwards, has none
    drive.finish()
    assert request.error is other.error is None
    return drawn(request.outcome.fields), request.outcome.warnings
