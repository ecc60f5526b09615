"""What can go wrong, as callers see it.

    Rejected                 400  the request is at fault; the same request fails again
      MissingParameter            missing_parameter
      UnknownParameter            unknown_parameter
      UnsupportedParameter        unsupported_parameter
      InvalidValue                invalid_value
      InvalidJSON                 invalid_json
      InvalidHTTP                 invalid_http
      SizeRejected                size_not_supported
      UnsupportedImage            unsupported_image
      ImageTooLarge          413  image_too_large
      MaskMismatch                mask_mismatch
    UnsupportedMediaType     415  unsupported_media_type
    InvalidAPIKey            401  invalid_api_key
    HostNotAllowed           403  host_not_allowed
    OriginNotAllowed         403  origin_not_allowed
    ModelNotFound            404  model_not_found
    ModelNotSupported        404  model_not_supported
    NoSuchEndpoint           404  not_found
      UnsupportedEndpoint         unsupported_endpoint
    MethodNotAllowed         405  method_not_allowed
    RangeNotSatisfiable      416  range_not_satisfiable
    FileNotFound             404  file_not_found
    JobNotFound              404  job_not_found
      FileNotReady                file_not_ready
      VideoNotFound               video_not_found
        VideoNotReady             video_not_ready
    IdempotencyMismatch      422  idempotency_mismatch
    StoreFailed              503  store_failed       the disk is full, say: safe to retry
    BodyTooLarge             413  body_too_large
    Overloaded               429  queue_full         retry after `retry_after_s`
      RateLimited                 rate_limit_exceeded    this client, not the server
    Cancelled                499  client_closed
    PipelineFailed           500  internal_error     the pipeline raised: it would again
    WorkerLost               503  worker_lost        safe to retry
    Starting, Draining       503  starting, draining
    OutOfMemory              503  out_of_memory      did not fit even alone
    DeadlineExceeded         504  deadline_exceeded
    LoadFailed                    the model cannot be served at all
    LoraRejected                  an adapter cannot be registered
    Forked                        a fork of the process that loaded the model
    LibraryMissing                an optional library is not installed
    SettingRejected               a flag or an environment variable is wrong

The HTTP layer reads `status`, `body` and `retry_after_s`; it adds nothing of its own. Clients are
never told where files of the server lie, the log is: `reason` is for messages, `in_full` for lines
of the log.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from carpool.error_text import in_full as in_full
from carpool.error_text import nearest as nearest
from carpool.error_text import reason as reason
from carpool.error_text import show as show
from carpool.error_text import without_paths as without_paths


class CarpoolError(Exception):
    """Any failure that Carpool reports; `str(error)` is meant for the caller."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    should_retry: ClassVar[bool] = False  # may the same request succeed later?

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
        """What clients are told, in OpenAI's shape."""
        message = without_paths(self.message) if self.status >= 500 else self.message
        return {"message": message, "type": self.type, "param": self.param, "code": self.code}


class Rejected(CarpoolError):
    """The request is at fault."""

    status = 400
    code = "invalid_value"


class MissingParameter(Rejected):
    """Something that every request must say is not there."""

    code = "missing_parameter"


class UnknownParameter(Rejected):
    """The pipeline takes no parameter of this name."""

    code = "unknown_parameter"


class UnsupportedParameter(Rejected):
    """A known parameter that cannot be used here."""

    code = "unsupported_parameter"


class InvalidValue(Rejected):
    """A parameter has the wrong type or an impossible value."""


class InvalidJSON(Rejected):
    """The body is not a JSON object."""

    code = "invalid_json"


class InvalidHTTP(Rejected):
    """The bytes are not HTTP/1.1, or could be read in two ways. The connection is closed."""

    code = "invalid_http"


class SizeRejected(Rejected):
    """The model cannot draw an image of this size."""

    code = "size_not_supported"


class MaskMismatch(Rejected):
    """A mask that does not belong to its picture, or marks nothing in it."""

    code = "mask_mismatch"


class InvalidAPIKey(CarpoolError):
    """The bearer token is missing or unknown."""

    status = 401
    code = "invalid_api_key"


class KeyRequired(CarpoolError):
    """Only clients with an API key may do this, and the server has none."""

    status = 403
    code = "api_key_required"


class HostNotAllowed(CarpoolError):
    """`Host` is not a name of this server: see `--allowed-host`."""

    status = 403
    code = "host_not_allowed"


class OriginNotAllowed(CarpoolError):
    """A web page of another origin, and the server has no API keys."""

    status = 403
    code = "origin_not_allowed"


class UnsupportedMediaType(CarpoolError):
    """The body's `content-type` is not one that the endpoint takes."""

    status = 415
    code = "unsupported_media_type"


