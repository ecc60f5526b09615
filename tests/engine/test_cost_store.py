"""What forwards take is known again at the next start, for the same model, device and versions."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.model.load import load
from carpool.schedule.views import CallKind
from support.engine_driver import fresh, served
from support.tiny import checkpoint

KIND = CallKind("transformer.forward", 100, "64x16")


def table(file: Path | None = None, family: str = "flux") -> StoredCosts:
    settings = EngineSettings(device="cpu", cost_table=str(file) if file else None)
    loaded = load(served(family), settings)
    return StoredCosts(loaded, settings)


def test_what_was_learned_is_there_at_the_next_start(tmp_path: Path) -> None:
    first = table(tmp_path / "costs.json")
    for rows in (1, 2):
        for _ in range(3):
            first.costs.learn(KIND, rows, 0.5 * rows)
    first.keep()

    again = table(tmp_path / "costs.json")

    assert dict(again.costs)[KIND].measured == pytest.approx({1: 0.5, 2: 1.0}, rel=0.1)
    assert again.costs.seconds(KIND, 2) == pytest.approx(1.0, rel=0.2)  # a prior, not a truth


def test_another_models_table_is_not_believed(tmp_path: Path) -> None:
    first = table(tmp_path / "costs.json")
    for _ in range(3):
        first.costs.learn(KIND, 1, 0.5)
    first.keep()

    assert not list(table(tmp_path / "costs.json", family="sdxl").costs)


def test_a_table_of_an_earlier_version_begins_anew_and_is_not_taken_for_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "costs.json"
    table(file).keep()
    earlier = json.loads(file.read_text())
    del earlier["identity"]["format"]
    file.write_text(json.dumps(earlier | {"costs": {"as it was": 3}}))

    later = table(file)

    assert not list(later.costs)
    assert not caplog.records
    later.costs.learn(KIND, 1, 0.5)
    later.keep()
    assert list(table(file).costs)
    assert [*tmp_path.iterdir()] == [file]


def half(pipe: Any) -> None:
    pipe.transformer.to(torch.bfloat16)


def compiled(pipe: Any) -> None:
    pipe.transformer.transformer_blocks[0].compile(backend="eager")


def offloaded(pipe: Any) -> None:
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="leaf_level")


def cast(pipe: Any) -> None:
    apply_layerwise_casting(pipe.transformer, torch.float8_e4m3fn, torch.float32)


def quantized(pipe: Any) -> None:
    block = pipe.transformer.transformer_blocks[0]

    class Int8Linear(nn.Linear):
        """As quantization libraries put in."""

    block.attn.to_q.__class__ = Int8Linear


def of_another_attention(pipe: Any) -> None:
    for part in pipe.transformer.modules():
        if (processor := vars(part).get("processor")) is not None:
            processor._attention_backend = "_native_math"


def of_another_config(pipe: Any) -> None:
    pipe.transformer.register_to_config(guidance_embeds=not pipe.transformer.config.guidance_embeds)


@pytest.mark.parametrize(
    "prepare", [half, compiled, offloaded, cast, quantized, of_another_attention, of_another_config]
)
def test_costs_of_a_model_that_was_prepared_otherwise_are_not_believed(
    tmp_path: Path, prepare: Callable[[Any], None]
) -> None:
    settings = EngineSettings(device="cpu", cost_table=str(tmp_path / "costs.json"))
    first = StoredCosts(load(fresh("flux"), settings), settings)
    for _ in range(3):
        first.costs.learn(KIND, 1, 0.5)
    first.keep()
    assert list(StoredCosts(load(fresh("flux"), settings), settings).costs)  # prepared alike
    pipe = fresh("flux")
    prepare(pipe)

    assert not list(StoredCosts(load(pipe, settings), settings).costs)


@pytest.mark.parametrize(
    "said",
    [
        {"quantize": "fp8"}, {"dtype": "float32,transformer=bfloat16"},
        {"attention_backend": "_native_math"}, {"vae_tiling": True},
        {"compile": True, "warmup": None}, {"stream": "transformer"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_the_preparation_begin_a_table_of_their_own(
    tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.model.load.warm_up", lambda *_: None)
    file: dict[str, Any] = {"device": "cpu", "cost_table": str(tmp_path / "costs.json")}
    plain, other = EngineSettings(**file), EngineSettings(**file, **said)
    with ExitStack() as undo:

        def table_of(settings: EngineSettings) -> StoredCosts:
            loaded = load(checkpoint("flux"), settings)
            undo.callback(loaded.undo)
            return StoredCosts(loaded, settings)

        first = table_of(plain)
        for _ in range(3):
            first.costs.learn(KIND, 1, 0.5)
        first.keep()

        assert list(table_of(plain).costs)
        assert not list(table_of(other).costs)


def test_a_table_of_other_versions_is_a_weaker_prior(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    first = table(path)
    for rows in (1, 2, 3, 4, 6, 8):  # what is uncertain is told between widths
        for _ in range(3):
            first.costs.learn(KIND, rows, 0.5 * rows)
    first.keep()
    sd = table(path).costs.curve(KIND).sd(1)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"identity": data["identity"] | {"torch": "1.0"}}))

    again = table(path).costs

    assert again.curve(KIND).sd(1) > 1.1 * sd
    assert again.seconds(KIND, 1) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": {}}', "\x00"])
def test_a_broken_table_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "costs.json").write_text(content)

    assert not list(table(tmp_path / "costs.json").costs)


def test_a_table_lies_in_the_cache_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the tests' own place
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    table().keep()

    [file] = (tmp_path / "carpool").iterdir()
    assert file.name.startswith("costs-")


def test_two_engines_of_one_process_may_keep_the_same_table_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other does while this one has written and not yet replaced the old one."""
    one, other = table(tmp_path / "costs.json"), table(tmp_path / "costs.json")
    replace = os.replace

    def late(*paths: Path) -> None:
        monkeypatch.setattr("os.replace", replace)
        thread = threading.Thread(target=other.keep)
        thread.start()
        thread.join()
        replace(*paths)

    monkeypatch.setattr("os.replace", late)
    one.keep()

    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_a_folder_that_cannot_be_written_costs_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    table(tmp_path / "file" / "costs.json").keep()

    assert "not stored" in caplog.text
