"""A table guessed from shapes, for a class that has none.

The rows of a call are axis 0 of its main input. A tensor with as many entries stacks; one with a
multiple of them, by an axis of the main input, has that axis folded into its rows (the frames of
AnimateDiff); any other is shared. Lists of tensors likewise, and deeper ones are shared; plain
values are flags, which must be equal; lengths are never padded. A guess proves nothing: see
`probation.py`.
"""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from carpool.engine.specs.rules import CONCAT, SCALAR, SHARE, STACK, STACKS, ArgumentRule, Spec

MAIN_INPUTS = (
    "hidden_states",
    "sample",
    "x",
    "z",
    "latents",
    "latent_model_input",
    "noisy_latents",
    "input_ids",
    "pixel_values",
    "inputs_embeds",
    "image_latents",
)
TIMES = ("timestep", "timesteps", "t", "sigma")  # one number for all rows of a call, or one a row


def infer(arguments: Mapping[str, Any], shared: Collection[str] = ()) -> Spec | None:
    """Guess how calls with such arguments fuse; None where nothing has rows.

    Args:
        arguments: of one call, by name.
        shared: names of tensors that are not to be stacked, because that guess was wrong.
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
    """Whether a pipeline may read the key-value caches that its language models give.

    One of diffusers' does if code of its package names them; of any other it is not known.
    """
    if not pipeline.__module__.startswith("diffusers.pipelines."):
        return True
    folder = Path(inspect.getfile(pipeline)).parent
    return any("past_key_values" in file.read_text() for file in folder.glob("*.py"))


def covers(rules: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a table says what each tensor of a call means.

    A class serves several pipelines: diffusers' UNet gets a tensor from Kandinsky 2.2 under a name
    that lists have in the table, and a hint that it does not name.
    """
    for name, value in arguments.items():
        rule = rules.get(name)
        if isinstance(value, Tensor):
            if rule is None or rule is STACKS:
                return False
        elif isinstance(value, Mapping):
            if rule is not STACKS and not covers(rule if isinstance(rule, Mapping) else {}, value):
                return False
        elif rule is None and holds_tensors(value):
            return False
    return True


def _rule(name: str, value: Any, lead: Tensor, shared: Collection[str]) -> ArgumentRule | None:
    rows = lead.shape[0]
    if isinstance(value, Tensor):
        if name in shared:
            return SHARE
        if not value.ndim:
            return SCALAR if name in TIMES else SHARE
        if value.shape[0] == rows:
            return STACK
        return CONCAT if _is_folded(value, lead) else SHARE
    if isinstance(value, Mapping):
        rules = {str(n): _rule(str(n), entry, lead, shared) for n, entry in value.items()}
        return {n: rule for n, rule in rules.items() if rule is not None}
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Tensor) for v in value):
        if name in shared:
            return SHARE
        if all(v.ndim and v.shape[0] == rows for v in value):
            return STACKS
        return CONCAT if all(_is_folded(v, lead) for v in value) else SHARE
    return SHARE if holds_tensors(value) else None


def _is_folded(value: Tensor, lead: Tensor) -> bool:
    """Whether an axis of the main input, such as its frames, is folded into a tensor's rows."""
    if value.ndim < 3 or not value.is_floating_point():
        return False
    times, rest = divmod(value.shape[0], lead.shape[0])
    return not rest and times in lead.shape[1:3]


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list or tuple with one in it, however deep."""
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(entry) for entry in value)
    return isinstance(value, Tensor)
