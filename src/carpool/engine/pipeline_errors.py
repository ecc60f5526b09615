"""Exceptions that left a pipeline: what callers are told, and what tracebacks must not keep."""

import traceback

import torch

from carpool.errors import CarpoolError, InvalidValue, OutOfMemory, PipelineFailed, reason


def explained(error: BaseException, *, has_parked: bool) -> Exception:
    """What the caller is told of an exception that left the pipeline.

    Args:
        has_parked: the pipeline has called a module; before, it checks what it was given.
    """
    _empty_frames(error)
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        said = f"the pipeline's own code ran out of memory: {reason(error)}"
        told: CarpoolError = OutOfMemory(said)
    elif not has_parked and isinstance(error, (ValueError, TypeError)):
        told = InvalidValue(f"the pipeline refuses the request: {reason(error)}")
    else:
        told = PipelineFailed(f"the pipeline failed: {type(error).__name__}: {reason(error)}")
    told.__cause__ = error
    return told


def _empty_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames that an error, and those behind it, came through."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _ = frame.f_locals  # brings what `locals()` gave out before up to date: empty
        errors += [e for e in (one.__cause__, one.__context__) if e and id(e) not in seen]
