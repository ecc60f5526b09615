"""`carpool.serve`: the server of `carpool serve`, from Python."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from carpool import preflight
from carpool.config import ServeSettings
from carpool.errors import SettingRejected, nearest
from carpool.fleet.models import models_of
from carpool.server import run
from carpool.worker.start import ForkingStarter


def serve(model: "str | Path | Callable[[], Any]" = "shapes", **settings: Any) -> int:
    """Serve a model over HTTP until a signal ends it.

    Args:
        model: as for `carpool serve`, or a function that builds a pipeline. Every worker process
            imports and calls it, so it must be defined at the top level of a module or script, and
            a script must start the server under
            `if __name__ == "__main__":`.
        settings: fields of `carpool.config.ServeSettings`, such as `port`, `device`, `api_key`.

    Returns:
        The exit status of `carpool serve`.

    Raises:
        SettingRejected, LoraRejected, LoadFailed: found before anything is loaded.
    """
    names = [field.name for field in fields(ServeSettings)]
    for name in settings:
        if name not in names:
            raise SettingRejected(f"unknown setting {name!r}{nearest(name, names)}")
    own_settings = ServeSettings.from_environment(os.environ, **settings)
    factory = None if isinstance(model, (str, Path)) else name_of(model)
    preflight.check(str(model), own_settings.engine(), factory)
    starter = ForkingStarter(own_settings.worker_python)
    return run.serve(models_of([str(model)], own_settings, factory), own_settings, starter)


def name_of(factory: Any) -> str:
    """Name a function as `module:function`, or `file:function` if the script itself defines it.

    Raises:
        SettingRejected: another process cannot import it by its name.
    """
    name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", "")
    if not callable(factory) or not name or "<" in name or hasattr(factory, "components"):
        raise SettingRejected(
            f"a {type(factory).__name__} cannot be handed to the worker process, which builds the "
            "model again after a death: give a function at the top level of a module that returns "
            "the pipeline"
        )
    if module == "__main__":
        module = str(Path(str(sys.modules["__main__"].__file__)).resolve())
    return f"{module}:{name}"
