"""`enhance_prompt`: one word for what each pipeline calls the rewriting of a prompt."""

from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter, show
from carpool.request.card import Card, Task

ENHANCERS: dict[str, tuple[Any, Any]] = {  # parameters of diffusers, with their values for off, on
    "use_pe": (False, True),
    "enable_prompt_rewrite": (False, True),
    "enable_prompt_enhancement": (False, True),
    "caption_upsample_temperature": (None, 0.15),  # what FLUX.2's own page uses
}


def enhanced(card: Card, task: Task, value: Any) -> dict[str, Any]:
    """The pipeline's own argument for a value of `enhance_prompt`.

    Raises:
        InvalidValue: the value is neither true nor false.
        UnsupportedParameter: the model does not rewrite prompts.
    """
    if not isinstance(value, bool):
        rule = "must be true or false"
        raise InvalidValue(f"enhance_prompt={show(value)}: {rule}", param="enhance_prompt")
    name = card.enhancer
    if name and task.takes(name):
        return {name: ENHANCERS[name][value]}
    if not value:
        return {}
    rule = f"leave it out, pipelines with {', '.join(ENHANCERS)} do it"
    raise UnsupportedParameter(
        f"enhance_prompt: {card.id} does not rewrite prompts: {rule}", param="enhance_prompt"
    )
