"""Kinds of calls: the keys under which evidence of fusing is kept, and their parts of a call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from carpool.engine.intercept import Call
from carpool.engine.specs.infer import holds_tensors
from carpool.engine.specs.rules import SHARE, ArgumentRule, Rule


@dataclass(frozen=True, slots=True)
class Kind:
    """The flags and types of calls that are proven together."""

    text: str  # class, method, flags, types: the key of evidence
    sizes: str
    module: int
    stacked: tuple[str, ...]  # arguments whose entries may differ from call to call


def kind_of(call: Call, *, is_exact: bool) -> Kind:
    target, arguments = call.target, call.arguments()
    spec = target.spec
    assert spec is not None
    parts, sizes, stacked = [], [], []
    for name, value in sorted(arguments.items()):
        rule = spec.rules.get(name)
        if value is None:
            continue
        text, size = _described(rule, value)
        parts.append(f"{name}={text}")
        if size:
            sizes.append(f"{name}:{size}")
        if rule is not None and (not isinstance(rule, Rule) or rule.varies):
            stacked.append(name)
    extra = [
        *(["lora"] if call.lora else []),
        *(["exact"] if is_exact else []),
        *(["training"] if target.module.training else []),
    ]
    name = f"{type(target.module).__name__}.{target.method}"
    return Kind(
        f"{name}({', '.join([*parts, *extra])})",
        " ".join(sizes),
        id(target.module),
        tuple(stacked) if spec.is_inferred else (),
    )


def _described(rule: ArgumentRule | None, value: Any) -> tuple[str, str]:
    """The type of an argument, and its size, as text."""
    if isinstance(value, Tensor):
        word = rule.word if isinstance(rule, Rule) else "tensor"
        shape = value.shape if rule is SHARE else value.shape[1:]
        if not value.ndim:
            shape = value.shape
        kind = str(value.dtype).removeprefix("torch.")
        return f"{word} {kind} {value.ndim}d", "x".join(map(str, shape))
    if isinstance(value, Mapping):
        rules = rule if isinstance(rule, Mapping) else {}
        entries = {str(n): _described(rules.get(n), v) for n, v in sorted(value.items())}
        texts = ", ".join(f"{n}={text}" for n, (text, _) in entries.items())
        return f"{{{texts}}}", " ".join(f"{n}:{size}" for n, (_, size) in entries.items() if size)
    if isinstance(value, (list, tuple)) and holds_tensors(value):
        described = [_described(rule, entry) for entry in value]
        return f"{len(value)} of {described[0][0]}", " ".join(size for _, size in described)
    return repr(value)[:200], ""


def width(rows: Sequence[int]) -> str:
    return "+".join(map(str, sorted(rows)))
