"""The requests of a check: different steps, guidance, seeds, prompts and arrivals.

They are few and short, so a check takes minutes. Requests that arrive a step later have one step
less, so they end together with earlier requests and share a decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.errors import MissingParameter
from carpool.request.card import Card
from carpool.request.parameters import check
from carpool.types import CheckedRequest, Request

PROMPTS = (  # short: some models truncate long prompts, with a warning
    "a red circle",
    "a blue star on black",
    "a white ring",
    "a green square",
    "a yellow star on blue",
    "a purple circle",
)

FEWER_STEPS = (0, 0, 1, 1, 0, 1)
GUIDANCE = (1.0, 1.0, 0.75, 1.0, None, 0.75)  # relative to the model's own; None: without guidance
FIRST_ARRIVALS = 3  # arrive at once; later requests arrive after a step
DISTILLED_STEPS = 4  # models with at most this default are distilled


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check: numbers of requests, steps, rows and repeats."""

    requests: int = 6
    steps: int = 5  # steps of the longest request; at most the model's own
    max_rows: int = 8  # widest timed forward
    repeats: int = 3  # runs of each timed width
    budget_s: float = 120.0  # time for timing; slower widths are skipped
    parameters: Mapping[str, Any] = field(default_factory=dict)  # parameters of all requests


QUICK = CheckOptions(requests=4, steps=3, max_rows=4, budget_s=10.0)


def mixed(card: Card, options: CheckOptions) -> list[CheckedRequest]:
    """The requests, in order of arrival.

    Raises:
        Rejected: the model refuses a request.
    """
    task = card.task_for(options.parameters)
    defaults = {p.name: p.default for p in task.parameters} | card.defaults
    guidance, usual = defaults.get("guidance_scale"), card.steps(card.defaults)
    requests = []
    for i in range(options.requests):
        saved_steps = FEWER_STEPS[i] if usual > DISTILLED_STEPS or not usual else 0
        part = GUIDANCE[i]
        offered: dict[str, Any] = {
            "prompt": PROMPTS[i],
            "output_type": "pt" if "pt" in task.output_types else "np",
            "num_inference_steps": max(1, min(options.steps, usual or options.steps) - saved_steps),
        }
        if isinstance(guidance, (int, float)) and guidance > 1 and part != 1:
            offered["guidance_scale"] = 1.0 if part is None else 1 + (guidance - 1) * part
        arguments = {name: value for name, value in offered.items() if task.takes(name)}
        request = Request(
            **{
                "prompt": None,
                "seed": i,
                "request_id": f"check-{i}",
                **arguments,
                **options.parameters,
            }
        )
        try:
            requests.append(check(card, request))
        except MissingParameter as error:
            give = "--image FILE" if "image" in str(error.param) else f"-p {error.param}=VALUE"
            raise MissingParameter(f"{error.message} ({give})", param=error.param) from None
    return requests


def described(request: CheckedRequest) -> str:
    """A short description of a request, for messages."""
    names = ("num_inference_steps", "guidance_scale")
    values = [f"{name}={request.arguments[name]}" for name in names if name in request.arguments]
    return ", ".join([f"seed={request.seed}", *values])
