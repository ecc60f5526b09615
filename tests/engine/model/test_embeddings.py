"""Words of embedding files: the picture is that of plain diffusers with the same files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import carpool
from carpool.errors import LoadFailed, SettingRejected
from support.engine_driver import fresh
from support.tiny import ARGUMENTS, checkpoint

WIDTH = 32
ZORP = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
GLIM = torch.cos(torch.arange(WIDTH, dtype=torch.float32))
PROMPTS = ["a zorp on a hill", "glim", "a red circle", "two zorp beside a glim", "<dream>"]


def drawn(family: str, folder: Path) -> list[Any]:
    with carpool.load(str(checkpoint(family)), embeddings=folder, device="cpu") as engine:
        arguments = {**ARGUMENTS[family], "num_inference_steps": 2}
        arguments.pop("prompt", None)
        outputs = engine.generate(PROMPTS, seed=3, **arguments)
    return [np.asarray(output.images[0]) for output in outputs]


def by_diffusers(pipe: Any, family: str, prompt: str) -> Any:
    arguments = {**ARGUMENTS[family], "num_inference_steps": 2, "prompt": prompt}
    return np.asarray(pipe(generator=torch.Generator().manual_seed(3), **arguments).images[0])


def test_a_word_of_a_file_is_drawn_as_diffusers_draws_it_and_other_prompts_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"emb_params": ZORP}, tmp_path / "zorp.safetensors")
    (tmp_path / "more").mkdir()
    torch.save({"string_to_param": {"*": GLIM}}, tmp_path / "more" / "glim.PT")
    torch.save({"<dream>": GLIM}, tmp_path / "learned_embeds.bin")
    save_file({"emb_params": ZORP * torch.nan}, tmp_path / "nan.safetensors")
    save_file({"emb_params": torch.ones(3)}, tmp_path / "narrow.safetensors")
    (tmp_path / "broken.pt").write_bytes(b"not a file of torch's")
    save_file({"emb_params": GLIM}, tmp_path / "red.safetensors")

    pictures = drawn("sd15", tmp_path)

    assert sorted(caplog.messages) == [
        "embedding broken.pt is left out: it is no file of plain tensors, and others can "
        "run code: take a .safetensors",
        "embedding nan.safetensors is left out: emb_params has values that are no finite numbers",
        "embedding narrow.safetensors is left out: its vectors are 3 wide, and the text "
        "encoder's 32: it is of another model",
        "embedding red.safetensors is left out: 'red' is a word already: rename the file",
    ]

    pipe, untouched = fresh("sd15"), fresh("sd15")
    pipe.load_textual_inversion(ZORP, token="zorp")
    pipe.load_textual_inversion(GLIM[None], token="glim")
    pipe.load_textual_inversion(GLIM[None], token="<dream>")
    for prompt, picture in zip(PROMPTS, pictures, strict=True):
        assert np.allclose(picture, by_diffusers(pipe, "sd15", prompt), atol=1e-5), prompt
        is_plain = np.allclose(picture, by_diffusers(untouched, "sd15", prompt), atol=1e-5)
        assert is_plain == (prompt == "a red circle")


def test_a_file_of_sdxl_has_vectors_for_both_text_encoders(tmp_path: Path) -> None:
    save_file({"clip_l": ZORP, "clip_g": ZORP.flip(0).contiguous()}, tmp_path / "zorp.safetensors")

    picture = drawn("sdxl", tmp_path)[0]

    pipe = fresh("sdxl")
    pipe.load_textual_inversion(ZORP, token="zorp")
    pipe.load_textual_inversion(
        ZORP.flip(0), token="zorp", tokenizer=pipe.tokenizer_2, text_encoder=pipe.text_encoder_2
    )
    assert np.allclose(picture, by_diffusers(pipe, "sdxl", PROMPTS[0]), atol=1e-5)
    pipe = fresh("sdxl")  # both encoders count
    pipe.load_textual_inversion(ZORP, token="zorp")
    assert not np.allclose(picture, by_diffusers(pipe, "sdxl", PROMPTS[0]), atol=1e-5)


def test_a_pipeline_without_such_words_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingRejected, match="there is no such folder"):
        carpool.load("shapes", embeddings=tmp_path / "none")
    with pytest.raises(LoadFailed, match="SanaPipeline reads no embeddings"):
        carpool.load(str(checkpoint("sana")), embeddings=tmp_path)
