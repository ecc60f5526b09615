"""torch, diffusers and transformers: their versions, and what they print while they load."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import metadata

from diffusers.utils import logging as diffusers_log
from transformers.utils import logging as transformers_log


@cache
def versions() -> dict[str, str]:
    """Of the libraries that a picture depends on."""
    return {name: metadata.version(name) for name in ("torch", "diffusers", "transformers")}


def log_as_others(*, bars: bool) -> None:
    """Have the libraries' log lines go where all go; with or without bars while they load."""
    for library in (diffusers_log, transformers_log):
        library.disable_default_handler()
        library.enable_propagation()
        if not bars:
            library.disable_progress_bar()
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    blocks.addFilter(_is_no_failure)


@contextmanager
def quiet_libraries(*, bars: bool) -> Iterator[None]:
    """Keep the libraries' remarks, and their bars, off a program's standard error for a while.

    A program that has chosen how much they say keeps that.
    """
    with ExitStack() as undo:
        for library in (diffusers_log, transformers_log):
            if library.get_verbosity() == logging.WARNING:
                library.set_verbosity_error()
                undo.callback(library.set_verbosity_warning)
            if not bars and library.is_progress_bar_enabled():
                library.disable_progress_bar()
                undo.callback(library.enable_progress_bar)
        yield


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Blocks log what they raise, with its traceback, at each level; a request's error tells it."""
    return not record.getMessage().startswith(("Error in block", "\nError in block"))
