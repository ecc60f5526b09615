"""Attach diffusers' log warnings about truncated or ignored arguments to their requests.

Diffusers only logs such warnings, while the request's own fiber runs, without its name. A warning
about a truncated prompt, or one that names an argument of the request, is added to the request's
answer, and its log line gets the request's id.
"""

import logging
import re
from typing import Any

from carpool.engine.fiber import current_context

MOST_TEXT = 500  # max characters of a repeated warning
_MARK = "was truncated because"
_EVERYDAY = frozenset({"prompt", "image", "video", "latents", "strength", "seed", "output_type"})
"""Argument names that also occur as words of other warnings."""


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
        warnings: list[str] | None = getattr(context, "warnings", None)
        if warnings is None or not (_MARK in message or _named(message, context)):
            return
        if (text := message[:MOST_TEXT]) not in warnings:
            warnings.append(text)
        record.msg, record.args = f"request {context.request_id}: {message}", ()


def _named(message: str, context: Any) -> bool:
    """Whether a warning names an argument of the request."""
    names = set(re.findall(r"\w+", message)) - _EVERYDAY
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
