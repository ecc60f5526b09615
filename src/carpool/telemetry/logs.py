"""Log lines: as text for people, or an object a line for machines. No prompts, unless asked for.

While an HTTP request is worked on, every line says its id and the name of its API key, whoever
writes it: both stand in `about`, which tasks inherit from the one that set it.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

from carpool.config import LogFormat, LogLevel

TEXT = "%(asctime)s %(levelname)s %(message)s"
MOST_TEXT = 16_000  # characters of a message, or of an exception with its traceback
PROBES = ("/health", "/livez", "/metrics")  # asked every few seconds: for `debug` only
FIELDS = ("request_id", "key", "method", "path", "status", "duration_ms")

about: ContextVar[dict[str, str]] = ContextVar("about")
"""Of the HTTP request that is worked on: `request_id`, and `key` once that is known."""

access = logging.getLogger("carpool.access")


def set_up(level: LogLevel, format_: LogFormat, *, prompts: bool = False) -> None:
    """Send all log lines of this process, and Python's warnings, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if format_ == "json" else TextLines(TEXT))
    if not prompts:
        handler.addFilter(without_prompts)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def without_prompts(record: logging.LogRecord) -> bool:
    """Cut out of a line what diffusers repeats of prompts that are too long. Keeps every line."""
    said, mark, _ = record.getMessage().partition(" tokens: ")
    if mark and "was truncated because" in said:
        record.msg, record.args = f"{said} tokens", ()
    return True


def answered(method: str, path: str, status: int, duration_s: float) -> None:
    """Write the one line that every HTTP request leaves.

    Args:
        path: without what stands behind a question mark.
    """
    here, took_ms = about.get({}), round(1000 * duration_s)
    access.log(
        logging.DEBUG if path in PROBES and status < 500 else logging.INFO,
        "%s %s %d %d ms %s",
        method,
        path,
        status,
        took_ms,
        " ".join(f"retry={text}" if name == "retry" else text for name, text in here.items()),
        extra={"method": method, "path": path, "status": status, "duration_ms": took_ms, **here},
    )


def bounded(text: str) -> str:
    """As much of a text as a log should hold: libraries repeat what clients send."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... {len(text)} characters"


class TextLines(logging.Formatter):
    """A line as people read it."""

    def format(self, record: logging.LogRecord) -> str:
        return bounded(super().format(record))


class JSONLines(logging.Formatter):
    """A line as JSON: `time` (UTC), `level`, `logger`, `message`, and those of `FIELDS` it has."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": bounded(record.getMessage()),
            **about.get({}),
            **{name: vars(record)[name] for name in FIELDS if name in vars(record)},
        }
        if record.exc_info:
            line["exception"] = bounded(self.formatException(record.exc_info))
        return json.dumps(line)
