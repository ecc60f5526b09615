"""Carpool: a serving engine for diffusion models whose requests share every denoising step.

    import carpool

    with carpool.load("shapes") as engine:
        outputs = engine.generate(["a red circle on a blue background", "a green star"])

Importing this package loads no torch; `carpool.load` does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from carpool.types import Event, Request, Timings

if TYPE_CHECKING:
    from carpool.python.engine import Engine, load
    from carpool.python.handle import Handle, Output
    from carpool.python.jobs import BackgroundJob, Jobs
    from carpool.server.serve import serve

__version__ = "0.5.0"
__all__ = [
    "BackgroundJob",
    "Engine",
    "Event",
    "Handle",
    "Jobs",
    "Output",
    "Request",
    "Timings",
    "load",
    "serve",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name in __all__:  # these public names need torch: imported on first use
        modules = {"BackgroundJob": "jobs", "Jobs": "jobs", "Handle": "handle", "Output": "handle"}
        module = f"python.{modules.get(name, 'engine')}" if name != "serve" else "server.serve"
        return getattr(importlib.import_module(f"carpool.{module}"), name)
    raise AttributeError(f"module 'carpool' has no attribute {name!r}")
