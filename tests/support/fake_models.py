"""A model whose answers a test can work out, with a table that has each kind of rule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Interception
from carpool.engine.specs import (
    CONCAT,
    LIST,
    SCALAR,
    SHARE,
    SPECS,
    STACK,
    STACKS,
    UNUSED,
    Pad,
    Spec,
    State,
)

SPEC = Spec(
    rows="x",
    rules={
        "x": STACK, "shared": SHARE, "entries": LIST, "time": SCALAR,
        "text": Pad(mask="mask", cut=("last_hidden_state", "hidden_states")),
        "mask": Pad(mask="mask"), "added": {"ids": STACK, "more": {"deep": STACK}}, "spare": UNUSED,
        "layers": STACKS, "patches": CONCAT, "counts": STACK,
        "cache": State(lambda cache: cache.mode if cache.mode != "mine" else None),
        "loose": Pad(mask="loose_mask", makes_mask=True),
        "loose_mask": Pad(mask="loose_mask", makes_mask=True),
    },
    adds={"is_short": True},
)  # fmt: skip
WIDTH = 3


@dataclass(frozen=True)
class Cache:
    """As a pipeline's own key-value cache; "mine" belongs to one request."""

    mode: str


class Fake(nn.Module):
    """Adds everything up, row by row; reads of the text what its mask says."""

    def __init__(self, answer: Callable[[Tensor, Tensor | None], Any] | None = None) -> None:
        super().__init__()
        self.answer = answer or (lambda total, text: total)
        self.seen: list[dict[str, Any]] = []

    def forward(
        self,
        x: Tensor,
        shared: Tensor | None = None,
        entries: list[Tensor] | None = None,
        time: Any = None,
        text: Tensor | None = None,
        mask: Tensor | None = None,
        added: dict[str, Any] | None = None,
        flag: Any = None,
        spare: Any = None,
        layers: list[Tensor] | None = None,  # of each (rows, any)
        patches: Tensor | None = None,  # (patches of all rows, any)
        counts: Tensor | None = None,  # (rows,): how many of them are whose
        cache: Cache | None = None,
        loose: Tensor | None = None,  # (rows, length): text with a mask that may be left out
        loose_mask: Tensor | None = None,
        is_short: bool = False,
        return_dict: bool = True,
    ) -> Any:
        rows = x.shape[0]
        self.seen.append({"rows": rows, "x": x, "shared": shared, "text": text})
        self.seen[-1] |= {"loose_mask": loose_mask, "is_short": is_short}
        total = x.clone()
        if shared is not None:
            total = total + shared.sum()
        if entries is not None:
            total = total + torch.stack([entry.sum() for entry in entries]).reshape(rows, 1)
        if time is not None:
            time = torch.as_tensor(time, dtype=torch.float32).reshape(-1).expand(rows)
            total = total * (1 + time.reshape(rows, 1))
        if text is not None:
            heard = text if mask is None else text * mask.unsqueeze(-1)
            total = total + heard.sum(dim=(1, 2)).reshape(rows, 1)
        if added is not None:
            total = total + added["ids"] * 2 + added["more"]["deep"].reshape(rows, 1) * 3
        for layer in layers or []:
            total = total + layer.sum(dim=1, keepdim=True)
        if patches is not None and counts is not None:
            own = torch.split(patches, counts.tolist())
            total = total + torch.stack([one.sum() for one in own]).reshape(rows, 1)
        if cache is not None:
            total = total + len(cache.mode)
        if loose is not None:
            shifted = loose + 1  # padding that is read would show
            heard = shifted if loose_mask is None else shifted * loose_mask
            total = total + heard.sum(dim=1, keepdim=True)
        return self.answer(total, text)


class Half(nn.Module):
    """Computes in a number type of its own, and takes no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.weight.dtype
        return x * self.weight


@contextmanager
def fake_specs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SPECS, ("Fake", "forward"), SPEC)
        patch.setitem(SPECS, ("Half", "forward"), Spec(rows="x", rules={"x": STACK}, casts=True))
        yield


def call_on(module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    [target] = Interception({"model": module}).targets
    return Call(target, args, kwargs)


def run(fuser: Fuser, calls: Sequence[Call]) -> list[Any]:
    described = [fuser.describe(call) for call in calls]
    assert len({key for key, _ in described}) == 1, "these calls do not fuse"
    return fuser.run(calls, [rows for _, rows in described])


def fuse(*calls: dict[str, Any], module: nn.Module | None = None) -> bool:
    """Whether calls with these arguments share a key."""
    fuser, module = Fuser(), module or Fake()
    return len({fuser.describe(call_on(module, **call))[0] for call in calls}) == 1


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = {"x": torch.zeros(1, WIDTH)}
TOKENS = {"text": torch.ones(1, 4, 2)}


def masked_arguments(length: int) -> dict[str, Tensor]:
    text = randn(1, length, 2, seed=length)
    return {"x": randn(1, WIDTH, seed=length), "text": text, "mask": torch.ones(1, length)}
