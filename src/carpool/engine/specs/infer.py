"""Guess a table from shapes, for a class without one.

The rows of a call are axis 0 of its main input. A tensor of equal length stacks; if its length is
a multiple, by an axis of the main input, that axis is folded into its rows (the frames of
AnimateDiff); other tensors are shared. The same goes for lists of tensors; deeper nesting is
shared; plain values are flags, which must be equal; lengths are never padded. A guess proves
nothing: see `probation.py`.
"""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from carpool.engine.specs.rules import CONCAT, SCALAR, SHARE, STACK, STACKS, ArgumentRule, Spec

MAIN_INPUTS = (
    "hidden_states", "sample", "x", "z", "latents", "latent_model_input", "noisy_latents",
    "input_ids", "pixel_values", "inputs_embeds", "image_latents",
)  # fmt: skip
GUESSES = (SCALAR, STACK, STACKS, CONCAT, SHARE)  # first match wins


def infer(arguments: Mapping[str, Any], shared: Collection[str] = ()) -> Spec | None:
    """Guess how calls with such arguments fuse; None if no argument has rows.

    Args:
        arguments: one call's arguments, by name.
        shared: names of tensors to share because stacking them proved wrong.
    """
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.ndim}
    main = next((name for name in MAIN_INPUTS if name in tensors), next(iter(tensors), None))
    if main is None:
        return None
    lead = tensors[main]
    rules = {name: _rule(name, value, lead, shared) for name, value in arguments.items()}
    return Spec(
        rows=main,
        rules={name: rule for name, rule in rules.items() if rule is not None} | {main: STACK},
        is_inferred=True,
    )


def reads_caches(pipeline: type) -> bool:
    """Whether a pipeline may read the key-value caches that its language models return.

    For diffusers' pipelines: whether their package mentions them. For others: assumed.
    """
    if not pipeline.__module__.startswith("diffusers.pipelines."):
        return True
    folder = Path(inspect.getfile(pipeline)).parent
    return any("past_key_values" in file.read_text() for file in folder.glob("*.py"))


def covers(spec: Spec, arguments: Mapping[str, Any]) -> bool:
    """Whether a table defines the meaning of each tensor of a call.

    One class serves several pipelines: Kandinsky 2.2 passes diffusers' UNet a tensor where the
    table expects lists, and a hint that the table lacks.
    """
    return all(spec.rule(name).covers(value) for name, value in arguments.items())


def _rule(name: str, value: Any, lead: Tensor, shared: Collection[str]) -> ArgumentRule | None:
    if isinstance(value, Mapping):
        rules = {str(n): _rule(str(n), entry, lead, shared) for n, entry in value.items()}
        return {n: rule for n, rule in rules.items() if rule is not None}
    guesses = (SHARE,) if name in shared else GUESSES
    return next((rule for rule in guesses if rule.resembles(name, value, lead)), None)
