"""Second guesses: arguments that a guessed table may share, and whether calls then fuse."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from msgspec import structs

from carpool.engine.containment import UNCONTAINED
from carpool.engine.intercept import Call, Target
from carpool.engine.numerics import Exact
from carpool.engine.probation.snapshot import ModuleSnapshot, difference
from carpool.engine.specs.rules import SCALAR, TIMES, Entries, Spec
from carpool.errors import named

MAX_GUESSES = 8  # shared arguments to try: each costs one fused forward, once
NOT_SHARED = ("encoder_hidden_states", "pooled_projections")  # they differ in nearly all requests
OF_ONE_REQUEST = ("encoder", "text", "prompt", "caption", "guidance", "pooled")  # equal by chance

Fused = Callable[[Sequence[Call], Sequence[int], Exact], list[Any]]


def equal_guesses(spec: Spec, names: Collection[str]) -> list[list[str]]:
    """Stacked arguments that are equal in all calls and may be shared: each alone, then all."""
    shareable = sorted(name for name in names if _may_be_shared(name, spec, is_equal=True))
    return [*([name] for name in shareable), shareable][:MAX_GUESSES] if shareable else []


def differing_guess(spec: Spec, names: Collection[str]) -> list[str]:
    """Stacked arguments that may be shared though they differ: a forward may skip some rows."""
    return sorted(name for name in names if _may_be_shared(name, spec, is_equal=False))


def _may_be_shared(name: str, spec: Spec, *, is_equal: bool) -> bool:
    """Whether a guess may share a stacked argument: not the main input, times or texts."""
    if name in (spec.rows, *NOT_SHARED) or isinstance(spec.rule(name), Entries):
        return False
    if is_equal and any(word in name for word in OF_ONE_REQUEST):
        return False
    return name not in TIMES or (spec.rule(name) is SCALAR and not is_equal)


def deviation_of(
    calls: Sequence[Call],
    rows: Sequence[int],
    fused: Fused,
    answers: Sequence[Any],
    before: ModuleSnapshot,
) -> str | None:
    """The deviation of a fused forward from the calls' lone answers; None: none."""
    target, mode = calls[0].target, Exact(rows)
    try:
        together = fused([with_own_lists(call) for call in calls], rows, mode)
    except (torch.OutOfMemoryError, *UNCONTAINED):
        raise
    except BaseException as error:
        before.restore_random()
        return f"fails fused, not alone: {named(error)[:200]}"
    reason = difference(together, answers, target.spec.unread if target.spec else ())
    if reason is None and is_guess(target):
        return mode.suspicion
    return reason


def is_guess(target: Target) -> bool:
    """Whether a method's table may not describe its code."""
    return target.is_doubted or (target.spec is not None and target.spec.is_inferred)


def with_own_lists(call: Call) -> Call:
    """The same call with copied lists: code that runs it may remove entries from a list."""

    def own(value: Any) -> Any:
        return list(value) if type(value) is list else value

    kwargs = {name: own(value) for name, value in call.kwargs.items()}
    return structs.replace(call, args=tuple(map(own, call.args)), kwargs=kwargs)
