"""torch, diffusers and transformers: their versions, and their output while loading."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import metadata

from diffusers.utils import logging as diffusers_log
from transformers.utils import logging as transformers_log


@cache
def versions() -> dict[str, str]:
    """The versions of the libraries that affect images."""
    return {name: metadata.version(name) for name in ("torch", "diffusers", "transformers")}


def log_as_others(*, bars: bool) -> None:
    """Route the libraries' log lines to the root logger; show or hide their progress bars."""
    for library in (diffusers_log, transformers_log):
        library.disable_default_handler()
        library.enable_propagation()
        if not bars:
            library.disable_progress_bar()
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    ends = "Error in block", "\nError in block"  # repeated at each level: the error says it
    blocks.addFilter(lambda record: not record.getMessage().startswith(ends))


@contextmanager
def quiet_libraries(*, bars: bool) -> Iterator[None]:
    """Keep the libraries' warnings and progress bars off standard error within this context.

    Log levels chosen by the program are kept.
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
