"""What may be registered as an adapter, and what a request may say of adapters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from carpool.engine.adapters.reader import AdapterReader
from carpool.errors import InvalidValue, LoraRejected, SettingRejected, UnsupportedParameter
from carpool.request.lora import check_header, check_lora, check_name, parse_lora
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import driving, fresh, served
from support.lora_files import adapter, weights, write
from support.tiny import ARGUMENTS

FIRST = "transformer.transformer_blocks.0.attn.to_q"
State = dict[str, torch.Tensor]


def read(path: Path) -> Any:
    return AdapterReader(served("flux"), torch.device("cpu")).read(path).parts


def test_a_file_and_a_folder_with_one_file_are_read(tmp_path: Path) -> None:
    file = adapter(tmp_path / "folder", "flux", 1)
    (tmp_path / "folder" / "README.md").write_text("an adapter")
    state = weights("flux", 1)

    parts = read(file)

    assert len(parts) == len(state) / 2
    part = parts["transformer", "transformer_blocks.0.attn.to_q"]
    assert torch.equal(part.down.weight, state[f"{FIRST}.lora_A.weight"])
    assert torch.equal(part.up.weight, state[f"{FIRST}.lora_B.weight"])
    assert part.scaling == 1
    assert read(tmp_path / "folder").keys() == parts.keys()


def test_the_modules_that_run_are_not_touched(tmp_path: Path) -> None:
    model = served("flux").transformer
    before = {name: id(module) for name, module in model.named_modules()}

    read(adapter(tmp_path, "flux", 1))

    assert {name: id(module) for name, module in model.named_modules()} == before
    assert not hasattr(model, "peft_config")
    assert all(weight.device.type == "cpu" for weight in model.parameters())


BAD: list[tuple[Callable[[State], State], str]] = [
    (
        lambda state: state | {f"{FIRST}.lora_magnitude_vector": torch.ones(4)},
        "a DoRA .*: .*\n?.*size mis",
    ),
    (lambda state: {f"{FIRST}.lokr_w1": torch.ones(4, 4)}, "is a LoKr"),
    (lambda state: {"unet.conv_in.lora_A.weight": torch.ones(4, 4)}, "cannot load|not in this"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_a_file_that_does_not_suit_is_refused(
    spoil: Callable[[State], State], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "bad.safetensors", spoil(weights("flux", 1)))

    with pytest.raises(LoraRejected, match=message):
        read(file)


def test_weights_that_the_number_type_of_the_model_cannot_hold_are_refused(tmp_path: Path) -> None:
    state = {name: weight * 1e6 for name, weight in weights("flux", 1).items()}
    pipe = fresh("flux").to(torch.float16)

    with pytest.raises(LoraRejected, match=r"do not fit into torch.float16"):
        AdapterReader(pipe, torch.device("cpu")).read(write(tmp_path / "a.safetensors", state))


def test_files_that_are_no_safetensors_are_not_opened(tmp_path: Path) -> None:
    for name in ("weights.bin", "weights.pt", "weights.ckpt"):
        torch.save({}, tmp_path / name)
        with pytest.raises(LoraRejected, match="a pickle can run code"):
            read(tmp_path / name)
    with pytest.raises(LoraRejected, match=r"must hold one .safetensors file, it has: none"):
        read(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(LoraRejected, match=r"it has: a.safetensors, b.safetensors"):
        read(tmp_path)
    with pytest.raises(LoraRejected, match="there is no file"):
        read(tmp_path / "none.safetensors")
    (file := tmp_path / "a.safetensors").write_bytes(b"not a header at all")
    with pytest.raises(LoraRejected, match="is not a readable"):
        read(file)
    file.write_bytes(b" <" + bytes(6) + b"{}".ljust(0x3C20))  # a header's length, not a page
    check_header(file)


def test_a_pipeline_without_a_loader_says_so(tmp_path: Path) -> None:
    class Plain:
        pass

    with pytest.raises(LoraRejected, match="Plain takes no LoRA"):
        AdapterReader(Plain(), torch.device("cpu")).read(adapter(tmp_path, "flux", 1))


def test_a_name_is_given_once(tmp_path: Path) -> None:
    file = adapter(tmp_path, "flux", 1)

    with driving("flux") as drive:
        drive.engine.add_lora("one", file)
        with pytest.raises(LoraRejected, match="an adapter 'one' already"):
            drive.engine.add_lora("one", file)
        with pytest.raises(LoraRejected, match=r"adapter 'two': .*no file"):
            drive.engine.add_lora("two", tmp_path / "two.safetensors")

        assert drive.engine.loaded.card.lora == ("one",)
        with pytest.raises(InvalidValue, match=r"no adapter 'oen'; did you mean 'one'\?"):
            drive.submit("a cat", lora=[{"id": "oen"}], **ARGUMENTS["flux"])


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a b", "a" * 65, "ä", None])
def test_names_are_plain(name: Any) -> None:
    with pytest.raises(LoraRejected, match="must be 1 to 64 letters"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "9", "My.style_2-x", "a" * 64])
def test_plain_names_pass(name: str) -> None:
    assert check_name(name) == name


def test_the_setting_says_names_and_paths() -> None:
    assert parse_lora(["a=x/a.safetensors", "b=./b=c"]) == {"a": "x/a.safetensors", "b": "./b=c"}
    for entry in ("a", "a="):
        with pytest.raises(SettingRejected, match="write NAME=PATH"):
            parse_lora([entry])
    with pytest.raises(LoraRejected, match="already"):
        parse_lora(["a=x", "a=y"])
    with pytest.raises(LoraRejected, match=r"adapter name '../a'"):
        parse_lora(["../a=x"])


KNOWN = ("outlined", "striped")
WRONG: list[tuple[Any, str]] = [
    ("outlined", "lora has a str: must be a list of entries"),
    ({"id": "outlined"}, "lora has a dict: must be a list"),
    (["outlined"], r"an entry 'outlined': must be \{\"id\": NAME"),
    ([{"name": "outlined"}], "an entry"),
    ([{"id": "outlined", "path": "x"}], "an entry"),
    ([{"id": "outline"}], r"no adapter 'outline'; did you mean 'outlined'\? \(there are: outli"),
    ([{"id": ["outlined"]}], "no adapter"),
    ([{"id": "outlined"}, {"id": "outlined", "scale": 2}], "'outlined' twice"),
    ([{"id": "outlined", "scale": 11}], "scale 11 of 'outlined': must be a number from -10 to 10"),
    ([{"id": "outlined", "scale": float("nan")}], "scale nan"),
    ([{"id": "outlined", "scale": True}], "scale True"),
    ([{"id": "outlined", "scale": "1"}], "scale '1'"),
    ([{"id": "outlined", "scale": None}], "scale None"),
    ([{"id": "x" * 500}], r"no adapter 'x{50,56}\.\.\."),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_a_request_says_wrongly_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        check_lora(given, KNOWN)

    assert caught.value.param == "lora"


def test_without_adapters_the_error_says_how_to_get_some() -> None:
    with pytest.raises(InvalidValue, match="none is registered; the server's --lora NAME=PATH"):
        check_lora([{"id": "outlined"}], ())


def test_scales_are_one_unless_said_and_zero_is_none() -> None:
    given = [{"id": "striped"}, {"id": "outlined", "scale": 0}]

    assert check_lora(given, KNOWN) == (("striped", 1.0),)
    assert check_lora(given[:1], KNOWN) == (("striped", 1.0),)
    assert check_lora(None, KNOWN) == check_lora([], KNOWN) == ()


def test_the_scale_of_diffusers_is_refused_in_favour_of_ours() -> None:
    with driving("flux") as drive:
        plain = drive.engine.loaded.card
    card, scale = (
        replace(plain, lora=KNOWN),
        Request("a cat", joint_attention_kwargs={"scale": 0.5}),
    )

    with pytest.raises(UnsupportedParameter, match="use lora, a list of"):
        check(card, scale)
    with pytest.raises(UnsupportedParameter, match="use lora, a list of"):
        check(plain, scale, from_json=True)
    assert check(card, Request("a cat", joint_attention_kwargs={"other": 1})).lora == ()
    # the pipeline's own adapters, which the user has loaded, are turned as in diffusers
    assert check(plain, scale).arguments["joint_attention_kwargs"] == {"scale": 0.5}
