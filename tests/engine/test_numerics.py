"""Exact numerics: a call of a fused forward gets the bits that it gets alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carpool.engine.fuse import Fuser
from carpool.engine.numerics import DATA, ROWS, Exact
from carpool.engine.specs import SPECS, STACK, STACKS, Spec
from support.fake_models import call_on, randn, run

WEIGHT, KERNEL, SQUARE = randn(37, 24, seed=1), randn(12, 6, 3, 3, seed=2), randn(8, 8, seed=3)


def attention(x: Tensor) -> Tensor:
    q = x.reshape(*x.shape[:-1], 3, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q * 2, q - 1).transpose(1, 2).flatten(2)


def folded(x: Tensor) -> Tensor:
    """(rows, channels, frames, height, width): the pictures' places become rows."""
    return x.permute(0, 3, 4, 2, 1).reshape(-1, x.shape[2], x.shape[1])


def attended(x: Tensor) -> Tensor:
    """(rows, 6, 8, 8): places as tokens, and back with the channels last, and a residual."""
    y = F.linear(x.flatten(2).transpose(1, 2), KERNEL[:6, :6, 0, 0])
    return (y.transpose(-1, -2).reshape(x.shape) + x) / 1


OPERATIONS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT), (7, 24)),
    "a linear layer on vectors": (lambda x: F.linear(x, WEIGHT), (24,)),
    "matmul": (lambda x: x @ WEIGHT.t(), (7, 24)),
    "a product of batches": (lambda x: torch.bmm(x, x.transpose(1, 2)), (7, 24)),
    "einsum": (lambda x: torch.einsum("bld,ed->ble", x, WEIGHT), (7, 24)),
    "convolution": (lambda x: F.conv2d(x, KERNEL, padding=1), (6, 9, 7)),
    "attention": (attention, (5, 24)),
    "folded rows": (lambda x: F.linear(x.flatten(0, 1), WEIGHT).reshape(-1, 7, 37), (7, 24)),
    "silu": (F.silu, (13,)),
    "sigmoid in place": (lambda x: x.clone().sigmoid_(), (13,)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), (3, 5)),
    "sine and cosine": (lambda x: torch.cat([x.sin(), x.cos()], dim=-1), (11,)),
    "layer norm": (lambda x: F.layer_norm(x, (24,)), (7, 24)),
    "group norm": (lambda x: F.group_norm(x, 3), (6, 9, 7)),
    "softmax": (lambda x: x.softmax(dim=-1), (5, 7)),
    "mean": (lambda x: x.mean(dim=1), (7, 13)),
    "two batches, one after another": (
        lambda x: F.linear(torch.cat([x, x * 0]), WEIGHT).chunk(2, dim=0)[1],
        (7, 24),
    ),
    "channels that come last": (
        lambda x: F.conv2d(x.transpose(1, 2).reshape(-1, 6, 9, 7), KERNEL),
        (63, 6),
    ),
    "frames that are folded into rows, and back": (  # AnimateDiff's motion modules
        lambda x: F.linear(folded(x), SQUARE).view(-1, 64, 4, 8),
        (8, 4, 8, 8),
    ),
    "frames as an axis of pictures": (  # SANA-Video's convolution over time
        lambda x: F.conv2d(
            x.transpose(2, 3)
            .reshape(-1, 6, 9, 7)
            .permute(0, 2, 3, 1)
            .contiguous()
            .permute(0, 3, 1, 2)
            .view(-1, 2, 6, 63)
            .permute(0, 2, 1, 3),
            KERNEL,
            padding=1,
        ),
        (2, 6, 7, 9),
    ),
    "an attention block, divided and normed": (  # of pictures, as UNet2DModel's
        lambda x: F.group_norm(attended(attended(x)), 3),
        (6, 8, 8),
    ),
    "an attention block, without a sum": (
        lambda x: F.group_norm(F.silu(attended(x)) / 2, 3),
        (6, 8, 8),
    ),
    "a sum of one that is laid out by a reshape": (
        lambda x: F.linear(1 + folded(x), SQUARE).view(-1, 64, 4, 8),
        (8, 4, 8, 8),
    ),
}


