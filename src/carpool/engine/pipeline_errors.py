"""Map pipeline exceptions to API errors; clear tracebacks that hold tensors."""

import traceback

import torch

from carpool.errors import CarpoolError, InvalidValue, OutOfMemory, PipelineFailed, reason


def to_api_error(error: BaseException, *, has_parked: bool) -> Exception:
    """The error that the client gets for an exception that left the pipeline.

    Args:
        has_parked: the pipeline has called a module; before that it checks its arguments, so
            that a ValueError or TypeError is the request's fault.
    """
    _clear_frames(error)
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        said = f"the pipeline's own code ran out of memory: {reason(error)}"
        mapped: CarpoolError = OutOfMemory(said)
    elif not has_parked and isinstance(error, (ValueError, TypeError)):
        mapped = InvalidValue(f"the pipeline refuses the request: {reason(error)}")
    else:
        mapped = PipelineFailed(f"the pipeline failed: {type(error).__name__}: {reason(error)}")
    mapped.__cause__ = error
    return mapped


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables, and so the tensors, of the frames of an error and its causes."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _ = frame.f_locals  # empties the dict that an earlier `locals()` returned
        errors += [e for e in (one.__cause__, one.__context__) if e and id(e) not in seen]
