"""Startup of a worker process, before it reads its first message.

Importing torch, diffusers and the engine takes five seconds of a processor; a fifth of that would
be garbage collection of objects that all stay.
"""

import ctypes
import gc
import os
import signal
import sys

PROCESS_NAME = "carpool-worker"
"""The name of a process with a model, as shown by `ps -o comm` and `top`."""

_SET_PDEATHSIG, _SET_NAME = 1, 15  # Linux: prctl(2)


def set_environment() -> None:
    """Set the variables that libraries read at import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # sizes vary: no holes


def import_engine() -> None:
    """Import the modules that `message_handler.MessageHandler` needs.

    Their objects are frozen, so that later garbage collections skip them.
    """
    gc.disable()
    try:
        import carpool.engine.cost_store
        import carpool.engine.journal
        import carpool.engine.loop
        import carpool.engine.model.factory
        import carpool.engine.model.load
        import carpool.engine.model.usage
        import carpool.engine.observe.activity
        import carpool.engine.observe.co_riders  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, if the system supports it.

    Source: prctl(2), PR_SET_NAME. Has to be called on the main thread.
    """
    _prctl(_SET_NAME, name.encode())


def die_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends.

    The closed socket reveals a parent that ended before this call.

    Source: prctl(2), PR_SET_PDEATHSIG. A fork clears it.
    """
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        kind = ctypes.c_char_p if isinstance(value, bytes) else ctypes.c_ulong
        prctl.argtypes = [ctypes.c_int, kind]
        prctl(option, value)
