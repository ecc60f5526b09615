"""Wan's transformer with sparse attention: FastWan's gated cubes, TurboWan's linear branch.

Both are diffusers' `WanTransformer3DModel` with a few more weights and another processor in its
self-attention. The weights reveal the class of a checkpoint: its configuration names neither. On
CUDA the kernels of `fastvideo-kernel` and `turbodiffusion` are used if installed.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from carpool.engine.model.sparse_attention import (
    CUBE,
    KEY_BLOCK,
    QUERY_BLOCK,
    Grid,
    cubes_of,
    in_cubes,
    kept_cubes,
    sparse_linear_attention,
    video_sparse_attention,
)
from carpool.errors import SettingRejected

# query, key and value, (rows, tokens, heads, width) each
Projections = tuple[Tensor, Tensor, Tensor]


class RotaryGrid(NamedTuple):
    """Rotary factors, and the grid of their tokens."""

    cos: Tensor  # (1, tokens, 1, width of a head)
    sin: Tensor
    grid: Grid


class _GridRotaryPosEmbed(WanRotaryPosEmbed):  # type: ignore[misc]
    """Returns the grid with the rotary factors: other sizes may run between two blocks."""

    def forward(self, hidden_states: Tensor) -> RotaryGrid:
        sizes = zip(hidden_states.shape[2:], self.patch_size, strict=True)
        frames, height, width = (size // patch for size, patch in sizes)
        cos, sin = super().forward(hidden_states)
        return RotaryGrid(cos, sin, (frames, height, width))


class SparseAttnProcessor:
    """Wan's self-attention, without the choice of attended blocks."""

    share: float  # share of blocks that each block attends to, 0-1

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: RotaryGrid | None = None,
    ) -> Tensor:
        assert rotary_emb is not None
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key, value = (
            x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(hidden_states))
        )
        parts = _rotated(query, rotary_emb), _rotated(key, rotary_emb), value
        answer = self.attend(attn, hidden_states, parts, rotary_emb.grid)
        answer = answer.flatten(2, 3).type_as(hidden_states)
        result: Tensor = attn.to_out[1](attn.to_out[0](answer))
        return result

    def attend(self, attn: Any, hidden_states: Tensor, parts: Projections, grid: Grid) -> Tensor:
        """The result of attention, (rows, tokens, heads, width)."""
        raise NotImplementedError


class VideoSparseAttnProcessor(SparseAttnProcessor):
    """Video sparse attention, with the gate of a block.

    Args:
        block: has the gate `to_gate_compress`, which quantization may replace.
    """

    share = 0.2
    """FastWan's sparsity of 0.8."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def attend(self, attn: Any, hidden_states: Tensor, parts: Projections, grid: Grid) -> Tensor:
        query, key, value = parts
        gate = self._block.to_gate_compress(hidden_states).unflatten(2, (attn.heads, -1))
        kernel = _kernel("fastvideo_kernel", "video_sparse_attn", query)
        if kernel is None:
            return video_sparse_attention(*parts, gate, grid, self.share)
        cubes = cubes_of(grid, query.device)
        query, key, value, gate = (
            in_cubes(x, cubes.order).flatten(2, 3).contiguous() for x in (query, key, value, gate)
        )
        sizes, count = cubes.sizes.int(), kept_cubes(self.share, len(cubes.sizes))
        answer: Tensor = kernel(
            query, key, value, sizes, sizes, count, block_size=CUBE, compress_attn_weight=gate
        )
        return answer[:, :, cubes.places].transpose(1, 2)


class SparseLinearAttnProcessor(SparseAttnProcessor):
    """Sparse-linear attention; its projection is the layer `proj_l` of the attention."""

    share = 0.1
    """TurboDiffusion's top-k."""

    def attend(self, attn: Any, hidden_states: Tensor, parts: Projections, grid: Grid) -> Tensor:
        query = parts[0]
        kernel = _kernel("turbodiffusion.SLA", "SparseLinearAttention", query)
        if kernel is None:
            return sparse_linear_attention(*parts, attn.proj_l, self.share)
        module = kernel(query.shape[-1], self.share, BLKQ=QUERY_BLOCK, BLKK=KEY_BLOCK)
        module.proj_l = attn.proj_l
        answer: Tensor = module(*parts)
        return answer


def _rotated(x: Tensor, rotary: RotaryGrid) -> Tensor:
    """Rotate each pair of neighbours, in the precision of the factors."""
    even, odd = torch.unflatten(x, -1, (-1, 2)).unbind(-1)
    cos, sin = rotary.cos[..., 0::2], rotary.sin[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


def _kernel(module: str, name: str, x: Tensor) -> Any:
    """A function or class of a kernel package; None if not on CUDA or not installed."""
    return _imported(module, name) if x.is_cuda else None


@cache
def _imported(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


class VideoSparseWanTransformer(WanTransformer3DModel):  # type: ignore[misc]
    """Wan with video sparse attention: one gate per block, named as in FastWan's checkpoints."""

    _cp_plan = None  # ranks hold parts of the sequence, not cubes

    @wraps(WanTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        _tell_grid(self)
        for block in self.blocks:
            width = block.attn1.inner_dim
            block.to_gate_compress = nn.Linear(width, width)
            block.attn1.set_processor(VideoSparseAttnProcessor(block))


class SparseLinearWanTransformer(WanTransformer3DModel):  # type: ignore[misc]
    """Wan with sparse-linear attention: one projection for each block's heads."""

    _cp_plan = None  # ranks hold parts of the sequence, not its means

    @wraps(WanTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        _tell_grid(self)
        for block in self.blocks:
            width = block.attn1.inner_dim // block.attn1.heads
            block.attn1.proj_l = nn.Linear(width, width)
            block.attn1.set_processor(SparseLinearAttnProcessor())


def _tell_grid(model: WanTransformer3DModel) -> None:
    config = model.config
    model.rope = _GridRotaryPosEmbed(
        config.attention_head_dim, config.patch_size, config.rope_max_seq_len
    )


_MARKS = {".to_gate_compress.weight": VideoSparseWanTransformer,
          ".proj_l.weight": SparseLinearWanTransformer}  # fmt: skip
"""Suffixes of weights that only one of the classes has."""


def class_with(cls: Any, names: Iterable[str]) -> Any:
    """The class for a checkpoint's weights: for Wan, by their names."""
    if cls is not WanTransformer3DModel:
        return cls
    kinds = (kind for name in names for mark, kind in _MARKS.items() if name.endswith(mark))
    return next(kinds, cls)


def set_share(modules: Mapping[str, nn.Module], share: float, undo: ExitStack) -> None:
    """Set the share of blocks that sparse attention attends to.

    Raises:
        SettingRejected: the model has no sparse attention.
    """
    parts = (part for module in modules.values() for part in module.modules())
    processors = [getattr(part, "processor", None) for part in parts]
    sparse = [processor for processor in processors if isinstance(processor, SparseAttnProcessor)]
    if not sparse:
        raise SettingRejected(
            f"sparse_attention={share}: the denoisers of this model attend to all tokens: leave it "
            "out"
        )
    for processor in sparse:
        undo.callback(setattr, processor, "share", processor.share)
        processor.share = share
