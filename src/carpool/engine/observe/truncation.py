"""Find the requests whose arguments diffusers truncates, changes or ignores: it only logs them.

The warning is written while the request's own fiber runs, without its name. Where it is
about a truncated prompt, or names an argument of the request, it is kept for the request's answer,
and its log line gets the request's id.
"""

import logging
import re
from typing import Any

from carpool.engine.fiber import current_context

MOST_TEXT = 500  # characters of a warning that an answer repeats
_MARK = "was truncated because"
_EVERYDAY = frozenset({"prompt", "image", "video", "latents", "strength", "seed", "output_type"})
"""Names of arguments that are words of other warnings, too."""


class TruncationWarnings(logging.Handler):
    """Sees every record of diffusers before the handlers that write it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            return
        try:
            self._keep(record)
        except Exception:  # a pipeline goes on where only its log line fails
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
    """Return whether a warning names an argument that a request has given."""
    names = set(re.findall(r"\w+", message)) - _EVERYDAY
    if any(warning.startswith("size ") for warning in context.warnings):
        names -= {"width", "height"}  # another warning has them
    return not names.isdisjoint(context.names)


def install() -> None:
    """Watch the log of diffusers, even where `DIFFUSERS_VERBOSITY` lets it write errors only."""
    logger: Any = logging.getLogger("diffusers")
    handlers = [h for h in logger.handlers if not isinstance(h, TruncationWarnings)]
    if len(handlers) == len(logger.handlers):
        logger.handlers.insert(0, TruncationWarnings())
    if (level := logger.getEffectiveLevel()) > logging.WARNING:
        for handler in handlers:  # so that they write as little as before
            handler.setLevel(max(handler.level, level))
        logger.setLevel(logging.WARNING)