@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 1), (1, 2, 2, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_gets_the_bits_that_it_gets_alone(name: str, rows: Sequence[int]) -> None:
    operation, shape = OPERATIONS[name]
    calls = [randn(n, *shape, seed=10 + i) for i, n in enumerate(rows)]
    joined, mode = torch.cat(calls), Exact(rows)
    mode.mark(joined, ROWS | DATA)

    with mode:
        together = operation(joined)

    for ours, call in zip(together.split(list(rows)), calls, strict=True):
        assert torch.equal(ours, operation(call))


@pytest.mark.parametrize(
    "operation", [F.silu, torch.sin, lambda x: x.mean(dim=1), lambda x: x.sum(dim=(1, 2))]
)
def test_calls_with_other_strides_get_the_bits_that_they_get_alone(
    operation: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strided(nn.Module):
        def forward(self, x: Tensor, pair: list[Tensor]) -> Tensor:
            return operation(x) + operation(pair[0])

    rules = {"x": STACK, "pair": STACKS}
    monkeypatch.setitem(SPECS, ("Strided", "forward"), Spec(rows="x", rules=rules))
    plain = [randn(rows, 24, 24, seed=seed) for seed, rows in enumerate((1, 1, 2, 3))]
    turned = [x.mT if seed % 2 else x for seed, x in enumerate(plain)]
    requests = [{"x": x, "pair": [x.mT, x]} for x in turned]
    module = Strided()

    answers = run(Fuser(is_exact=True), [call_on(module, **request) for request in requests])

    assert all(map(torch.equal, answers, [module(**request) for request in requests]))


def test_what_mixes_rows_is_not_split_and_so_shows() -> None:
    x, mode = randn(4, 6), Exact([1, 1, 2])
    mode.mark(x, ROWS | DATA)

    with mode:
        mean, product = x.mean(dim=0, keepdim=True), x @ x.t()

    assert mean.shape == (1, 6)
    assert torch.equal(product, x @ x.t())


def test_weights_are_not_taken_for_rows() -> None:
    layer, mode = nn.Linear(6, 4), Exact([1, 3])  # as many outputs as rows
    x = randn(4, 6)
    mode.mark(x, ROWS | DATA)

    with torch.no_grad(), mode:
        together = layer(x)

    with torch.no_grad():
        assert torch.equal(together[:1], layer(x[:1]))
        assert torch.equal(together[1:], layer(x[1:].clone()))  # begins as an allocation does


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (lambda x: float(x[0, 0]), "reads values"),
        (lambda x: bool((x > 0).any()), "goes over the batch"),
        (lambda x: x + x[:1], "reads some rows"),
        (lambda x: x + x.select(0, 1), "reads some rows"),
        (lambda x: (x * 2)[0] + (x * 3)[1] + (x * 4)[2], "reads some rows"),
        (lambda x: [x.view(3, 5, 1)[i] for i in range(3)], None),
        (lambda x: torch.stack([row * 2 for row in x.unbind(0)]), None),
        (lambda x: torch.stack([x[i] for i in range(3)]), None),
        (lambda x: x[:, 0], None),
        (lambda x: (x[:, :3] + 0)[0] + (x[:, :3] * 2)[1] + (x[:, :3] * 3)[2], "reads some rows"),
        (lambda x: (z := x[:, :3].clone())[0] + z.T[1] + z.T[2], "reads some rows"),
    ],
)
def test_decisions_by_some_rows_are_suspicious(
    reads: Callable[[Tensor], Any], said: str | None
) -> None:
    x, mode = randn(3, 5), Exact([1, 1, 1])
    mode.mark(x, ROWS | DATA)

    with mode:
        reads(x)

    if said is None:
        assert mode.suspicion is None
    else:
        assert mode.suspicion is not None
        assert said in mode.suspicion
