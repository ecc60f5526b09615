"""`enhance_prompt`: what a request says of it, and what its pipeline is told."""

from dataclasses import replace
from typing import Any

import pytest

from carpool.errors import InvalidValue, Rejected, UnsupportedParameter
from carpool.request.card import Card, Parameter
from carpool.request.enhancement import ALWAYS, ARGUMENTS, REWRITER, enhancer_of
from carpool.request.parameters import check
from carpool.types import CheckedRequest, Request
from support.app import CARD

WITH_REWRITER = replace(CARD, enhancer=REWRITER)
REWRITING = replace(CARD, enhancer=ALWAYS)


def card_with(name: str) -> Card:
    """A model whose pipeline has an argument of its own for it."""
    [task] = CARD.tasks
    kind: Any = "float" if name == "caption_upsample_temperature" else "bool"
    task = replace(task, parameters=(*task.parameters, Parameter(name, kind)))
    return replace(CARD, tasks=(task,), enhancer=name)


def asked(card: Card, /, **parameters: Any) -> CheckedRequest:
    return check(card, Request(**{"prompt": "a", **parameters}), from_json=True)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_pipelines_own_argument_is_set(name: str) -> None:
    _, yes, no = ARGUMENTS[name]
    card = card_with(name)

    assert asked(card, enhance_prompt=True).arguments[name] == yes
    assert asked(card, enhance_prompt=False).arguments[name] == no
    assert name not in asked(card).arguments
    assert asked(replace(card, enhances=True)).arguments[name] == yes
    assert not asked(card, enhance_prompt=True).enhance_prompt


@pytest.mark.parametrize("name", ["use_pe", "enable_prompt_rewrite", "enable_prompt_enhancement"])
def test_two_wishes_that_disagree_are_refused_and_an_argument_wins_over_the_servers_default(
    name: str,
) -> None:
    card = card_with(name)

    assert asked(card, enhance_prompt=True, **{name: True}).arguments[name] is True
    assert asked(replace(card, enhances=True), **{name: False}).arguments[name] is False
    with pytest.raises(InvalidValue, match=f"{name}=False says otherwise"):
        asked(card, enhance_prompt=True, **{name: False})


def test_a_rewriter_is_asked_where_the_request_or_the_server_wants_it() -> None:
    assert asked(WITH_REWRITER, enhance_prompt=True).enhance_prompt
    assert not asked(WITH_REWRITER).enhance_prompt
    by_default = replace(WITH_REWRITER, enhances=True)
    assert asked(by_default).enhance_prompt
    assert not asked(by_default, enhance_prompt=False).enhance_prompt


@pytest.mark.parametrize(
    ("card", "prompt", "wish", "error", "rule"),
    [
        (CARD, "a", True, UnsupportedParameter, "no model that rewrites prompts"),
        (REWRITING, "a", False, UnsupportedParameter, "rewrites all prompts"),
        (WITH_REWRITER, "a", "yes", InvalidValue, "must be true or false"),
        (WITH_REWRITER, "a", 1, InvalidValue, "must be true or false"),
        (WITH_REWRITER, " ", True, InvalidValue, "no prompt to rewrite"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    card: Card, prompt: str, wish: Any, error: type[Rejected], rule: str
) -> None:
    with pytest.raises(error, match=rule) as refusal:
        asked(card, prompt=prompt, enhance_prompt=wish)
    assert refusal.value.param == "enhance_prompt"


def test_a_model_without_a_rewriter_takes_false_and_one_that_always_rewrites_true() -> None:
    assert not asked(CARD, enhance_prompt=False).enhance_prompt
    assert not asked(REWRITING, enhance_prompt=True).enhance_prompt


def test_a_component_that_a_checkpoint_left_out_rewrites_nothing() -> None:
    assert enhancer_of({"pe": None}, ["use_pe"]) == ""
    assert enhancer_of({"pe": object()}, ["use_pe"]) == "use_pe"
    assert enhancer_of({ALWAYS: object()}, []) == ALWAYS
    assert enhancer_of({"pe": object(), REWRITER: object()}, ["use_pe"]) == REWRITER
