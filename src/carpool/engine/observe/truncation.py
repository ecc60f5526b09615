"""Attach diffusers' log warnings about truncated or ignored arguments to their requests.

Diffusers only logs such warnings, while the request's own fiber or a forward runs, without its
name. A warning about a truncated prompt, or one that names an argument of the request, is added to
the request's answer, and its log line gets the request's id.
"""

import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from carpool.engine.fiber import current_context
from carpool.request.lora import ATTENTION

MOST_TEXT = 500  # max characters of a repeated warning
_MARK = "was truncated because"
_EVERYDAY = frozenset({"prompt", "image", "video", "latents", "strength", "seed", "output_type"})
"""Argument names that also occur as words of other warnings."""
IN_FORWARD: ContextVar[Sequence[Any]] = ContextVar("requests of the running forward", default=())


class TruncationWarnings(logging.Handler):
    """Sees every record of diffusers before the handlers that write it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            return
        try:
            self._keep(record)
        except Exception:  # a failed log line must not stop a pipeline
            self.handleError(record)

    def _keep(self, record: logging.LogRecord) -> None:
        message, context = record.getMessage(), current_context()
        is_request = getattr(context, "warnings", None) is not None
        contexts = [context] if is_request else [state.context for state in IN_FORWARD.get()]
        named = [c for c in contexts if _MARK in message or _named(message, c)]
        for context in named:
            if (text := message[:MOST_TEXT]) not in context.warnings:
                context.warnings.append(text)
        if named:
            ids = ", ".join(context.request_id for context in named)
            record.msg, record.args = f"request {ids}: {message}", ()


def _named(message: str, context: Any) -> bool:
    """Whether a warning names an argument of the request."""
    names = set(re.findall(r"\w+", message)) - _EVERYDAY
    if any("attention" in name and name.endswith("_kwargs") for name in names):
        names.update(ATTENTION)  # modules name it otherwise than their pipelines
    if any(warning.startswith("size ") for warning in context.warnings):
        names -= {"width", "height"}  # already in another warning
    return not names.isdisjoint(context.names)


def install() -> None:
    """Watch diffusers' log, even if `DIFFUSERS_VERBOSITY` limits it to errors."""
    logger: Any = logging.getLogger("diffusers")
    handlers = [h for h in logger.handlers if not isinstance(h, TruncationWarnings)]
    if len(handlers) == len(logger.handlers):
        logger.handlers.insert(0, TruncationWarnings())
    if (level := logger.getEffectiveLevel()) > logging.WARNING:
        for handler in handlers:  # so that they write as little as before
            handler.setLevel(max(handler.level, level))
        logger.setLevel(logging.WARNING)
