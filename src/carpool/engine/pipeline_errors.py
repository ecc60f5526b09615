"""Map pipeline exceptions to API errors; clear tracebacks that hold tensors."""

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from carpool.engine.request import RequestState
from carpool.errors import CarpoolError, InvalidValue, OutOfMemory, PipelineFailed, named, reason
from carpool.request.rules import TOKENS

_SLIPS = LookupError, TypeError, AssertionError, ArithmeticError, AttributeError, RuntimeError
"""Exceptions by which code that checks nothing fails for an argument that it cannot take."""

_CHECKED = """prompt negative_prompt width height num_inference_steps guidance_scale
true_cfg_scale strength num_frames output_type"""
CHECKED = frozenset([*_CHECKED.split(), *TOKENS])
"""Arguments that have rules of their own here: a pipeline that fails for them is broken."""


def error_of(
    state: RequestState,
    error: BaseException,
    failed_forward: BaseException | None,
    defaults: Mapping[str, Any],
) -> Exception:
    """The error that a request's client gets for an exception that left the pipeline.

    Args:
        failed_forward: raised in its call just before.
        defaults: of the pipeline's arguments.
    """
    is_own = all(cause is not failed_forward for cause in causes(error))
    is_early = state.denoiser_calls == 0 and is_own
    arguments = state.request.arguments.items()
    names = [name for name, value in arguments if name not in defaults or value != defaults[name]]
    return to_api_error(error, is_early=is_early, arguments=names)


def to_api_error(
    error: BaseException, *, is_early: bool, arguments: Collection[str] = ()
) -> Exception:
    """The error that the client gets for an exception that left the pipeline.

    Args:
        is_early: the pipeline's own code raised it, no module's forward, and before it called its
            denoiser: till then it reads its arguments, which are the request's fault.
        arguments: names of those that the request has given.
    """
    doubtful = sorted(set(arguments) - CHECKED)
    try:
        return _mapped(error, is_early=is_early, doubtful=doubtful)
    except BaseException:  # of an exception whose class answers in its own way
        return PipelineFailed(f"the pipeline failed: {type(error).__name__}")


def _mapped(error: BaseException, *, is_early: bool, doubtful: Sequence[str]) -> Exception:
    param = doubtful[0] if len(doubtful) == 1 else None
    _clear_frames(error)
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        message = f"the pipeline's own code ran out of memory: {reason(error)}"
        mapped: CarpoolError = OutOfMemory(message)
    elif is_early and isinstance(error, ValueError):
        mapped = InvalidValue(f"the pipeline refuses the request: {reason(error)}", param=param)
    elif is_early and doubtful and isinstance(error, _SLIPS):
        problem = f"{', '.join(doubtful)}: {named(error)}"
        mapped = InvalidValue(f"the pipeline cannot take {problem}", param=param)
    else:
        mapped = PipelineFailed(f"the pipeline failed: {named(error)}")
    mapped.__cause__ = error
    return mapped


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables, and so the tensors, of the frames of an error and its causes."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            _ = frame.f_locals  # empties the dict that an earlier `locals()` returned


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or beside."""
    errors, visited = [error], set[int]()
    while errors:
        cause = errors.pop()
        visited.add(id(cause))
        yield cause
        errors += [e for e in (cause.__cause__, cause.__context__) if e and id(e) not in visited]
