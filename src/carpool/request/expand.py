"""Expands a request into one request for each output: lists of prompts, n, seeds."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from carpool.errors import InvalidValue, UnsupportedParameter
from carpool.request.card import PER_PROMPT
from carpool.request.own_values import check_n, seeds
from carpool.types import CheckedRequest, Request, new_request_id

MAX_N = 1000  # limit for the outputs of one request
TEXTS = re.compile(r"(negative_)?prompt(_\d+)?")  # may be lists, with one entry for each prompt


def merged(request: Any, parameters: Mapping[str, Any]) -> Request:
    """Fill missing fields of a request from `parameters`."""
    if not isinstance(request, (Request, str)):
        kind = type(request).__name__
        raise InvalidValue(f"a request is a prompt or a carpool.Request, not a {kind}")
    if "prompt" in parameters:
        raise InvalidValue("the prompt is given twice: once is enough", param="prompt")
    if isinstance(request, str):
        return Request(request, **parameters)
    common = {"seed": None, "timeout_s": None, **parameters}
    seed, timeout_s = common.pop("seed"), common.pop("timeout_s")
    return Request(
        request.prompt,
        seed=seed if request.seed is None else request.seed,
        timeout_s=timeout_s if request.timeout_s is None else request.timeout_s,
        request_id=request.request_id,
        tenant=request.tenant,
        user=request.user,
        **{**common, **request.parameters},
    )


def repeated(request: Request, n: int = 1) -> Iterator[Request]:
    """Split a request into requests of one output each; the first keeps the id.

    Lists of prompts, of negative prompts and of generators have one entry for each prompt. Every
    prompt has `n` (times `num_images_per_prompt`) consecutive outputs. Seeds are s, s+1, ... in
    that order, or the generators' seeds.

    Raises:
        InvalidValue, UnsupportedParameter: the message has the value and the rule.
    """
    parameters = dict(request.parameters)
    for name in PER_PROMPT:
        if (count := parameters.pop(name, None)) is not None:
            n *= check_n(count, MAX_N, name)
    prompts = prompts_in({"prompt": request.prompt, **request.parameters})
    if prompts * n > MAX_N:
        raise InvalidValue(f"{prompts} prompts x {n} outputs: must be at most {MAX_N}", param="n")
    of_each = _seeds(parameters.pop("generator", None), request.seed, prompts, n)
    yield from fanned_out(request, parameters, of_each, n)


def prompts_in(parameters: Mapping[str, Any]) -> int:
    """Count the prompts of a request whose texts may be lists; rules: see `repeated`.

    Args:
        parameters: all parameters, with `prompt`.
    """
    lengths = {name: len(value) for name, value in _lists(parameters).items()}
    if not lengths:
        return 1
    first, count = next(iter(lengths.items()))
    if count == 0:
        raise InvalidValue(f"{first} is an empty list: give at least one", param=first)
    for name, length in lengths.items():
        if length != count:
            rule = "lists of prompts must have one entry for each prompt"
            problem = f"{first} has {count} entries and {name} {length}"
            raise InvalidValue(f"{problem}: {rule}", param=name)
    if "prompt" not in lengths and count > 1:
        rule = "give a list of as many prompts, or one string"
        raise InvalidValue(f"{first} is a list of {count} beside one prompt: {rule}", param=first)
    return count


def fanned_out(
    request: Request, parameters: Mapping[str, Any], seeds_: Sequence[int], n: int = 1
) -> Iterator[Request]:
    """Make a request for each seed, n consecutive ones for each prompt; the first keeps the id.

    Args:
        request: its texts may be lists, already checked by `prompts_in`.
        parameters: parameters of each request; lists of texts in it are ignored.
    """
    lists = _lists({"prompt": request.prompt, **request.parameters})
    for i, seed in enumerate(seeds_):
        values = {name: value[i // n] for name, value in lists.items()}
        yield Request(
            values.pop("prompt", request.prompt),
            seed=seed,
            timeout_s=request.timeout_s,
            request_id=request.request_id if i == 0 else new_request_id(),
            tenant=request.tenant,
            user=request.user,
            **{**parameters, **values},
        )


def _lists(parameters: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    return {
        name: value
        for name, value in parameters.items()
        if isinstance(value, (list, tuple)) and TEXTS.fullmatch(name)
    }


def outputs_each(request: Request, n: int = 1) -> int:
    """The number of outputs of each prompt, after the checks of `repeated`."""
    counts = [request.parameters.get(name) for name in PER_PROMPT]
    return n * math.prod(int(count) for count in counts if count is not None)


def grouped(outputs: Sequence[CheckedRequest], size: int) -> list[CheckedRequest]:
    """Mark checked outputs as groups of `size` outputs of the same request."""
    if size == 1:
        return list(outputs)
    first = [outputs[i - i % size] for i in range(len(outputs))]
    return [
        replace(output, group=head.request_id, group_size=size)
        for output, head in zip(outputs, first, strict=True)
    ]


def _seeds(generator: Any, seed: int | None, prompts: int, n: int) -> list[int]:
    """The seed of each output, from the given generators or from one seed."""
    if generator is None:
        return seeds(seed, prompts * n)
    if seed is not None:
        raise InvalidValue("seed and generator are both given: one is enough", param="generator")
    if not isinstance(generator, (list, tuple)):
        return seeds(seed_of(generator), prompts * n)
    if len(generator) not in (prompts, prompts * n):
        rule = f"must be one, or a list of {prompts * n}"
        raise InvalidValue(f"generator is a list of {len(generator)}: {rule}", param="generator")
    outputs = n if len(generator) == prompts else 1
    return [seed for item in generator for seed in seeds(seed_of(item), outputs)]


def seed_of(generator: Any) -> int:
    """The seed of an unused `torch.Generator`.

    Raises:
        UnsupportedParameter: not a generator, or one that was used before.
    """
    instead = "pass seed=..., or torch.Generator().manual_seed(...)"
    kind = type(generator)
    if not (hasattr(generator, "initial_seed") and hasattr(generator, "get_state")):
        problem = f"generator is a {kind.__name__}: {instead}"
        raise UnsupportedParameter(problem, param="generator")
    if generator.device.type != "cpu":
        problem = f"generator is on {generator.device}, and engines draw on the CPU: {instead}"
        raise UnsupportedParameter(problem, param="generator")
    seed = int(generator.initial_seed())
    fresh = kind()
    fresh.manual_seed(seed)
    if fresh.get_state().tolist() != generator.get_state().tolist():
        problem = f"generator was used before, so its seed does not describe it: {instead}"
        raise UnsupportedParameter(problem, param="generator")
    return seed % 2**63


def check_previews(count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        rule = "must be a whole number, 0 or above"
        raise InvalidValue(f"partial_images={count!r}: {rule}", param="partial_images")
    return count
