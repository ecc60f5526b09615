"""Weights that lie in their checkpoint as they are used are streamed from it, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from carpool.config import EngineSettings
from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.bus import Bus
from carpool.engine.weights.groups import plain_weights
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.engine.weights.placement import place
from carpool.engine.weights.streaming import Streamer
from support.engine_driver import driving, fresh
from support.lora_files import adapter
from support.prepared import gguf_of
from support.streamed import CPU, Tower, streamed
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="maps as Linux does")
INPUTS = torch.ones(1, 64)


def stored(folder: Path) -> tuple[Tower, Path]:
    """A model whose weights are mapped from a file."""
    model, file = Tower(), folder / "model.safetensors"
    save_file({name: weight.clone() for name, weight in model.state_dict().items()}, file)
    model.load_state_dict(load_file(file), assign=True)
    return model.requires_grad_(False), file


def written_bytes(streamer: Streamer) -> int:
    store = streamer.bus.store
    assert isinstance(store, DiskStore)
    return store._end


def streamed_from_file(model: Tower, folder: Path) -> Streamer:
    return streamed(model, folder, Bus(DiskStore(folder, 1, MappedFiles()), CPU))


def test_weights_of_a_mapped_file_are_read_from_it_and_not_written_again(tmp_path: Path) -> None:
    model, _ = stored(tmp_path)
    expected = model(INPUTS)

    streamer = streamed_from_file(model, tmp_path)

    assert written_bytes(streamer) == 0
    assert torch.equal(model(INPUTS), expected)
    streamer.remove()
    assert torch.equal(model(INPUTS), expected)


def test_weights_that_were_changed_in_memory_are_written(tmp_path: Path) -> None:
    model, _ = stored(tmp_path)
    next(iter(plain_weights(model.blocks[1]))).add_(1)
    expected = model(INPUTS)

    streamer = streamed_from_file(model, tmp_path)

    assert written_bytes(streamer) > 0
    assert torch.equal(model(INPUTS), expected)
    streamer.remove()


@pytest.mark.parametrize("how", ["deleted", "replaced by another"])
def test_weights_whose_file_is_gone_are_written(how: str, tmp_path: Path) -> None:
    model, file = stored(tmp_path)
    expected = model(INPUTS)
    file.unlink()
    if how != "deleted":
        other = {name: weight + 1 for name, weight in Tower().state_dict().items()}
        save_file(other, file)

    streamer = streamed_from_file(model, tmp_path)

    assert torch.equal(model(INPUTS), expected)
    streamer.remove()


def test_a_file_that_is_written_while_it_is_streamed_from_is_noticed(tmp_path: Path) -> None:
    model, file = stored(tmp_path)
    streamer = streamed_from_file(model, tmp_path)
    model(INPUTS)

    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"x")

    def run() -> None:
        for _ in range(3):  # some blocks were on their way
            model(INPUTS)

    with pytest.raises(OSError, match="was written over while its weights are used"):
        run()
    streamer.bus.close()


def test_weights_of_another_type_than_their_file_has_are_no_part_of_it(tmp_path: Path) -> None:
    model, _ = stored(tmp_path)
    converted = next(iter(plain_weights(model))).to(torch.float64)

    assert MappedFiles().place_of(converted) is None
    assert MappedFiles().place_of(next(iter(plain_weights(model)))) is not None


def test_reading_an_adapter_leaves_the_streaming_of_other_components_as_it_was(
    tmp_path: Path,
) -> None:
    file = adapter(tmp_path, "flux", seed=1)
    settings: dict[str, Any] = {"stream": "text_encoder_2,transformer", "stream_dir": str(tmp_path)}
    with driving(fresh("flux"), lora=(f"style={file}",), **settings) as drive:
        heard = drive.submit("a cat", **{**ARGUMENTS["flux"], "num_inference_steps": 2}, seed=1)
        drive.finish()
        streamer = drive.engine.loaded.streamer

    assert heard.error is None
    assert streamer is not None
    assert streamer.pins == 0


@pytest.mark.parametrize("options", [{}, {"gguf": 1}, {"quantize": "int8"}, {"dtype": "bfloat16"}])
def test_weights_are_streamed_from_the_files_of_their_reading(options: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stream": "transformer", "dtype": "float32", **options}
    if settings.pop("gguf", None):
        [file] = (checkpoint("flux") / "transformer").glob("*.safetensors")
        settings["component"] = (f"transformer={gguf_of(load_file(file), tmp_path / 'flux.gguf')}",)
    with driving(checkpoint("flux"), **settings) as drive:
        streamer = drive.engine.loaded.streamer
        assert streamer is not None
        assert written_bytes(streamer) == 0


def test_read_ahead_is_off_for_weights_that_are_only_sampled_at_the_start(tmp_path: Path) -> None:
    model, file = Tower(width=256), tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file), assign=True)

    streamer = place({"transformer": model}, CPU, EngineSettings(stream="transformer"), None)

    maps = Path("/proc/self/smaps").read_text()
    flags = re.findall(rf"{file}\n.*?VmFlags:(.*?)\n", maps, re.DOTALL)
    assert [" rr " in f"{entry} " for entry in flags].count(True) == len(model.blocks)
    assert streamer is not None
    streamer.remove()
