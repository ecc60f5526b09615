"""What is read again while requests run: adapters' folder and batching rules."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from carpool.config import EngineSettings
from carpool.engine.adapters.registry import AdapterRegistry
from carpool.errors import InvalidValue, LoraRejected, SettingRejected
from carpool.request.adapter_names import AdapterInfo
from carpool.schedule.cost import Costs
from carpool.schedule.policy import Policy, build, reload
from carpool.schedule.views import QueuedRequest
from carpool.settings.peers.sglang_rules import Server
from carpool.telemetry.sglang_metrics import Dispatches
from support.engine_driver import driving
from support.lora_files import adapter

FLUX = {"num_inference_steps": 2, "width": 16, "height": 16, "max_sequence_length": 16}
SERVER = Server("tiny", None, False)


class Shelf:
    """A folder of adapters, which are only their names here."""

    def __init__(self, path: Path) -> None:
        self.path, self.added, self.broken = path, list[str](), set[str]()
        self.notes, self.offered = dict[str, str](), list[str]()
        self.folder = AdapterRegistry(self, str(path), self.offer)  # type: ignore[arg-type]

    @property
    def infos(self) -> list[AdapterInfo]:
        return [AdapterInfo(name) for name in self.added]

    def offer(self, ids: Sequence[str], infos: Sequence[AdapterInfo]) -> None:
        self.offered = list(ids)

    def add(self, name: str, path: Path, names: Sequence[str]) -> None:
        if name in self.broken:
            raise LoraRejected(f"adapter {name!r}: no")
        self.added.append(name)

    def put(self, name: str, content: str = "x") -> None:
        (self.path / f"{name}.safetensors").write_text(content)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_new_files_become_adapters_once(shelf: Shelf) -> None:
    shelf.put("one")
    (shelf.path / "notes.txt").write_text("x")
    assert shelf.folder.reload() == []
    shelf.put("two")
    assert shelf.folder.reload() == []

    assert shelf.added == ["one", "two"]


def test_what_is_gone_is_hidden_until_it_is_back(shelf: Shelf) -> None:
    shelf.put("one")
    shelf.folder.reload()
    away = shelf.path / "one.away"

    (shelf.path / "one.safetensors").rename(away)
    assert shelf.folder.reload() == []
    assert shelf.offered == []
    away.rename(shelf.path / "one.safetensors")
    assert shelf.folder.reload() == []

    assert shelf.offered == shelf.added == ["one"]


def test_a_name_never_changes_its_weights(shelf: Shelf) -> None:
    shelf.put("one")
    shelf.folder.reload()

    shelf.put("one", "longer")

    [problem] = shelf.folder.reload()
    assert problem.startswith("adapter 'one': its file was changed")
    assert shelf.added == ["one"]


def test_a_broken_file_is_a_problem_of_its_own_and_tried_again(shelf: Shelf) -> None:
    shelf.broken = {"bad"}
    shelf.put("bad")
    shelf.put("good")
    assert shelf.folder.reload() == ["adapter 'bad': no"]

    shelf.broken = set()

    assert shelf.folder.reload() == []
    assert shelf.added == ["good", "bad"]


def test_a_folder_that_is_not_there_hides_what_it_had(shelf: Shelf) -> None:
    shelf.put("one")
    shelf.folder.reload()

    (shelf.path / "one.safetensors").unlink()
    shelf.path.rmdir()

    assert shelf.folder.reload() == []
    assert shelf.offered == []


def test_requests_may_name_what_came_and_not_what_is_gone_while_others_ride_on(
    tmp_path: Path,
) -> None:
    kept = adapter(tmp_path, "flux", 1)
    with driving("flux", lora_dir=str(tmp_path)) as drive:
        assert drive.engine.loaded.card.lora == (kept.stem,)
        riding = drive.submit(**FLUX, lora=[{"id": kept.stem}])
        drive.turn()

        new = adapter(tmp_path, "flux", 2)
        os.remove(kept)
        (tmp_path / "broken.safetensors").write_text("x")
        [problem] = drive.engine.reload()

        assert "'broken'" in problem
        assert drive.engine.loaded.card.lora == (new.stem,)
        with pytest.raises(InvalidValue, match=f"no adapter '{kept.stem}'"):
            drive.submit(**FLUX, lora=[{"id": kept.stem}])
        other = drive.submit(**FLUX, lora=[{"id": new.stem}])
        drive.finish()

    assert (riding.error, other.error) == (None, None)


# Batching rules


def config(file: Path, most: int) -> None:
    file.write_text(json.dumps([{"model": "tiny", "max_batch_size": most}]))


def batch(policy: Policy) -> int:
    line = [QueuedRequest(request=n, signature={"width": 64, "height": 64}) for n in range(8)]
    return len(policy.admit(line, 0, 0.0).requests)


def test_batching_rules_are_read_again_and_broken_ones_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    config(file, 2)
    settings = EngineSettings(
        batching_mode="dynamic", batching_max_size=8, batching_config=str(file)
    )
    policy = build(settings, Costs(), SERVER, Dispatches(), lambda line: None)
    assert batch(policy) == 2

    config(file, 5)
    assert batch(policy) == 2
    reload(policy, settings, SERVER)
    assert batch(policy) == 5

    file.write_text("{")
    with pytest.raises(SettingRejected, match="cannot be read"):
        reload(policy, settings, SERVER)
    assert batch(policy) == 5


@pytest.mark.parametrize("mode", ["off", "request", "continuous"])
def test_modes_without_rules_have_nothing_to_read(mode: str) -> None:
    settings = EngineSettings(batching_mode=mode)  # type: ignore[arg-type]
    policy = build(settings, Costs(), SERVER, Dispatches(), lambda line: None)

    reload(policy, settings, SERVER)
