"""Sparse attention against its definition, written out token by token."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carpool.engine.model.sparse_attention import (
    Grid,
    cubes_of,
    kept_cubes,
    sparse_linear_attention,
    video_sparse_attention,
)

HEADS, WIDTH = 2, 6


def drawn(tokens: int, count: int, rows: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    shape = rows, tokens, HEADS, WIDTH
    return [2 * torch.randn(shape, generator=random) for _ in range(count)]


def full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def by_tokens(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, grid: Grid, kept: int
) -> Tensor:
    """Video sparse attention of one row, by lists of tokens."""
    cubes: dict[tuple[int, ...], list[int]] = {}
    for token, place in enumerate(product(*map(range, grid))):
        cubes.setdefault(tuple(at // 4 for at in place), []).append(token)
    answer = torch.zeros_like(query)
    for head in range(HEADS):
        q, k, v, g = (x[0, :, head] for x in (query, key, value, gate))
        means_k = torch.stack([k[tokens].mean(0) for tokens in cubes.values()])
        means_v = torch.stack([v[tokens].mean(0) for tokens in cubes.values()])
        for tokens in cubes.values():
            scores = means_k @ q[tokens].mean(0) / math.sqrt(WIDTH)
            best = scores.argsort(descending=True)[:kept].tolist()
            seen = [token for one in best for token in list(cubes.values())[one]]
            weights = (q[tokens] @ k[seen].T / math.sqrt(WIDTH)).softmax(-1)
            coarse = scores.softmax(-1) @ means_v
            answer[0, tokens, head] = coarse * g[tokens] + weights @ v[seen]
    return answer


@pytest.mark.parametrize("grid", [(4, 4, 8), (5, 6, 9), (1, 3, 11), (2, 2, 3)])
def test_video_sparse_attention_is_its_definition_in_grids_that_no_cube_divides(grid: Grid) -> None:
    query, key, value, gate = drawn(math.prod(grid), 4)
    count = math.prod(-(-size // 4) for size in grid)

    for share in (0.2, 0.5):
        answer = video_sparse_attention(query, key, value, gate, grid, share)

        expected = by_tokens(query, key, value, gate, grid, kept_cubes(share, count))
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


def test_all_cubes_and_a_closed_gate_are_full_attention() -> None:
    query, key, value = drawn(5 * 6 * 9, 3)

    answer = video_sparse_attention(query, key, value, torch.zeros_like(query), (5, 6, 9), 1.0)

    torch.testing.assert_close(answer, full(query, key, value), rtol=1e-4, atol=1e-5)


def test_each_token_lies_in_one_cube_in_the_order_of_the_grid() -> None:
    order, sizes, places = cubes_of((5, 6, 9), torch.device("cpu"))

    assert sizes.sum() == 5 * 6 * 9
    assert order.flatten()[places].tolist() == list(range(5 * 6 * 9))
    for cube, size in zip(order, sizes, strict=True):
        assert cube[:size].tolist() == sorted(cube[:size].tolist())
        assert set(cube[size:].tolist()) <= {5 * 6 * 9}
    assert order[0].tolist()[:5] == [0, 1, 2, 3, 9]  # along the width first


@pytest.mark.parametrize(("cubes", "kept"), [(1, 1), (5, 1), (6, 2), (35, 7), (624, 125)])
def test_a_share_of_cubes_is_rounded_up_as_a_sparsity_of_four_fifths_is(
    cubes: int, kept: int
) -> None:
    assert kept_cubes(0.2, cubes) == kept == max(1, math.ceil((1 - 0.8) * cubes))


def linear_by_tokens(
    query: Tensor, key: Tensor, value: Tensor, project: nn.Linear, share: float
) -> Tensor:
    """Sparse-linear attention of one row, by slices of tokens."""
    tokens = query.shape[1]
    answer = torch.zeros_like(query)
    starts = range(0, tokens, 64)
    for head in range(HEADS):
        q, k, v = (x[0, :, head] for x in (query, key, value))
        means = torch.stack([(k - k.mean(0))[at : at + 64].mean(0) for at in starts])
        for first in range(0, tokens, 128):
            some = q[first : first + 128]
            best = (means @ some.mean(0)).argsort(descending=True)
            seen = [
                token
                for one in best[: max(1, int(share * len(means)))].tolist()
                for token in range(64 * one, min(64 * one + 64, tokens))
            ]
            weights = (some @ k[seen].T / math.sqrt(WIDTH)).softmax(-1)
            features = some.softmax(-1) @ k.softmax(-1).T  # (queries, tokens)
            linear = (features @ v) / (1e-5 + features.sum(-1, keepdim=True))
            answer[0, first : first + 128, head] = weights @ v[seen] + project(linear)
    return answer


@pytest.mark.parametrize("tokens", [30, 64, 200, 390])
def test_sparse_linear_attention_is_its_definition_at_lengths_that_no_block_divides(
    tokens: int,
) -> None:
    query, key, value = drawn(tokens, 3)
    project = nn.Linear(WIDTH, WIDTH)

    with torch.no_grad():
        for share in (0.1, 0.5):
            answer = sparse_linear_attention(query, key, value, project, share)

            expected = linear_by_tokens(query, key, value, project, share)
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


def test_all_blocks_and_a_projection_to_zero_are_full_attention() -> None:
    query, key, value = drawn(200, 3)

    answer = sparse_linear_attention(query, key, value, torch.zeros_like, 1.0)

    torch.testing.assert_close(answer, full(query, key, value), rtol=1e-4, atol=1e-5)


def test_rows_do_not_see_each_other_and_memory_bounds_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = (5, 6, 9)
    query, key, value, gate = drawn(math.prod(grid), 4, rows=3)
    together = video_sparse_attention(query, key, value, gate, grid, 0.5)

    monkeypatch.setattr("carpool.engine.model.sparse_attention.GATHER_BYTES", 1)
    for row in (slice(0, 1), slice(1, 2), slice(2, 3)):
        alone = video_sparse_attention(query[row], key[row], value[row], gate[row], grid, 0.5)
        torch.testing.assert_close(together[row], alone)
