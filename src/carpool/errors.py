"""Public errors: a class for each failure, with its status and code.

The HTTP layer uses `status`, `body` and `retry_after_s`, and adds nothing. Clients never see paths
of the server's files, but the log does: use `reason` for messages and `in_full` for the
log.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from carpool.error_text import in_full as in_full
from carpool.error_text import named as named
from carpool.error_text import nearest as nearest
from carpool.error_text import reason as reason
from carpool.error_text import show as show
from carpool.error_text import text_of as text_of
from carpool.error_text import without_paths as without_paths


class CarpoolError(Exception):
    """Base class of Carpool's errors; `str(error)` is for the caller."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    should_retry: ClassVar[bool] = False  # the same request may succeed later

    def __init_subclass__(cls, **declared: Any) -> None:
        """Take `status`, `code` and `should_retry` from the class statement."""
        super().__init_subclass__()
        for name, value in declared.items():
            setattr(cls, name, value)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's name of the kind of failure."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        """The error object in OpenAI's format."""
        message = without_paths(self.message) if self.status >= 500 else self.message
        return {"message": message, "type": self.type, "param": self.param, "code": self.code}


class Released(Exception):
    """Not a failure: a worker released a request, and another worker continues it."""


class Rejected(CarpoolError, status=400, code="invalid_value"):
    """The request is at fault: a retry would fail too."""

    @classmethod
    def of(cls, name: str, value: Any, rule: str) -> Self:
        """Make the error of one parameter from its name, its value, and the broken rule."""
        return cls(f"{name[:60]}={show(value)}: {rule}", param=name[:60])


class MissingParameter(Rejected, code="missing_parameter"):
    """A required parameter is missing."""


class UnknownParameter(Rejected, code="unknown_parameter"):
    """The pipeline takes no parameter of this name."""


class UnsupportedParameter(Rejected, code="unsupported_parameter"):
    """A known parameter that cannot be used here."""


class InvalidValue(Rejected):
    """A parameter has the wrong type or an impossible value."""


class InvalidJSON(Rejected, code="invalid_json"):
    """The body is not a JSON object."""


class InvalidHTTP(Rejected, code="invalid_http"):
    """The bytes are not HTTP/1.1, or ambiguous. The connection is closed."""


class SizeRejected(Rejected, code="size_not_supported"):
    """The model cannot draw an image of this size."""


class MaskMismatch(Rejected, code="mask_mismatch"):
    """The mask does not fit its picture, or marks nothing."""


class InvalidAPIKey(CarpoolError, status=401, code="invalid_api_key"):
    """The bearer token is missing or unknown."""


class KeyRequired(CarpoolError, status=403, code="api_key_required"):
    """Only clients with an API key may do this, and the server has none."""


class HostNotAllowed(CarpoolError, status=403, code="host_not_allowed"):
    """`Host` is not a name of this server: see `--allowed-host`."""


class OriginNotAllowed(CarpoolError, status=403, code="origin_not_allowed"):
    """A web page of another origin, and the server has no API keys."""


class UnsupportedMediaType(CarpoolError, status=415, code="unsupported_media_type"):
    """The endpoint does not accept the body's `content-type`."""


class ModelNotFound(CarpoolError, status=404, code="model_not_found"):
    """The server does not serve this model."""


class ModelNotSupported(CarpoolError, status=404, code="model_not_supported"):
    """The served model does not support this endpoint's task."""


class FileNotFound(CarpoolError, status=404, code="file_not_found"):
    """The link has no file: it has expired, or is not from this server."""


class NoSuchEndpoint(CarpoolError, status=404, code="not_found"):
    """The server has no such path."""


class UnsupportedEndpoint(NoSuchEndpoint, code="unsupported_endpoint"):
    """A path of OpenAI's API that this server does not support."""


class MethodNotAllowed(CarpoolError, status=405, code="method_not_allowed"):
    """The path does not support this method: `allow` lists the supported ones."""


class RangeNotSatisfiable(CarpoolError, status=416, code="range_not_satisfiable"):
    """`Range` is outside of the file."""