class ModelNotFound(CarpoolError):
    """The server serves another model."""

    status = 404
    code = "model_not_found"


class ModelNotSupported(CarpoolError):
    """The served model cannot do what this endpoint is for."""

    status = 404
    code = "model_not_supported"


class FileNotFound(CarpoolError):
    """No file behind this link: it has expired, or is not one of ours."""

    status = 404
    code = "file_not_found"


class NoSuchEndpoint(CarpoolError):
    """The server has no such path."""

    status = 404
    code = "not_found"


class UnsupportedEndpoint(NoSuchEndpoint):
    """OpenAI has this path, and this server does not."""

    code = "unsupported_endpoint"


class MethodNotAllowed(CarpoolError):
    """The path is there, but not with this method: `allow` says with which."""

    status = 405
    code = "method_not_allowed"


class RangeNotSatisfiable(CarpoolError):
    """`Range` names no byte of the file."""

    status = 416
    code = "range_not_satisfiable"


class JobNotFound(CarpoolError):
    """No such job: never accepted, deleted, or older than the store keeps them."""

    status = 404
    code = "job_not_found"


class FileNotReady(JobNotFound):
    """The job has no such file, or not yet."""

    code = "file_not_ready"


class VideoNotFound(JobNotFound):
    """No such video: see `JobNotFound`."""

    code = "video_not_found"


class VideoNotReady(VideoNotFound):
    """The video has no such file, or not yet."""

    code = "video_not_ready"


class IdempotencyMismatch(CarpoolError):
    """An `Idempotency-Key` came again with another body."""

    status = 422
    code = "idempotency_mismatch"


class StoreFailed(CarpoolError):
    """The store of jobs could not be read or written."""

    status = 503
    code = "store_failed"
    should_retry = True


class UnsupportedImage(Rejected):
    """The bytes are no picture that is read here."""

    code = "unsupported_image"


class ImageTooLarge(Rejected):
    """A picture has more pixels than the server takes."""

    status = 413
    code = "image_too_large"


class BodyTooLarge(CarpoolError):
    """The body exceeds the server's limit."""

    status = 413
    code = "body_too_large"


class Overloaded(CarpoolError):
    """The queue is full, or holds more work than may wait."""

    status = 429
    code = "queue_full"
    should_retry = True


class RateLimited(Overloaded):
    """This client asks more often, or for more at once, than it may."""

    code = "rate_limit_exceeded"


class TooLate(Rejected):
    """A deadline that cannot be met, by what forwards have taken so far."""

    code = "deadline_too_near"


class Cancelled(CarpoolError):
    """The caller gave the request up."""

    status = 499
    code = "client_closed"


class PipelineFailed(CarpoolError):
    """The pipeline or one of its modules raised; the cause is chained."""


class WorkerLost(CarpoolError):
    """The process that ran the request ended before the answer."""

    status = 503
    code = "worker_lost"
    should_retry = True


class Starting(CarpoolError):
    """The model is still loading."""

    status = 503
    code = "starting"
    should_retry = True


class Draining(CarpoolError):
    """The server is about to end and takes no new work."""

    status = 503
    code = "draining"
    should_retry = True


class OutOfMemory(CarpoolError):
    """One call of the request alone exceeds the device's memory."""

    status = 503
    code = "out_of_memory"


class DeadlineExceeded(CarpoolError):
    """The request's own `timeout_s` ran out."""

    status = 504
    code = "deadline_exceeded"


class LoadFailed(CarpoolError):
    """The model cannot be loaded, or cannot be served as it is."""


class LoraRejected(CarpoolError):
    """An adapter cannot be registered under this name for this model."""


class Forked(CarpoolError):
    """This process is a fork of the one that loaded the model, and has none of its threads."""


class LibraryMissing(CarpoolError):
    """What was asked for needs an optional library that is not installed."""


class SettingRejected(CarpoolError):
    """A setting has an unknown name or an impossible value."""


def _subclasses(of: type[CarpoolError]) -> Iterable[type[CarpoolError]]:
    yield of
    for child in of.__subclasses__():
        yield from _subclasses(child)


def by_name(name: str) -> type[CarpoolError]:
    """The error class of this name; `PipelineFailed` for one that is not known here."""
    return {cls.__name__: cls for cls in _subclasses(CarpoolError)}.get(name, PipelineFailed)


def by_code(code: str) -> type[CarpoolError]:
    """The error class of a job's failure; `PipelineFailed` for a code that is not known here."""
    known = {cls.code: cls for cls in _subclasses(CarpoolError)}
    return known.get(code, PipelineFailed)
