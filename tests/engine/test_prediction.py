"""Predictions of a request, what modes that batch compare of it, and its usage."""

from types import SimpleNamespace
from typing import Any

from carpool import Request
from carpool.engine.model.usage import Meter
from carpool.engine.observe.timeline import Timeline
from carpool.engine.prediction import Predictor
from carpool.engine.request import Outcome, RequestState
from carpool.request.card import Card, Parameter, Task
from carpool.request.parameters import check
from carpool.schedule.cost import Costs
from carpool.schedule.views import QueuedRequest
from carpool.types import Event

# a pipeline with a default size of its own, over a model that was made for another
SIZED = (
    Parameter("prompt", "str"),
    Parameter("width", "int", default=48),
    Parameter("height", "int", default=32),
)
TASK = Task("text-to-image", "OwnPipeline", SIZED)
OWN = Card("own", (TASK,), {}, 8, (1024, 1024), 1024 * 1024, max_steps=50)


class Nobody:
    """A listener."""

    def event(self, event: Event) -> None: ...

    def done(self, outcome: Outcome) -> None: ...


def queued(**sides: Any) -> QueuedRequest:
    request = check(OWN, Request("a cat", **sides))
    state = RequestState(request, Nobody(), 1, Timeline("1", 0.0))
    return Predictor(OWN, Costs(), 8).queued_request(state)


def test_a_request_without_a_size_shares_with_those_who_say_the_pipelines_own_default() -> None:
    silent, same, other = queued(), queued(width=48, height=32), queued(width=1024, height=1024)

    assert (silent.signature, silent.wave, silent.cost) == (same.signature, same.wave, same.cost)
    assert silent.signature != other.signature
    assert silent.wave != other.wave
    assert silent.cost != other.cost


def test_usage_of_a_request_without_a_size_is_that_of_the_pipelines_own_default() -> None:
    meter = Meter(SimpleNamespace(pipe=None, card=OWN))  # type: ignore[arg-type]

    assert meter.usage(check(OWN, Request("a cat"))).result() == (0, 6 * 4)  # patches of 8 px
