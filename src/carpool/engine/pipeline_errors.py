"""Map pipeline exceptions to API errors; clear tracebacks that hold tensors."""

import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from carpool.engine.request import RequestState
from carpool.errors import CarpoolError, InvalidValue, OutOfMemory, PipelineFailed, named, reason
from carpool.request.rules import TOKENS

_SLIPS = LookupError, TypeError, AssertionError, ArithmeticError, AttributeError, RuntimeError
"""Exceptions of unchecked code that gets an unsuitable argument."""

_CHECKED = """prompt negative_prompt width height num_inference_steps guidance_scale
true_cfg_scale strength num_frames output_type"""
CHECKED = frozenset([*_CHECKED.split(), *TOKENS])
"""Arguments that are checked before: a pipeline that fails because of them is broken."""


def error_of(
    state: RequestState,
    error: BaseException,
    failed_forward: BaseException | None,
    defaults: Mapping[str, Any],
) -> Exception:
    """Map an exception from a pipeline to the error for the request's client.

    Args:
        failed_forward: the exception of its call just before.
        defaults: defaults of the pipeline's arguments.
    """
    if all(cause is not failed_forward for cause in causes(error)):
        is_early = state.denoiser_calls == 0
    else:
        is_early = state.timeline.step == 0 and _is_of_inputs(error)
    arguments = state.request.arguments.items()
    names = [name for name, value in arguments if name not in defaults or value != defaults[name]]
    return to_api_error(error, is_early=is_early, arguments=names)


def to_api_error(
    error: BaseException, *, is_early: bool, arguments: Collection[str] = ()
) -> Exception:
    """Map an exception from a pipeline to the error for the client.

    Args:
        is_early: the pipeline's own code raised it before the first call of its denoiser, or a
            module's forward did in the first step, about its inputs: so the request is at fault.
        arguments: names of the request's arguments.
    """
    doubtful = sorted(set(arguments) - CHECKED)
    try:
        return _mapped(error, is_early=is_early, doubtful=doubtful)
    except BaseException:  # the exception's class may raise itself
        return PipelineFailed(f"the pipeline failed: {type(error).__name__}")


def _mapped(error: BaseException, *, is_early: bool, doubtful: Sequence[str]) -> Exception:
    param = doubtful[0] if len(doubtful) == 1 else None
    for cause in causes(error):  # local variables hold tensors
        traceback.clear_frames(cause.__traceback__)
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            _ = frame.f_locals  # clears the dict of an earlier `locals()` call
    if isinstance(error, CarpoolError):
        return error
    ends = traceback.extract_tb(error.__traceback__)[-1:]  # `raise TypeError` checks arguments
    is_raised = isinstance(error, TypeError) and any(str(e.line).startswith("raise") for e in ends)
    if isinstance(error, torch.OutOfMemoryError):
        message = f"the pipeline's own code ran out of memory: {reason(error)}"
        mapped: CarpoolError = OutOfMemory(message)
    elif is_early and (isinstance(error, ValueError) or is_raised):
        mapped = InvalidValue(f"the pipeline refuses the request: {reason(error)}", param=param)
    elif is_early and doubtful and isinstance(error, _SLIPS):
        problem = f"{', '.join(doubtful)}: {named(error)}"
        mapped = InvalidValue(f"the pipeline cannot take {problem}", param=param)
    else:
        mapped = PipelineFailed(f"the pipeline failed: {named(error)}")
    mapped.__cause__ = error
    return mapped


def _is_of_inputs(error: BaseException) -> bool:
    """Whether a module's forward failed for its inputs, rather than for a faulty device or hook."""
    if type(error) is RuntimeError:  # torch's; errors of devices have classes or other texts
        return re.search(r"\b(shapes?|sizes?|channels)\b", str(error)) is not None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return module.partition(".")[0] in ("diffusers", "transformers", "torch")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and its contexts."""
    errors, visited = [error], set[int]()
    while errors:
        cause = errors.pop()
        visited.add(id(cause))
        yield cause
        errors += [e for e in (cause.__cause__, cause.__context__) if e and id(e) not in visited]
