"""`enhance_prompt`, as each pipeline calls it."""

from dataclasses import replace
from typing import Any

import pytest

from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.request.card import Parameter
from carpool.request.parameters import check
from carpool.types import Request
from support.app import CARD


def arguments(name: str, **options: Any) -> Any:
    task = replace(CARD.tasks[0], parameters=(*CARD.parameters, Parameter(name, "other")))
    card = replace(CARD, tasks=(task,), enhancer=name)
    return check(card, Request("a cat", **options)).arguments


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("use_pe", (False, True)),
        ("enable_prompt_rewrite", (False, True)),
        ("enable_prompt_enhancement", (False, True)),
        ("caption_upsample_temperature", (None, 0.15)),
    ],
)
def test_it_is_the_pipelines_own_argument_which_wins(name: str, values: tuple[Any, Any]) -> None:
    off, on = (arguments(name, enhance_prompt=value).get(name) for value in (False, True))

    assert (off, on) == values
    assert arguments(name, enhance_prompt=True, **{name: 0.5})[name] == 0.5
    assert name not in arguments(name)


def test_a_model_that_does_not_rewrite_prompts_refuses_it_by_name() -> None:
    with pytest.raises(UnsupportedParameter, match="does not rewrite prompts"):
        check(CARD, Request("a cat", enhance_prompt=True))
    with pytest.raises(InvalidValue, match="true or false"):
        check(CARD, Request("a cat", enhance_prompt="yes"))
    assert "enhance_prompt" not in check(CARD, Request("a cat", enhance_prompt=False)).arguments
