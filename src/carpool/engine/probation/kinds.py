"""Kinds of calls: the keys under which evidence of fusing is kept, and their parts of a call."""

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.engine.intercept import Call


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
        rule = spec.rule(name)
        if value is None:
            continue
        text, size = rule.describe(value)
        parts.append(f"{name}={text}")
        if size:
            sizes.append(f"{name}:{size}")
        if rule.varies:
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


def width(rows: Sequence[int]) -> str:
    return "+".join(map(str, sorted(rows)))
