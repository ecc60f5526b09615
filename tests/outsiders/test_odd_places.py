"""Components in odd places and files: each is the one that is served, or is refused by name."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageControlNetPipeline
from safetensors.torch import save_file
from torch import Tensor

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import CarpoolError
from support.engine_driver import driving, plain
from support.more_pipelines import controlled_zimage
from support.prepared import own_weights
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def denoiser() -> dict[str, Tensor]:
    own = plain("flux").transformer
    return {name: weight * 1.5 for name, weight in own_weights(own).items()}


def served(*component: str, model: Path | None = None, **settings: Any) -> Any:
    settings = {"device": "cpu", "component": component, **settings}
    return load(model or checkpoint("flux"), EngineSettings(**settings)).pipe


def refused(*component: str, **settings: Any) -> str:
    with pytest.raises(CarpoolError) as failed:
        served(*component, **settings)
    message = str(failed.value)
    assert "\n" not in message
    return message


def test_a_model_of_one_file_and_the_same_component_are_one_too_many(
    denoiser: dict[str, Tensor], tmp_path: Path
) -> None:
    file, base = tmp_path / "denoiser.safetensors", str(checkpoint("flux"))
    save_file(denoiser, file)

    message = refused(f"transformer={base}", model=file, model_config=base)

    assert f"component=transformer={base}: {file} is the model's transformer already" in message


def test_an_index_of_shards_is_refused_with_what_to_name(tmp_path: Path) -> None:
    own = plain("flux").transformer
    own.save_pretrained(tmp_path, max_shard_size="100KB")
    [index] = tmp_path.glob("*.index.json")

    assert "index of several files: name one of them, or their folder" in refused(
        f"transformer={index}"
    )
    assert served(f"transformer={tmp_path}")
    (blob := tmp_path / "blob").write_bytes(b"weights")
    assert "its name must end in .safetensors or" in refused(f"transformer={blob}")


def test_links_are_followed(denoiser: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(denoiser, tmp_path / "blob")
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "b.sft").symlink_to("a.safetensors")
    (tmp_path / "gone.safetensors").symlink_to("nothing")
    (tmp_path / "round.safetensors").symlink_to("round.safetensors")

    pipe = served(f"transformer={tmp_path}/b.sft")

    assert torch.equal(pipe.transformer.x_embedder.weight, denoiser["x_embedder.weight"])
    for name in ("gone", "round"):
        assert "no such file" in refused(f"transformer={tmp_path}/{name}.safetensors")


def test_no_picture_is_drawn_of_a_model_whose_file_was_written_over(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("flux"), tmp_path / "model"))
    [file] = (folder / "transformer").glob("*.safetensors")
    with driving(folder) as drive:
        os.utime(file)  # the same bytes
        before = drive.submit(**ARGUMENTS["flux"])
        drive.finish()
        with file.open("r+b") as opened:  # weights are used from its pages
            opened.seek(file.stat().st_size // 2)
            opened.write(b"x" * 1000)
        after = drive.submit("a cat", **ARGUMENTS["flux"])
        drive.finish()

    assert before.error is None
    assert f"transformer/{file.name} was written over" in str(after.error)


def test_names_that_a_class_says_to_ignore_may_stay(tmp_path: Path) -> None:
    own = own_weights(plain("wan21_i2v").transformer)
    more = {"blocks.0.attn2.norm_added_q.weight": torch.zeros(4)}
    save_file({**own, **more}, tmp_path / "wan.safetensors")

    assert served(f"transformer={tmp_path}/wan.safetensors", model=checkpoint("wan21_i2v"))


def test_a_control_net_that_shares_modules_of_its_denoiser_is_read(tmp_path: Path) -> None:
    own = ZImageControlNetPipeline(**controlled_zimage(4)())
    own.save_pretrained(tmp_path / "model")
    save_file(own_weights(own.controlnet), tmp_path / "net.safetensors")

    pipe = served(model=tmp_path / "model")
    other = served(f"controlnet={tmp_path}/net.safetensors", model=tmp_path / "model")

    for net in (pipe.controlnet, other.controlnet):
        held = net.state_dict()
        assert all(torch.equal(held[k], w) for k, w in own.controlnet.state_dict().items())
