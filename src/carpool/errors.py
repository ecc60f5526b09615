"""Errors as callers see them: a class for each failure, with its status and code.

The HTTP layer reads `status`, `body` and `retry_after_s`; it adds nothing of its own. Clients are
never told where files of the server lie, the log is: `reason` is for messages, `in_full` for lines
of the log.
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
    """Any failure that Carpool reports; `str(error)` is meant for the caller."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    should_retry: ClassVar[bool] = False  # may the same request succeed later?

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
        """OpenAI's word for the kind of failure."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients get it, in OpenAI's shape."""
        message = without_paths(self.message) if self.status >= 500 else self.message
        return {"message": message, "type": self.type, "param": self.param, "code": self.code}


class Released(Exception):
    """No failure: a worker gave a request up, so that another one goes on with it."""


class Rejected(CarpoolError, status=400, code="invalid_value"):
    """The request is at fault: the same one would fail again."""

    @classmethod
    def of(cls, name: str, value: Any, rule: str) -> Self:
        """The error of one parameter: its name, its value, and the rule that it breaks."""
        return cls(f"{name[:60]}={show(value)}: {rule}", param=name[:60])


class MissingParameter(Rejected, code="missing_parameter"):
    """Something that every request must say is not there."""


class UnknownParameter(Rejected, code="unknown_parameter"):
    """The pipeline takes no parameter of this name."""


class UnsupportedParameter(Rejected, code="unsupported_parameter"):
    """A known parameter that cannot be used here."""


class InvalidValue(Rejected):
    """A parameter has the wrong type or an impossible value."""


class InvalidJSON(Rejected, code="invalid_json"):
    """The body is not a JSON object."""


class InvalidHTTP(Rejected, code="invalid_http"):
    """The bytes are not HTTP/1.1, or could be read in two ways. The connection is closed."""


class SizeRejected(Rejected, code="size_not_supported"):
    """The model cannot draw an image of this size."""


class MaskMismatch(Rejected, code="mask_mismatch"):
    """A mask that does not belong to its picture, or marks nothing in it."""


class InvalidAPIKey(CarpoolError, status=401, code="invalid_api_key"):
    """The bearer token is missing or unknown."""


class KeyRequired(CarpoolError, status=403, code="api_key_required"):
    """Only clients with an API key may do this, and the server has none."""


class HostNotAllowed(CarpoolError, status=403, code="host_not_allowed"):
    """`Host` is not a name of this server: see `--allowed-host`."""


class OriginNotAllowed(CarpoolError, status=403, code="origin_not_allowed"):
    """A web page of another origin, and the server has no API keys."""


class UnsupportedMediaType(CarpoolError, status=415, code="unsupported_media_type"):
    """The body's `content-type` is not one that the endpoint takes."""


class ModelNotFound(CarpoolError, status=404, code="model_not_found"):
    """The server serves another model."""


class ModelNotSupported(CarpoolError, status=404, code="model_not_supported"):
    """The served model cannot do what this endpoint is for."""


class FileNotFound(CarpoolError, status=404, code="file_not_found"):
    """No file behind this link: it has expired, or is not one of ours."""


class NoSuchEndpoint(CarpoolError, status=404, code="not_found"):
    """The server has no such path."""


class UnsupportedEndpoint(NoSuchEndpoint, code="unsupported_endpoint"):
    """OpenAI has this path, and this server does not."""


class MethodNotAllowed(CarpoolError, status=405, code="method_not_allowed"):
    """The path is there, but not with this method: `allow` says with which."""


class RangeNotSatisfiable(CarpoolError, status=416, code="range_not_satisfiable"):
    """`Range` names no byte of the file."""


class JobNotFound(CarpoolError, status=404, code="job_not_found"):
    """No such job: never accepted, deleted, or older than the store keeps them."""


class FileNotReady(JobNotFound, code="file_not_ready"):
    """The job has no such file, or not yet."""


class VideoNotFound(JobNotFound, code="video_not_found"):
    """No such video: see `JobNotFound`."""


class VideoNotReady(VideoNotFound, code="video_not_ready"):
    """The video has no such file, or not yet."""


class IdempotencyMismatch(CarpoolError, status=422, code="idempotency_mismatch"):
    """An `Idempotency-Key` came again with another body."""


class StoreFailed(CarpoolError, status=503, code="store_failed", should_retry=True):
    """The store of jobs could not be read or written."""

    wants_room = False  # on its disk: all that is there stays, and can be used once there is some


class UnsupportedImage(Rejected, code="unsupported_image"):
    """The bytes are no picture that is read here."""


class ImageTooLarge(Rejected, status=413, code="image_too_large"):
    """A picture has more pixels than the server takes."""


class BodyTooLarge(CarpoolError, status=413, code="body_too_large"):
    """The body exceeds the server's limit."""


class Overloaded(CarpoolError, status=429, code="queue_full", should_retry=True):
    """The queue is full, or holds more work than may wait."""


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """This client asks more often, or for more at once, than it may."""


class TooLate(Rejected, code="deadline_too_near"):
    """A deadline that cannot be met, by what forwards have taken so far."""


class Cancelled(CarpoolError, status=499, code="client_closed"):
    """The caller gave the request up."""


class PipelineFailed(CarpoolError):
    """The pipeline or one of its modules raised; the cause is chained."""


class WorkerLost(CarpoolError, status=503, code="worker_lost", should_retry=True):
    """The process that ran the request ended before the answer."""


class Starting(CarpoolError, status=503, code="starting", should_retry=True):
    """The model is still loading."""


class Draining(CarpoolError, status=503, code="draining", should_retry=True):
    """The server is about to end and takes no new work."""

    @classmethod
    def of_new_work(cls) -> "Draining":
        return cls("the server is ending and takes no new requests", retry_after_s=5)


class LanguageServerFailed(
    CarpoolError, status=502, code="language_server_failed", should_retry=True
):
    """The server of `--language-url` gave no answer, or none that can be used."""


class OutOfMemory(CarpoolError, status=503, code="out_of_memory"):
    """One call of the request alone exceeds the device's memory."""


class DeadlineExceeded(CarpoolError, status=504, code="deadline_exceeded"):
    """The request's own `timeout_s` ran out."""


class LoadFailed(CarpoolError, status=503, code="model_load_failed"):
    """The model cannot be loaded, or cannot be served as it is."""

    wants_memory = False  # it may load once others have made room
    was_killed = False  # a process that was to load a part of it: nothing is known to be wrong


class LoraRejected(CarpoolError):
    """An adapter cannot be registered under this name for this model."""


class Forked(CarpoolError):
    """This process is a fork of the one that loaded the model, and has none of its threads."""


class LibraryMissing(CarpoolError, status=501, code="library_missing"):
    """The request needs an optional library that is not installed."""


class SettingRejected(CarpoolError):
    """A setting has an unknown name or an impossible value."""


def _subclasses(of: type[CarpoolError]) -> Iterable[type[CarpoolError]]:
    yield of
    for child in of.__subclasses__():
        yield from _subclasses(child)


def by_name(name: str) -> type[CarpoolError]:
    """The error class of this name; `PipelineFailed` for one that is not known here."""
    matches = (cls for cls in _subclasses(CarpoolError) if cls.__name__ == name)
    return next(matches, PipelineFailed)


def by_code(code: str) -> type[CarpoolError]:
    """The error class of a job's failure; `PipelineFailed` for a code that is not known here."""
    matches = (cls for cls in _subclasses(CarpoolError) if cls.code == code)
    return next(matches, PipelineFailed)
