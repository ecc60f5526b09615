"""Sparse attention over video tokens in plain torch: gated cubes, and blocks with a linear branch.

For each block of queries both select the relevant blocks of keys, by the products of the blocks'
means, and attend to those only. Video sparse attention adds attention over the means themselves,
times a learned gate; sparse-linear attention adds projected linear attention over all tokens.

Heads are the third axis, as in diffusers: (rows, tokens, heads, width).

Sources: Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention" (2025), with
the cubes of `fastvideo-kernel`; Zhang et al., "SLA: Beyond Sparsity in Diffusion Transformers via
Fine-Tunable Sparse-Linear Attention" (2025), with the blocks of `turbodiffusion`.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int, int]  # tokens along time, height and width

CUBE: Grid = (4, 4, 4)
CUBE_TOKENS = math.prod(CUBE)
QUERY_BLOCK, KEY_BLOCK = 128, 64  # tokens, in sparse-linear attention
GATHER_BYTES = 2**28
"""Max bytes of gathered keys and values of a row at a time: half of it needs twice as many kernels,
twice of it needs twice the memory."""


class Cubes(NamedTuple):
    """The cubes of a grid; those at its ends may be smaller."""

    order: Tensor  # (cubes, 64), token numbers; short ones are filled with the number of all tokens
    sizes: Tensor  # (cubes,), tokens
    places: Tensor  # (tokens,), index of each token in the flattened `order`


@lru_cache(32)
def cubes_of(grid: Grid, device: torch.device) -> Cubes:
    """Cut a grid into cubes of 4 tokens a side, in grid order."""
    count = math.prod(grid)
    tokens = torch.arange(count).reshape(grid)
    margins = [-size % side for size, side in zip(grid, CUBE, strict=True)]
    padded = F.pad(tokens, [0, margins[2], 0, margins[1], 0, margins[0]], value=count)
    frames, height, width = (size // side for size, side in zip(padded.shape, CUBE, strict=True))
    split = padded.reshape(frames, CUBE[0], height, CUBE[1], width, CUBE[2])
    order = split.permute(0, 2, 4, 1, 3, 5).reshape(-1, CUBE_TOKENS).sort(dim=1).values
    places = order.flatten().argsort(stable=True)[:count]
    sizes = (order < count).sum(dim=1)
    return Cubes(*(part.to(device) for part in (order, sizes, places)))


def kept_cubes(share: float, cubes: int) -> int:
    """The number of cubes that each cube attends to; rounded up."""
    return max(1, min(math.ceil(round(share * cubes, 6)), cubes))


def video_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, grid: Grid, share: float
) -> Tensor:
    """Attend to the means of all cubes, times the gate, and to the tokens of the best cubes.

    Args:
        query: (rows, tokens, heads, width), in the order of the grid; `key` and `value` alike.
        gate: shaped like `query`; multiplies the coarse answer elementwise.
        share: share of cubes that each cube attends to, 0-1.
    """
    cubes = cubes_of(grid, query.device)
    query, key, value, gate = (in_cubes(x, cubes.order) for x in (query, key, value, gate))
    means = [(x.float().sum(dim=3) / cubes.sizes[:, None]).to(x.dtype) for x in (query, key, value)]
    scores = means[0] @ means[1].transpose(-1, -2) / query.shape[-1] ** 0.5
    coarse = scores.softmax(dim=-1) @ means[2]
    places = scores.topk(kept_cubes(share, len(cubes.sizes)), dim=-1).indices
    is_token = torch.arange(CUBE_TOKENS, device=query.device) < cubes.sizes[:, None]
    fine = block_sparse_attention(query, key, value, places, is_token)
    answer: Tensor = (coarse[:, :, :, None] * gate + fine).flatten(2, 3)
    return answer[:, :, cubes.places].transpose(1, 2)


def in_cubes(x: Tensor, order: Tensor) -> Tensor:
    """Tokens (rows, tokens, heads, width) as (rows, heads, cubes, 64, width), padded with zeros."""
    padded = F.pad(x, [0, 0, 0, 0, 0, 1])
    return torch.unflatten(padded[:, order.flatten()].transpose(1, 2), 2, order.shape)


def sparse_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, project: Callable[[Tensor], Tensor], share: float
) -> Tensor:
    """Attend to the tokens of the best blocks of keys, and linearly to all.

    Args:
        query: (rows, tokens, heads, width); `key` and `value` have the same shape.
        project: the learned projection of the linear branch, width to width.
        share: share of key blocks that each query block attends to, 0-1; rounded down.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    linear = project(_linear_attention(query.softmax(dim=-1), key.softmax(dim=-1), value))
    tokens = query.shape[2]
    centred = _in_blocks(key - key.mean(dim=2, keepdim=True), KEY_BLOCK)
    scores = _means(_in_blocks(query, QUERY_BLOCK), tokens) @ _means(centred, tokens).mT
    blocks = scores.shape[-1]
    places_of_tokens = scores.topk(max(1, min(int(share * blocks), blocks)), dim=-1).indices
    places = torch.arange(blocks * KEY_BLOCK, device=query.device)
    sparse = block_sparse_attention(
        _in_blocks(query, QUERY_BLOCK),
        _in_blocks(key, KEY_BLOCK),
        _in_blocks(value, KEY_BLOCK),
        places_of_tokens,
        (places < tokens).reshape(blocks, KEY_BLOCK),
    )
    return (sparse.flatten(2, 3)[:, :, :tokens] + linear).transpose(1, 2)


def _linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention: weights are products of features, (rows, heads, tokens, width)."""
    total = (query * key.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)
    return (query @ (key.mT @ value)) / (1e-5 + total)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Tokens (rows, heads, tokens, width) as (rows, heads, blocks, block, width), zero-padded."""
    return torch.unflatten(F.pad(x, [0, 0, 0, -x.shape[2] % block]), 2, (-1, block))


def _means(blocks: Tensor, tokens: int) -> Tensor:
    """The mean of each block's tokens, without the padding."""
    count, block = blocks.shape[2:4]
    sizes = (tokens - torch.arange(count, device=blocks.device) * block).clamp(max=block)
    return (blocks.float().sum(dim=3) / sizes[:, None]).to(blocks.dtype)


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, is_token: Tensor
) -> Tensor:
    """Let each block of queries attend to its selected blocks of keys.

    Args:
        query: (rows, heads, blocks, block, width).
        key: (rows, heads, key blocks, key block, width); `value` has the same shape.
        places: (rows, heads, blocks, kept), numbers of key blocks.
        is_token: (key blocks, key block); false for padding.
    """
    rows, heads, blocks, count = places.shape
    taken_bytes = 2 * heads * count * key.shape[3] * key.shape[4] * key.element_size()
    step = max(1, GATHER_BYTES // taken_bytes)
    row = torch.arange(rows, device=key.device)[:, None, None, None]
    head = torch.arange(heads, device=key.device)[:, None, None]
    parts = []
    for first in range(0, blocks, step):
        places_of_chunk = places[:, :, first : first + step]
        answer = F.scaled_dot_product_attention(
            query[:, :, first : first + step].flatten(1, 2),
            key[row, head, places_of_chunk].flatten(3, 4).flatten(1, 2),
            value[row, head, places_of_chunk].flatten(3, 4).flatten(1, 2),
            attn_mask=is_token[places_of_chunk].flatten(3, 4).flatten(1, 2)[:, :, None],
        )
        parts.append(torch.unflatten(answer, 1, (heads, -1)))
    return torch.cat(parts, dim=2)
