"""Logging: text lines, or JSON lines for machines; prompts only with `--log-prompts`.

Every line about an HTTP request has its id and the name of its API key. Both are in the context
variable `about`, which tasks inherit.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

from carpool.config import LogFormat, LogLevel
from carpool.errors import CarpoolError, ModelNotFound, without_paths

TEXT = "%(asctime)s %(levelname)s %(message)s"
MOST_TEXT = 16_000  # characters of a message, or of an exception with its traceback
LIBRARIES = ("diffusers", "transformers", "huggingface_hub", "torch", "peft", "accelerate")
PROBES = ("/health", "/livez", "/metrics")  # polled every few seconds
PAGES = ("/", "/favicon.ico")  # and /playground/: one visit requests a dozen files
MOST_REASON = 300  # characters
_NAMED = ("retry", "error", "reason")  # fields whose names appear in text lines
FIELDS = ("request_id", "key", "method", "path", "status", "duration_ms")

about: ContextVar[dict[str, str]] = ContextVar("about")
"""Fields of the current HTTP request: `request_id`, `key` after authentication, and after a failure
the `error` (its code) and the `reason`."""

access = logging.getLogger("carpool.access")


def set_up(level: LogLevel, format_: LogFormat, *, prompts: bool = False) -> None:
    """Send all log lines of this process, and Python's warnings, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if format_ == "json" else TextLines(TEXT))
    if not prompts:
        handler.addFilter(without_prompts)
    if level != "debug":
        handler.addFilter(without_noise)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def without_prompts(record: logging.LogRecord) -> bool:
    """A filter that cuts the prompt out of diffusers' warning of truncated prompts."""
    message, mark, _ = record.getMessage().partition(" tokens: ")
    if mark and "was truncated because" in message:
        record.msg, record.args = f"{message} tokens", ()
    return True


def without_noise(record: logging.LogRecord) -> bool:
    """A filter that drops warnings of libraries about themselves. A truncated prompt concerns a
    request."""
    is_of_a_library = record.name.partition(".")[0] in LIBRARIES
    is_less = record.levelno < logging.ERROR
    return not (is_of_a_library and is_less) or "was truncated because" in record.getMessage()


def refused(error: CarpoolError) -> None:
    """Store the code and the reason of an error for the access log line of the current request.

    A reason may repeat its value, so reasons about a prompt, or a text sent as a model's name,
    are left out.
    """
    here = about.get({})
    here["error"] = error.code
    if not isinstance(error, ModelNotFound) and "prompt" not in (error.param or ""):
        message = error.message if error.status < 500 else without_paths(error.message)
        here["reason"] = " ".join(message.split())[:MOST_REASON]


def is_quiet(path: str) -> bool:
    """Whether requests for a path are logged at `debug` only."""
    return path in PROBES or path in PAGES or path.startswith("/playground/")


def answered(method: str, path: str, status: int, duration_s: float) -> None:
    """Write the access log line of an HTTP request.

    Args:
        path: without its query string.
    """
    here, took_ms = about.get({}), round(1000 * duration_s)
    access.log(
        logging.DEBUG if is_quiet(path) and status != 500 else logging.INFO,
        "%s %s %d %d ms %s",
        method,
        path,
        status,
        took_ms,
        " ".join(f"{name}={text}" if name in _NAMED else text for name, text in here.items()),
        extra={"method": method, "path": path, "status": status, "duration_ms": took_ms, **here},
    )


def bounded(text: str) -> str:
    """Shorten a text to `MOST_TEXT` characters: libraries repeat clients' input."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... {len(text)} characters"


class TextLines(logging.Formatter):
    """Formats a record as text."""

    def format(self, record: logging.LogRecord) -> str:
        return bounded(super().format(record))


class JSONLines(logging.Formatter):
    """Formats a record as JSON: `time` (UTC), `level`, `logger`, `message`, and `FIELDS`."""

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
