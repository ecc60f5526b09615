"""`enhance_prompt`: a language model rewrites the prompt before the picture is drawn.

Some pipelines do this themselves, each with its own argument; for other pipelines a server may have
a rewriter, a separate language model.
"""

from collections.abc import Collection, Mapping
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.request.card import Card, Task
from carpool.types import CheckedRequest

NAME = "enhance_prompt"
REWRITER = "prompt_rewriter"  # component: the server's own
ALWAYS = "prompt_upsampler"  # component of FLUX.3, whose blocks rewrite every prompt
PLANS = "generate_prior_tokens"
"""Method of a pipeline that plans pictures: there `language_url` writes plans, not prompts."""

ARGUMENTS: dict[str, tuple[str, Any, Any]] = {
    "use_pe": ("pe", True, False),
    "enable_prompt_rewrite": ("text_encoder", True, False),
    "enable_prompt_enhancement": ("processor", True, False),
    "expand_prompts": ("text_encoder", True, False),
    "prompt_upsampling": ("prompt_enhancer_head", True, False),
    "caption_upsample_temperature": ("text_encoder", 0.15, None),  # its documentation's advice
}
"""Pipelines' arguments for rewriting: the component that does it, and the values for on and off."""


def check_enhancement(
    card: Card, task: Task, wish: Any, arguments: dict[str, Any], own: Collection[str]
) -> bool:
    """Check `enhance_prompt`, and set the pipeline's own argument for it by default.

    Args:
        wish: the request's value; None: the server's default.
        arguments: arguments of the request; the pipeline's own argument is added.
        own: names of the request's explicit arguments.

    Returns:
        Whether the server's rewriter must rewrite the prompt.

    Raises:
        InvalidValue: it is not a boolean, there is no text, or the pipeline's own argument
            contradicts it.
        UnsupportedParameter: the server cannot rewrite prompts for this model.
    """
    if wish is not None and not isinstance(wish, bool):
        raise InvalidValue.of(NAME, wish, "must be true or false")
    is_wanted = card.enhances if wish is None else wish
    name = card.enhancer
    has_text = isinstance(arguments.get("prompt"), str) and bool(arguments["prompt"].strip())
    if name == ALWAYS and wish is False:
        raise UnsupportedParameter(f"{NAME}=false: {card.id} rewrites all prompts", param=NAME)
    if not name or not (name in (REWRITER, ALWAYS) or task.takes(name)):
        if wish:
            text = f"{NAME}: {card.id} has no model that rewrites prompts: leave it out; a server "
            text += "that was started with --rewriter or --language-url takes it"
            raise UnsupportedParameter(text, param=NAME)
        return False
    if wish and not has_text:
        raise InvalidValue(f"{NAME}: there is no prompt to rewrite", param=NAME)
    if name == REWRITER:
        for own_way in ARGUMENTS.keys() - set(own):  # may be on by the pipeline's default
            if task.takes(own_way) and (is_wanted or wish is not None):
                arguments[own_way] = ARGUMENTS[own_way][2]
        return is_wanted and has_text
    if name == ALWAYS or (wish is None and not (card.enhances and has_text)):
        return False
    _, yes, no = ARGUMENTS[name]
    if name in own:
        if wish is not None and bool(arguments.get(name)) != wish:
            rule = f"{name}={arguments.get(name)!r} says otherwise: send one of them"
            raise InvalidValue(f"{NAME}={wish}, but {rule}", param=NAME)
        return False
    arguments[name] = yes if is_wanted else no
    return False


def writer_of(request: CheckedRequest) -> str:
    """Identifies the kind of text that is written for a request, if any: its length is learned."""
    own = [name for name in ARGUMENTS if request.arguments.get(name)]
    return " ".join([request.task, *own, *([NAME] if request.enhance_prompt else [])])


def enhancer_of(components: Mapping[str, Any], parameters: Collection[str]) -> str:
    """The rewriter of a pipeline's prompts: `REWRITER`, its own argument, `ALWAYS`, or "".

    Args:
        components: components of the pipeline, by name.
        parameters: names of its `__call__` parameters.
    """
    if components.get(REWRITER) is not None:
        return REWRITER
    for name, (component, *_) in ARGUMENTS.items():
        if name in parameters and components.get(component) is not None:
            return name
    return "" if components.get(ALWAYS) is None else ALWAYS
