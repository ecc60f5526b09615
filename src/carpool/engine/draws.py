"""Draws from the global random numbers inside modules: each call uses its own request's numbers.

Noise of a decoder, active dropout, `torch.randn_like` in a forward: none is known in advance. So a
call that runs alone uses its request's numbers, and a fused forward uses separate ones. If a fused
forward has drawn from these, its answers are discarded, its calls run again one by one, and the
module's calls run alone from then on.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from carpool.engine.containment import UNCONTAINED
from carpool.engine.execute import Failure, RunCalls
from carpool.engine.intercept import computes_together
from carpool.engine.isolation import RequestContext
from carpool.engine.private_ride import PrivateContext
from carpool.engine.random_state import RandomState
from carpool.engine.request import RequestState


class Draws:
    """Runs forwards with the right random numbers. For the engine's thread."""

    def __init__(self, device: torch.device, *, is_group: bool) -> None:
        self._device, self._is_group = device, is_group
        self._idle: list[RandomState] = []  # not drawn from so far

    def around(self, run: RunCalls) -> RunCalls:
        """Wrap a forward: its calls get the random numbers that they would have alone."""

        def drawing(states: Sequence[RequestState]) -> list[Any]:
            is_private = isinstance(states[0].context, PrivateContext)  # its numbers are active
            if is_private or (self._is_group and computes_together(states[0].call.target.module)):
                return run(states)
            if len(states) > 1:
                answers = self._together(run, states)
                return answers or [_contained(drawing, state) for state in states]
            assert isinstance(states[0].context, RequestContext)
            numbers = states[0].context.random
            before = numbers.states
            numbers.enter()
            try:
                try:
                    answers = run(states)
                finally:
                    numbers.leave()
            except torch.OutOfMemoryError:
                numbers.go_back(before)  # it will be retried
                raise
            if numbers.has_moved(before):
                _note(states[0])
            return answers

        return drawing

    def _together(self, run: RunCalls, states: Sequence[RequestState]) -> list[Any] | None:
        """The answers of a fused forward; None if it drew random numbers."""
        numbers = self._idle.pop() if self._idle else RandomState(0, self._device)
        if numbers.states is None:
            numbers.enter()
            numbers.leave()
        before = numbers.states
        numbers.enter()
        try:
            answers = run(states)
        finally:
            numbers.leave()
        if numbers.has_moved(before):
            return None
        self._idle.append(numbers)
        return answers


def _contained(run: RunCalls, state: RequestState) -> Any:
    """The answer of a call that runs again alone, or its `Failure`."""
    try:
        return run([state])[0]
    except (torch.OutOfMemoryError, *UNCONTAINED):
        raise
    except BaseException as error:
        return Failure(error)


def _note(state: RequestState) -> None:
    """Let calls like this one run alone from now on, and keep this one out of the journal."""
    assert isinstance(state.context, RequestContext)
    target = state.call.target
    state.context.drawing.add((id(target.module), target.method))
    state.call = structs.replace(state.call, target=replace(target, is_exclusive=True))
