"""Adapters in files of any name: offered under a stable id, found by what people call them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidValue
from carpool.request.adapter_files import files_in
from carpool.request.adapter_names import NAME, AdapterInfo, adapter_id, find_adapter, name_for_tag
from carpool.request.lora import check_lora
from support.engine_driver import driving
from support.lora_files import weights, write

CIVITAI = [
    "Pixel Art XL v1.1",
    "[SDXL] Ink (wash) {2}",
    "水墨画",
    "잉크 v2",
    "_private",
    "__",
    "-dash",
    "Café Noir",
    "x" * 150,
    "a+b=c & d, 100%",
    "plain",
    "characters/Robo Girl",
    "styles/plain",
    "styles/deep/er/注",
    "name@1.0",
    "e" + "\u0301tude",  # as macOS writes it
]


def put(folder: Path, name: str, suffix: str = ".safetensors") -> None:
    file = folder / f"{name}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")


def test_every_file_of_a_folder_has_an_id_of_its_own_that_stays(tmp_path: Path) -> None:
    ids = dict[str, str]()
    for name in CIVITAI:  # one after another: those that came before keep theirs
        put(tmp_path, name)
        now = {file.names[0]: file.id for file in files_in(tmp_path)}
        assert now | ids == now
        ids = now

    assert len(ids) == len(set(ids.values())) == len(CIVITAI)
    assert all(NAME.fullmatch(id_) for id_ in ids.values())
    assert ids["plain"] == "plain"
    assert not any(file.problem for file in files_in(tmp_path))


@given(st.text(min_size=1, max_size=100))
def test_an_id_is_plain_and_differs_where_names_do(name: str) -> None:
    id_ = adapter_id(name)

    assert NAME.fullmatch(id_)
    assert adapter_id(name) == id_
    assert (adapter_id(f"{name} ") == id_) is False
    assert id_ == name or not NAME.fullmatch(name)


def offered(folder: Path) -> list[AdapterInfo]:
    return [AdapterInfo(one.id, one.names, problem=one.problem) for one in files_in(folder)]


def test_an_adapter_is_found_by_its_id_its_file_and_ways_to_write_it(tmp_path: Path) -> None:
    for name in CIVITAI:
        put(tmp_path, name)
    adapters = offered(tmp_path)
    found: Callable[[str], str] = lambda name: find_adapter(name, adapters).names[0]  # type: ignore[union-attr]  # noqa: E731

    assert all(find_adapter(one.id, adapters) is one for one in adapters)
    assert all(find_adapter(one.names[0], adapters) is one for one in adapters)
    assert found("Pixel Art XL v1.1.safetensors") == "Pixel Art XL v1.1"
    assert found("pixel_art_xl_v1.1") == "Pixel Art XL v1.1"
    assert found("PIXEL-ART XL V1.1") == "Pixel Art XL v1.1"
    assert found("Robo Girl") == "characters/Robo Girl"
    assert found("robo_girl") == "characters/Robo Girl"
    assert found("plain") == "plain"  # an id goes before the file of a sub-folder
    assert found("\u00e9tude") == found("e\u0301tude") == "\u00e9tude"
    assert find_adapter("pixel", adapters) is None
    assert check_lora([{"id": "水墨画", "scale": 0.5}], [one.id for one in adapters], adapters) == (
        (adapter_id("水墨画"), 0.5),
    )


def test_a_name_of_several_is_refused_with_their_ids(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        put(tmp_path, f"{folder}/style one")
    adapters = offered(tmp_path)

    with pytest.raises(
        InvalidValue, match=r"'style one', which may be a_style_one-.*, b_style_one"
    ):
        find_adapter("style one", adapters)
    assert [name_for_tag(one, adapters) for one in adapters] == ["a/style one", "b/style one"]


def test_lists_show_the_names_of_files_before_those_that_trainers_gave(tmp_path: Path) -> None:
    names = {"ink": "last", "Pixel Art": "lora-000010", "sub/Robo": "last2", "same": "same"}
    for file, trainer_name in names.items():
        write(tmp_path / f"{file}.safetensors", weights("flux", 1), ss_output_name=trainer_name)

    with driving("flux", lora_dir=str(tmp_path)) as drive:
        card = drive.engine.loaded.card

    shown = {name_for_tag(one, card.adapters) for one in card.adapters}
    assert shown == {"ink", "Pixel Art", "Robo", "same"}
    for name in (*shown, *names.values()):
        assert check_lora([{"id": name}], card.lora, card.adapters)


def test_files_that_differ_in_the_suffix_alone_are_both_offered(tmp_path: Path) -> None:
    for suffix in (".SAFETENSORS", ".safetensors"):
        put(tmp_path, "style", suffix)
        put(tmp_path, "x" * 64, suffix)

    ids = [file.id for file in files_in(tmp_path)]

    assert len(set(ids)) == 4
    assert all(NAME.fullmatch(id_) for id_ in ids)


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin", ".PTH"])
def test_a_pickle_is_refused_to_the_request_that_names_it(suffix: str, tmp_path: Path) -> None:
    put(tmp_path, "old style", suffix)
    put(tmp_path, "style")
    put(tmp_path, "style", suffix)  # beside its conversion
    adapters = offered(tmp_path)

    with pytest.raises(InvalidValue, match=r"'old style', which cannot be used: .*a pickle"):
        check_lora([{"id": "old style"}], ["style"], adapters)
    assert check_lora([{"id": "style"}], ["style"], adapters)


def test_a_folder_of_one_adapter_is_named_as_the_folder(tmp_path: Path) -> None:
    put(tmp_path, "org/My Style/pytorch_lora_weights")
    put(tmp_path, "peft/adapter_model")
    put(tmp_path, "adapter_model")

    names = [file.names for file in files_in(tmp_path)]

    assert names == [("adapter_model",), ("org/My Style", "My Style"), ("peft",)]


def test_hidden_files_loops_and_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    for name in ("._style", ".cache/x", "sub/style"):
        put(tmp_path, name)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "none")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.safetensors")).write_text("x")
    (tmp_path / "notes.txt").write_text("x")

    names = [file.names for file in files_in(tmp_path)]

    assert names == [("dangling",), ("sub/style", "style"), ("??",)]


WORDINGS: list[Any] = [
    "", " ", "\ud800", "x" * 10_000, "a:b", "<x>", "../plain", "/etc/passwd", "@",
]  # fmt: skip


@pytest.mark.parametrize("name", WORDINGS, ids=repr)
def test_odd_names_are_refused_as_the_clients(name: str) -> None:
    with pytest.raises(InvalidValue, match="no adapter"):
        check_lora([{"id": name}], ("plain",), (AdapterInfo("plain", ("__",)),))
