"""Describe the calls of running requests: fuse key, rows, adapters.

A request makes nearly the same calls at every step, two with guidance: only the latents differ. So
the descriptions of its last calls are cached with tests of the arguments, and reused for arguments
that pass. The tests cost a tenth of `Fuser.describe`.
"""

import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from carpool.engine.fuse import Alone, Fuser
from carpool.engine.intercept import Call, Target
from carpool.engine.language.parts import WRITING
from carpool.engine.probation.probation import Probation
from carpool.engine.specs.rule import NoTest, Test
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")

MOST = 4  # descriptions kept for a method; with 2, a step of three calls would reuse none


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


Descriptions = dict[int, deque[Description]]
"""A request's last descriptions of each method, newest first, by the `id` of the target."""


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
        cached = descriptions.get(id(target), ()) if is_lasting else ()
        for description in cached:
            if description.holds_for(call):
                break
        else:
            call = self._probation.infer_spec(call)
            if call.target.spec is None and target.method not in WRITING:
                self._log_once(target)
            key, rows = self._fuser.describe(call)
            hash(key)  # raises now if a value cannot be hashed
            is_tried, names = self._probation.is_tried(call.target), tuple(call.kwargs)
            tests = _tests(target, call) if is_lasting else ()
            description = Description(len(call.args), names, tests, is_tried, key, rows)
            if tests:
                descriptions.setdefault(id(target), deque(maxlen=MOST)).appendleft(description)
        key = description.key
        if description.is_tried and self._probation.runs_alone(call, key):
            key = Alone(call)
        return call, (key, request.lora) if self._is_grouped else key, description.rows

    def alone(self, call: Call, request: CheckedRequest) -> tuple[Call, Hashable, int]:
        """The fallback when `describe` raises: the call runs alone."""
        if request.lora:
            call = replace(call, lora=request.lora)
        return call, Alone(call), 1

    def _log_once(self, target: Target) -> None:
        name = type(target.module).__name__
        if name not in self._logged:
            self._logged.add(name)
            log.warning(
                "Carpool cannot batch %s (%s): requests run one at a time through it",
                name,
                target.component,
            )


def _tests(target: Target, call: Call) -> tuple[Test, ...]:
    """A test for each argument; empty: the description must not be reused."""
    spec = target.spec
    if spec is None or any(call.arguments().get(name) is None for name in spec.needs):
        return ()  # it runs alone: no other call has its key
    if not isinstance(call.arguments().get(spec.rows), Tensor):
        return ()
    arguments = [*zip(target.positional, call.args, strict=False), *call.kwargs.items()]
    try:
        return tuple([spec.rule(name).same(value) for name, value in arguments])
    except NoTest:
        return ()