class JobNotFound(CarpoolError, status=404, code="job_not_found"):
    """No such job: never accepted, deleted, or expired."""


class FileNotReady(JobNotFound, code="file_not_ready"):
    """The job does not have this file, or not yet."""


class VideoNotFound(JobNotFound, code="video_not_found"):
    """No such video: see `JobNotFound`."""


class VideoNotReady(VideoNotFound, code="video_not_ready"):
    """The video does not have this file, or not yet."""


class IdempotencyMismatch(CarpoolError, status=422, code="idempotency_mismatch"):
    """An `Idempotency-Key` was reused with another body."""


class StoreFailed(CarpoolError, status=503, code="store_failed", should_retry=True):
    """The job store could not be read or written."""

    wants_room = False  # the disk is full: the store is intact, and usable after space is freed


class UnsupportedImage(Rejected, code="unsupported_image"):
    """The bytes are not a supported picture."""


class ImageTooLarge(Rejected, status=413, code="image_too_large"):
    """A picture has more pixels than the server allows."""


class BodyTooLarge(CarpoolError, status=413, code="body_too_large"):
    """The body exceeds the server's limit."""


class Overloaded(CarpoolError, status=429, code="queue_full", should_retry=True):
    """The queue is full, or its predicted wait is too long."""


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The client exceeds its rate, or its limit of concurrent work."""


class TooLate(Rejected, code="deadline_too_near"):
    """The deadline cannot be met, by the measured times of forwards."""


class NoSurface(Rejected, status=422, code="no_surface"):
    """The shape of these arguments and this seed has no surface: no mesh can be made of it."""


class Cancelled(CarpoolError, status=499, code="client_closed"):
    """The caller cancelled the request."""


class PipelineFailed(CarpoolError):
    """The pipeline or one of its modules raised; the cause is chained."""


class WorkerLost(CarpoolError, status=503, code="worker_lost", should_retry=True):
    """The process that ran the request ended before the answer."""


class Starting(CarpoolError, status=503, code="starting", should_retry=True):
    """The model is still loading."""


class Draining(CarpoolError, status=503, code="draining", should_retry=True):
    """The server is shutting down and accepts no new work."""

    @classmethod
    def of_new_work(cls) -> "Draining":
        return cls("the server is ending and takes no new requests", retry_after_s=5)


class LanguageServerFailed(
    CarpoolError, status=502, code="language_server_failed", should_retry=True
):
    """The server of `--language-url` gave no usable answer."""


class OutOfMemory(CarpoolError, status=503, code="out_of_memory"):
    """One call of the request alone exceeds the device's memory."""


class DeadlineExceeded(CarpoolError, status=504, code="deadline_exceeded"):
    """The request's own `timeout_s` ran out."""


class LoadFailed(CarpoolError, status=503, code="model_load_failed"):
    """The model cannot be loaded or served."""

    wants_memory = False  # may succeed after other models are unloaded
    was_killed = False  # a loading process was killed: no known defect


class LoraRejected(CarpoolError):
    """An adapter cannot be registered under this name for this model."""


class Forked(CarpoolError):
    """This process is a fork of the process that loaded the model, without its threads."""


class LibraryMissing(CarpoolError, status=501, code="library_missing"):
    """The request needs an optional library that is not installed."""


class SettingRejected(CarpoolError):
    """A setting has an unknown name or an impossible value."""


def _subclasses(of: type[CarpoolError]) -> Iterable[type[CarpoolError]]:
    yield of
    for child in of.__subclasses__():
        yield from _subclasses(child)


def by_name(name: str) -> type[CarpoolError]:
    """The error class of this name; `PipelineFailed` for an unknown name."""
    matches = (cls for cls in _subclasses(CarpoolError) if cls.__name__ == name)
    return next(matches, PipelineFailed)


def by_code(code: str) -> type[CarpoolError]:
    """The error class of a job's failure; `PipelineFailed` for an unknown code."""
    matches = (cls for cls in _subclasses(CarpoolError) if cls.code == code)
    return next(matches, PipelineFailed)
