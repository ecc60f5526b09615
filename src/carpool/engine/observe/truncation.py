"""Find out whose prompt diffusers has truncated: it warns in the log only, without a name.

The warning is written while the request's own fiber runs. It is kept for the request's answer, and
its log line gets the request's id.
"""

import logging
from typing import Any

from carpool.engine.fiber import current_context

MOST_TEXT = 500  # characters of a warning that an answer repeats
_MARK = "was truncated because"


class TruncationWarnings(logging.Handler):
    """Sees every record of diffusers before the handlers that write it."""

    def emit(self, record: logging.LogRecord) -> None:
        said, context = record.getMessage(), current_context()
        warnings: list[str] | None = getattr(context, "warnings", None)
        if _MARK not in said or warnings is None:
            return
        if (text := said[:MOST_TEXT]) not in warnings:
            warnings.append(text)
        record.msg, record.args = f"request {context.request_id}: {said}", ()


def install() -> None:
    """Watch the log of diffusers; once a process."""
    logger: Any = logging.getLogger("diffusers")
    if not any(isinstance(one, TruncationWarnings) for one in logger.handlers):
        logger.handlers.insert(0, TruncationWarnings())
