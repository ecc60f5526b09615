"""Describe the calls of running requests: fuse key, rows, adapters.

A request makes nearly the same call at every step: only the latents differ. So the description of
its last call of each method is cached with tests of its arguments, and reused while the arguments
pass them. The tests cost a tenth of `Fuser.describe`.
"""

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Target
from carpool.engine.language.parts import WRITING
from carpool.engine.probation.probation import Probation
from carpool.engine.specs.rule import NoTest, Test
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a call, and the tests that a later call must pass to reuse it."""

    positional: int  # number of positional arguments
    names: tuple[str, ...]  # keyword arguments, in order
    tests: tuple[Test, ...]  # one for each argument
    is_tried: bool  # on probation: calls of its key may turn out not to fuse
    key: Hashable
    rows: int

    def holds_for(self, call: Call) -> bool:
        kwargs, args = call.kwargs, call.args
        if len(args) != self.positional or tuple(kwargs) != self.names:
            return False
        values = (*args, *kwargs.values()) if args else kwargs.values()
        for test, value in zip(self.tests, values, strict=True):  # `rule.passes`, inlined for speed
            if not isinstance(test, tuple):
                if not test(value):
                    return False
            elif len(test) == 1:
                if type(value) is not type(test[0]) or value != test[0]:
                    return False
            elif not isinstance(value, Tensor):
                return False
            elif len(test) == 2:
                if test[0]() is not value or value._version != test[1]:
                    return False
            elif (value.shape, value.dtype, value.device) != test:
                return False
        return True


Descriptions = dict[int, Description]
"""A request's descriptions of its last call of each method, by the `id` of the target."""


class Describer:
    """Assigns fuse keys to calls."""

    def __init__(self, fuser: Fuser, probation: Probation, *, is_grouped_by_lora: bool) -> None:
        self._fuser, self._probation = fuser, probation
        self._is_grouped = is_grouped_by_lora
        self._logged: set[str] = set()  # classes without a table, logged once

    def describe(
        self, call: Call, request: CheckedRequest, descriptions: Descriptions
    ) -> tuple[Call, Hashable, int]:
        """The call to run, its fuse key and its rows.

        Args:
            descriptions: those of the same request; a new description is added.
        """
        target = call.target
        if request.lora:
            call = replace(call, lora=request.lora)
        # other targets are created for each call: their `id` is not stable
        is_lasting = target.spec is not None and not target.is_exclusive
        before = descriptions.get(id(target)) if is_lasting else None
        if before is not None and before.holds_for(call):
            key, rows, is_tried = before.key, before.rows, before.is_tried
        else:
            call = self._probation.infer_spec(call)
            if call.target.spec is None and target.method not in WRITING:
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
        """The fallback when `describe` raises: the call runs alone."""
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


def _tests(target: Target, call: Call) -> tuple[Test, ...] | None:
    """A test for each argument; None: the description must not be reused."""
    spec = target.spec
    if spec is None or any(call.arguments().get(name) is None for name in spec.needs):
        return None  # it runs alone: no other call has its key
    if not isinstance(call.arguments().get(spec.rows), Tensor):
        return None
    arguments = [*zip(target.positional, call.args, strict=False), *call.kwargs.items()]
    try:
        return tuple([spec.rule(name).same(value) for name, value in arguments])
    except NoTest:
        return None
