"""FastWan 2.1 in its published layout: Wan's folders, with a gate a block that no config names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import carpool.engine.model.sparse_wan as sparse_wan
from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.engine.model.sparse_attention import Grid, video_sparse_attention
from carpool.engine.model.sparse_wan import (
    SparseLinearWanTransformer,
    VideoSparseAttnProcessor,
    VideoSparseWanTransformer,
    class_with,
)
from carpool.errors import LoadFailed, SettingRejected
from support.engine_driver import driving, gap
from support.matrix.sparse import GRID, fast_wan, sparse
from support.tiny import ARGUMENTS, checkpoint

SIZE = {name: GRID[name] for name in ("height", "width")}


@pytest.fixture(scope="module")
def pipe() -> DiffusionPipeline:
    return fast_wan(DiffusionPipeline.from_pretrained(checkpoint("wan21_t2v")))


@pytest.fixture
def fastwan(pipe: DiffusionPipeline, tmp_path: Path) -> Path:
    folder = tmp_path / "fastwan"
    shutil.copytree(checkpoint("wan21_t2v"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = "WanDMDPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    save_file(dict(pipe.transformer.state_dict()), weights_in(folder))
    return folder


def weights_in(folder: Path) -> Path:
    return folder / "transformer" / "diffusion_pytorch_model.safetensors"


def alone(pipe: DiffusionPipeline, prompt: str, seed: int, **arguments: Any) -> Tensor:
    """Plain diffusers, with this transformer and this scheduler."""
    pipe.set_progress_bar_config(disable=True)
    generator = pipe.scheduler.generator = torch.Generator().manual_seed(seed)
    given = {**ARGUMENTS["wan21_t2v"], **GRID, **arguments, "prompt": prompt}
    with torch.no_grad():
        frames = pipe(**given, generator=generator).frames
    assert isinstance(frames, Tensor)
    return frames


def test_a_checkpoint_with_gates_is_served_and_gives_what_plain_diffusers_gives(
    fastwan: Path, pipe: DiffusionPipeline
) -> None:
    given = {n: v for n, v in ARGUMENTS["wan21_t2v"].items() if n != "num_inference_steps"} | SIZE

    with driving(fastwan, numerics="exact") as drive:
        heard = [drive.submit("a cat", seed=1, **given), drive.submit("a dog", seed=2, **given)]
        drive.finish()

    assert isinstance(drive.engine.loaded.pipe.transformer, VideoSparseWanTransformer)
    for recorder, prompt, seed in zip(heard, ("a cat", "a dog"), (1, 2), strict=True):
        expected = alone(pipe, prompt, seed, num_inference_steps=3)
        assert gap(recorder.outcome.fields["frames"], expected) == 0.0


def lost(weights: dict[str, Tensor]) -> None:
    del weights["blocks.1.to_gate_compress.bias"]


def unknown(weights: dict[str, Tensor]) -> None:
    weights["blocks.2.to_gate_compress.bias"] = torch.zeros(24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, "lacks blocks.1.to_gate_compress.bias"),
        (unknown, "has blocks.2.to_gate_compress.bias"),
    ],
)
def test_a_gate_that_is_missing_or_left_over_is_named(
    change: Callable[[dict[str, Tensor]], None], message: str, fastwan: Path
) -> None:
    weights = load_file(weights_in(fastwan))
    change(weights)
    save_file(weights, weights_in(fastwan))

    with pytest.raises(LoadFailed, match=message):
        load(fastwan, EngineSettings(device="cpu"))


def test_a_component_with_gates_comes_from_a_file_or_a_folder_as_well(fastwan: Path) -> None:
    base = checkpoint("wan21_t2v")

    for place in (weights_in(fastwan), fastwan / "transformer"):
        settings = EngineSettings(device="cpu", component=(f"transformer={place}",))
        transformer: Any = load(base, settings).pipe.transformer
        assert isinstance(transformer, VideoSparseWanTransformer)
        assert transformer.blocks[0].to_gate_compress.weight.abs().sum() > 0


def test_with_all_cubes_and_closed_gates_it_is_wan(pipe: DiffusionPipeline) -> None:
    wan = WanTransformer3DModel.from_pretrained(checkpoint("wan21_t2v"), subfolder="transformer")
    fast = sparse(wan, VideoSparseWanTransformer, 1.0)
    turbo = sparse(wan, SparseLinearWanTransformer, 1.0)
    for block in (*fast.blocks, *turbo.blocks):
        gate = getattr(block, "to_gate_compress", None) or block.attn1.proj_l
        gate.requires_grad_(False)
        gate.weight.zero_()
        gate.bias.zero_()
    random = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 16, 2, 12, 20, generator=random),
        "timestep": torch.tensor([500, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 32, generator=random),
    }

    with torch.no_grad():
        expected = wan(**inputs).sample
        for model in (fast, turbo):
            torch.testing.assert_close(model(**inputs).sample, expected, rtol=1e-4, atol=1e-4)


def test_names_of_weights_tell_the_class_of_wan_and_of_no_other_model() -> None:
    gate, projection = "blocks.0.to_gate_compress.weight", "blocks.0.attn1.proj_l.weight"

    assert class_with(WanTransformer3DModel, ["a", gate]) is VideoSparseWanTransformer
    assert class_with(WanTransformer3DModel, ["a", projection]) is SparseLinearWanTransformer
    assert class_with(WanTransformer3DModel, ["a"]) is WanTransformer3DModel
    assert class_with(DiffusionPipeline, [gate]) is DiffusionPipeline


def test_a_share_of_blocks_may_be_said_where_attention_is_sparse(fastwan: Path) -> None:
    loaded = load(fastwan, EngineSettings(device="cpu", sparse_attention=0.5))
    processors = [block.attn1.processor for block in loaded.pipe.transformer.blocks]

    assert [processor.share for processor in processors] == [0.5, 0.5]
    loaded.undo()
    assert [processor.share for processor in processors] == [0.2, 0.2]
    with pytest.raises(SettingRejected, match=r"sparse_attention=0.5: .* attend to all tokens"):
        load(checkpoint("wan21_t2v"), EngineSettings(device="cpu", sparse_attention=0.5))


def test_kernels_get_each_cube_with_its_own_tokens_first(
    pipe: DiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid: Grid = (2, 6, 10)

    def kernel(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, of_queries: Tensor, kept: int,
               *, block_size: Grid, compress_attn_weight: Tensor) -> Tensor:  # fmt: skip
        """As `fastvideo_kernel.video_sparse_attn`: (rows, heads, cubes * 64, width)."""
        assert block_size == (4, 4, 4)
        assert sizes.tolist() == of_queries.tolist() == [32, 32, 16, 16, 16, 8]
        q, k, v, gate = (torch.unflatten(x, 2, (-1, 64)) for x in (q, k, v, compress_attn_weight))
        means = [x.sum(3) / sizes[:, None] for x in (q, k, v)]
        scores = means[0] @ means[1].mT / q.shape[-1] ** 0.5
        coarse = (scores.softmax(-1) @ means[2])[:, :, :, None]
        seen = torch.zeros_like(scores).scatter(-1, scores.topk(kept).indices, 1.0).bool()
        is_token = torch.arange(64) < sizes[:, None]
        mask = (seen[..., None] & is_token).flatten(3).repeat_interleave(64, dim=2)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        fine = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        answer: Tensor = (coarse * gate).flatten(2, 3) + fine
        return answer

    monkeypatch.setattr(sparse_wan, "_kernel", lambda *_: kernel)
    block = pipe.transformer.blocks[0]
    random = torch.Generator().manual_seed(0)
    hidden, *heads = (torch.randn(2, 120, 24, generator=random) for _ in range(4))
    query, key, value = (torch.unflatten(x, 2, (2, 12)) for x in heads)

    with torch.no_grad():
        processor = VideoSparseAttnProcessor(block)
        answer = processor.attend(block.attn1, hidden, (query, key, value), grid)

        gate = torch.unflatten(block.to_gate_compress(hidden), 2, (2, 12))
        expected = video_sparse_attention(query, key, value, gate, grid, 0.2)
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
