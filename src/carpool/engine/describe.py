"""Describe the calls of running requests: fuse key, rows, adapters.

A request makes nearly the same call at every step: other latents, everything else as before. So
the description of its last call of each method is kept with what the fuse key was made from, and
used again while that has not changed. The comparison costs a tenth of `Fuser.describe`.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Target
from carpool.engine.probation.probation import Probation
from carpool.engine.specs import CONCAT, LAYERS, SCALAR, SHARE, STACK, STACKS, UNUSED, Keyed, Pad
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")

_PLAIN = (bool, int, float, str, type(None))
TESTS = 4096  # the most tests that are kept of each sort


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a call, and the tests by which it holds for a later one."""

    positional: int  # arguments without a name
    names: tuple[str, ...]  # named arguments, in their order
    tests: tuple["Test", ...]  # one for each argument
    is_tried: bool  # calls of its key may be found not to fuse
    key: Hashable
    rows: int

    def holds_for(self, call: Call) -> bool:
        kwargs, args = call.kwargs, call.args
        if len(args) != self.positional or tuple(kwargs) != self.names:
            return False
        values = (*args, *kwargs.values()) if args else kwargs.values()
        for test, value in zip(self.tests, values, strict=True):
            if not isinstance(test, tuple):
                if not test(value):
                    return False
            elif not isinstance(value, Tensor):
                return False
            elif len(test) == 2:  # the same tensor, unchanged
                if test[0]() is not value or value._version != test[1]:
                    return False
            elif (value.shape, value.dtype, value.device) != test:
                return False
        return True


Descriptions = dict[int, Description]
"""A request's descriptions of its last call of each method, by the `id` of the target."""


class Describer:
    """Gives calls the key by which they are fused."""

    def __init__(self, fuser: Fuser, probation: Probation, *, is_grouped_by_lora: bool) -> None:
        self._fuser, self._probation = fuser, probation
        self._is_grouped = is_grouped_by_lora
        self._logged: set[str] = set()  # classes that are not fused

    def describe(
        self, call: Call, request: CheckedRequest, descriptions: Descriptions
    ) -> tuple[Call, Hashable, int]:
        """The call as it is to be run, its fuse key and its rows.

        Args:
            descriptions: those of the same request; a new description is added.
        """
        target = call.target
        if request.lora:
            call = replace(call, lora=request.lora)
        # other targets are made anew for each call: their `id` says nothing
        is_lasting = target.spec is not None and not target.is_exclusive
        before = descriptions.get(id(target)) if is_lasting else None
        if before is not None and before.holds_for(call):
            key, rows, is_tried = before.key, before.rows, before.is_tried
        else:
            call = self._probation.infer_spec(call)
            if call.target.spec is None and target.method != "generate":
                self._log_once(target)
            key, rows = self._fuser.describe(call)
            hash(key)  # raises now if a value cannot be hashed
            is_tried = self._probation.is_tried(call.target)
            if is_lasting and (tests := _tests(target, call)) is not None:
                names = tuple(call.kwargs)
                descriptions[id(target)] = Description(
                    len(call.args), names, tests, is_tried, key, rows
                )
            else:
                descriptions.pop(id(target), None)
        if is_tried and self._probation.runs_alone(call, key):
            key = self._fuser.alone(call)
        return call, (key, request.lora) if self._is_grouped else key, rows

    def alone(self, call: Call, request: CheckedRequest) -> tuple[Call, Hashable, int]:
        """The answer of `describe` for a call on which it raises: the call runs alone."""
        if request.lora:
            call = replace(call, lora=request.lora)
        return call, self._fuser.alone(call), 1

    def _log_once(self, target: Target) -> None:
        name = type(target.module).__name__
        if name not in self._logged:
            self._logged.add(name)
            log.warning(
                "Carpool cannot batch %s (%s): requests run one at a time through it",
                name,
                target.component,
            )


_Form = tuple[torch.Size, torch.dtype, torch.device]
_Unchanged = tuple[weakref.ref[Tensor], int]
Test = _Form | _Unchanged | Callable[[Any], bool]
"""Whether an argument fuses as an earlier one did: data for tensors, as it is asked often."""


def _tests(target: Target, call: Call) -> tuple[Test, ...] | None:
    """A test for each argument; None where the description must not be used again."""
    spec = target.spec
    if spec is None or any(call.arguments().get(name) is None for name in spec.needs):
        return None  # it runs alone: its key is equal to no other
    if not isinstance(call.arguments().get(spec.rows), Tensor):
        return None
    named = [*zip(target.positional, call.args, strict=False), *call.kwargs.items()]
    try:
        return tuple([_form_or_test(spec.rules.get(name), value) for name, value in named])
    except _Unknown:
        return None


class _Unknown(Exception):
    """No cheap test tells whether such an argument has changed."""


def _form_or_test(rule: Any, value: Any) -> Test:
    if isinstance(value, Tensor):
        if _is_told_by_form(rule):
            return value.shape, value.dtype, value.device
        if (rule is SHARE or isinstance(rule, Pad)) and not value.is_inference():
            return weakref.ref(value), value._version
    return _test(rule, value)


def _is_told_by_form(rule: Any) -> bool:
    return rule in (STACK, SCALAR, CONCAT) or (isinstance(rule, Pad) and not rule.places)


def _test(rule: Any, value: Any) -> Callable[[Any], bool]:
    """Whether another value gives the same part of a fuse key as this one, by its rule."""
    if rule is UNUSED:
        return _anything
    if isinstance(value, _PLAIN):
        return _same_value((type(value), value))
    if isinstance(value, Tensor):
        if rule is SHARE or isinstance(rule, Keyed) or (isinstance(rule, Pad) and rule.places):
            return _same_tensor(value)
        if rule in (STACK, SCALAR, CONCAT, LAYERS) or isinstance(rule, Pad):
            return _same_form(value.shape, value.dtype, value.device)
    elif rule is STACKS and isinstance(value, (list, tuple)):
        kind, tensors = type(value), [entry for entry in value if isinstance(entry, Tensor)]
        tests = [_same_form(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if len(tests) == len(value):
            return lambda argument: (
                type(argument) is kind
                and len(argument) == len(tests)
                and all(test(entry) for test, entry in zip(tests, argument, strict=True))
            )
    elif isinstance(value, dict) and (not value or isinstance(rule, Mapping)):
        rules = rule if isinstance(rule, Mapping) else {}
        entries = {name: _test(rules.get(name), entry) for name, entry in value.items()}
        return lambda argument: (
            type(argument) is dict
            and argument.keys() == entries.keys()
            and all(test(argument[name]) for name, test in entries.items())
        )
    raise _Unknown


def _anything(argument: Any) -> bool:
    return True


# One test for all requests whose arguments are alike: a test that one of them has just used
# is in the processor's cache for the next, after a forward has emptied it.


@lru_cache(maxsize=TESTS)
def _same_value(typed: tuple[type, Any]) -> Callable[[Any], bool]:
    cls, value = typed
    return lambda argument: type(argument) is cls and bool(argument == value)


@lru_cache(maxsize=TESTS)
def _same_form(
    shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Callable[[Any], bool]:
    return lambda argument: (
        isinstance(argument, Tensor)
        and argument.shape == shape
        and argument.dtype is dtype
        and argument.device == device
    )


def _same_tensor(value: Tensor) -> Callable[[Any], bool]:
    if value.is_inference():
        raise _Unknown  # does not count its versions: a change would go unseen
    reference, version = weakref.ref(value), value._version
    return lambda argument: (
        isinstance(argument, Tensor) and argument is reference() and argument._version == version
    )
