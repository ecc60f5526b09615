"""A folder of thirty adapters, good and odd: at the start, after SIGHUP, after a worker's death.

Every good one is offered and drawn as plain diffusers draws it; every odd one is refused to the
request that names it, with the reason, and is in no other's way.
"""

import base64
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from carpool.engine.adapters import parts
from carpool.errors import InvalidValue
from support.engine_driver import CLOSE, Recorder, driving, for_inference, fresh, gap
from support.lora_files import dora, weights, write
from support.pictures import ALIKE, picture
from support.pictures import gap as picture_gap
from support.server_process import DRAW, MODEL_ID, SIZE, Server, eventually, serving
from support.tiny import ARGUMENTS

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
State = dict[str, Tensor]


def lora(seed: int) -> dict[str, Tensor]:
    return weights("flux", seed, std=0.2)


def cast(dtype: torch.dtype) -> State:
    return {name: weight.to(dtype) for name, weight in lora(3).items()}


def alphas(alpha: Tensor) -> State:
    downs = [name for name in lora(4) if "lora_A" in name]
    return lora(4) | {name.replace("lora_A.weight", "alpha"): alpha.clone() for name in downs}


def only(mark: str, seed: int) -> State:
    return {name: weight for name, weight in lora(seed).items() if mark in name}


def stray() -> State:
    path = "transformer.transformer_blocks.9.attn.to_q"
    return {f"{path}.lora_A.weight": torch.ones(4, 32), f"{path}.lora_B.weight": torch.ones(32, 4)}


GOOD: dict[str, Callable[[], State]] = {  # by the file
    "plain.safetensors": lambda: lora(1),
    "Pixel Art XL v1.1.safetensors": lambda: lora(2),
    "[FLUX] ink (wash) {2}.safetensors": lambda: only("to_q", 5),
    "水墨画.safetensors": lambda: only("to_k", 6),
    "_leading.safetensors": lambda: only("proj_mlp", 7),
    f"{'long ' * 30}name.safetensors": lambda: only("to_v", 8),
    "UPPER.SAFETENSORS": lambda: only("norm.linear", 9),
    "characters/Robo Girl.safetensors": lambda: lora(10),
    "characters/plain.safetensors": lambda: lora(11),
    "e4m3.safetensors": lambda: cast(torch.float8_e4m3fn),
    "e5m2.safetensors": lambda: cast(torch.float8_e5m2),
    "half.safetensors": lambda: cast(torch.float16),
    "brain.safetensors": lambda: cast(torch.bfloat16),
    "alphas.safetensors": lambda: alphas(torch.tensor(2.0)),
    "alphas 1.safetensors": lambda: alphas(torch.tensor([3.0])),
    "dora.safetensors": lambda: dora(lora(12), "flux", "transformer"),
    "stray.safetensors": lambda: lora(13) | stray(),
    "one/pytorch_lora_weights.safetensors": lambda: lora(14),
}
ODD: dict[str, tuple[Callable[[], State | bytes], str]] = {  # by the file, and the reason
    "torn.safetensors": (lambda: save(dict(lora(1)))[:-100], "is not a readable"),
    "empty.safetensors": (lambda: b"", "is not a readable"),
    "text file.safetensors": (lambda: b"<html>log in</html>", "is not a readable"),
    "old.ckpt": (lambda: b"PK", "a pickle"),
    "alphas 4.safetensors": (lambda: alphas(torch.ones(4)), "has 4 entries"),
    "nan.safetensors": (lambda: {n: w * torch.nan for n, w in lora(1).items()}, "NaN"),
    "f8 nan.safetensors": (
        lambda: {n: (w * torch.nan).to(torch.float8_e5m2) for n, w in lora(1).items()},
        "NaN",
    ),
    "other model.safetensors": (
        lambda: {n.replace("blocks.0", "blocks.7"): w for n, w in only(".0.", 1).items()},
        "are not in this FluxPipeline",
    ),
    "sizes.safetensors": (
        lambda: {n: torch.ones(4, 40) if "lora_A" in n else w for n, w in only("to_q", 1).items()},
        "for a layer of 40 to 32",
    ),
    "checkpoint.safetensors": (lambda: {"x.weight": torch.ones(4, 4)}, "holds no LoRA"),
    "loha.safetensors": (
        lambda: {n.replace("lora_", "hada_w1_"): w for n, w in only("to_q", 1).items()},
        "a LoHa",
    ),
    "halves.safetensors": (lambda: only("lora_B", 1), "cannot load|not complete"),
    "rank 0.safetensors": (
        lambda: {n: w[:0] if "lora_A" in n else w[:, :0].clone() for n, w in lora(1).items()},
        "must be a matrix",
    ),
}
SPECIAL: dict[str, tuple[str, Callable[[Path], None]]] = {  # what is no file at all
    "dangling.safetensors": ("cannot be read", lambda path: path.symlink_to("nothing")),
    "loop.safetensors": ("cannot be read", lambda path: path.symlink_to(path.name)),
    "memory.safetensors": ("is not a readable", lambda path: path.symlink_to("/proc/self/mem")),
    "pipe.safetensors": ("there is no file", os.mkfifo),
}


def named(file: str) -> str:
    """What a person calls a file: its name without the suffix, of one in a sub-folder, too."""
    if "pytorch_lora_weights" in file:
        return file.split("/")[0]
    return file.rpartition(".")[0] if file == "characters/plain.safetensors" else Path(file).stem


@dataclass(frozen=True)
class Shelf:
    """A folder that is filled."""

    folder: Path

    def put(self, file: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file in SPECIAL:
            SPECIAL[file][1](path)
            return
        made = GOOD[file]() if file in GOOD else ODD[file][0]()
        if isinstance(made, bytes):
            path.write_bytes(made)
        else:
            write(path, dict(made))

    def fill(self) -> None:
        for file in (*GOOD, *ODD, *SPECIAL):
            self.put(file)


REASONS = {file: reason for file, (reason, _) in SPECIAL.items()} | {
    file: reason for file, (_, reason) in ODD.items()
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    shelf = Shelf(tmp_path_factory.mktemp("adapters"))
    shelf.fill()
    return shelf


def judge(files: Mapping[str, Path]) -> Any:
    """Plain diffusers with these adapters, by number: PEFT takes no dots in names."""
    pipe: Any = fresh("flux")
    for number, path in enumerate(files.values()):
        pipe.load_lora_weights(load_file(path), adapter_name=f"a{number}")
    return for_inference(pipe)


def test_every_good_file_is_drawn_and_every_odd_one_refused(filled: Shelf) -> None:
    files = {file: filled.folder / file for file in GOOD}
    pipe = judge(files)
    with driving("flux", lora_dir=str(filled.folder)) as drive:
        requests = {
            file: drive.submit("a cat", lora=[{"id": named(file)}], **ARGUMENTS["flux"])
            for file in files
        }
        drive.finish()
        assert len(drive.engine.loaded.card.lora) == len(GOOD)
        for file, reason in REASONS.items():
            with pytest.raises(InvalidValue, match=rf"which cannot be used: (.|\n)*({reason})"):
                drive.submit("a cat", lora=[{"id": named(file)}], **ARGUMENTS["flux"])

    pictures = []
    for number, (file, request) in enumerate(requests.items()):
        pipe.set_adapters([f"a{number}"], [1.0])
        dice = torch.Generator().manual_seed(0)
        alone: Tensor = pipe("a cat", **ARGUMENTS["flux"], generator=dice).images
        assert gap(request.image, alone) < CLOSE, file
        pictures.append(alone)
        has_strays = any("find no place" in text for text in request.outcome.warnings)
        assert has_strays == (file == "stray.safetensors")
    assert len({one.numpy().tobytes() for one in pictures}) == len(GOOD)
    assert max(forward.adapters for forward in drive.forwards) >= 8  # in one


def test_files_that_come_and_go_and_change_are_told_apart_when_the_folder_is_read_again(
    tmp_path: Path,
) -> None:
    shelf = Shelf(tmp_path / "adapters")
    for file in ("plain.safetensors", "torn.safetensors", "half.safetensors", "brain.safetensors"):
        shelf.put(file)
    half, away = shelf.folder / "half.safetensors", tmp_path / "half.safetensors"
    with driving("flux", lora_dir=str(shelf.folder)) as drive:

        def submit(name: str) -> Recorder:
            return drive.submit("a cat", lora=[{"id": name}], **ARGUMENTS["flux"])

        assert list(drive.engine.loaded.card.lora) == ["brain", "half", "plain"]
        os.utime(shelf.folder / "brain.safetensors")  # the same bytes: not changed
        riding = submit("half")
        drive.turn()

        write(shelf.folder / "torn.safetensors", dict(lora(20)))  # mended
        write(shelf.folder / "plain.safetensors", {**lora(21), **stray()})  # other weights
        half.rename(away)
        shelf.put("Pixel Art XL v1.1.safetensors")
        shelf.put("nan.safetensors")
        problems = drive.engine.reload()

        assert sorted(text.split("'")[1] for text in problems) == ["nan", "plain"]
        before = submit("plain")
        others = [submit(name) for name in ("torn", "Pixel Art XL v1.1")]
        drive.finish()
        with pytest.raises(InvalidValue, match="no adapter 'half' any more: its file is gone"):
            submit("half")

        away.rename(half)
        assert drive.engine.reload() == problems
        back = submit("half")
        drive.finish()

        shutil.rmtree(shelf.folder)
        assert drive.engine.reload() == []
        assert drive.engine.loaded.card.lora == ()

    [warning] = before.outcome.warnings
    assert "its file was changed after it was read, and the earlier weights are used" in warning
    assert all(other.error is None for other in others)
    assert gap(back.image, riding.image) < CLOSE


def test_a_file_that_is_written_over_or_cut_short_changes_no_picture(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.safetensors", dict(lora(n))) for n in (1, 2)]
    pictures = list[Tensor]()

    with driving("flux", lora=(f"x={files[0]}",)) as drive:
        for content in (files[1].read_bytes(), b"x" * 50, b""):
            request = drive.submit("a cat", lora=[{"id": "x"}], **ARGUMENTS["flux"])
            drive.finish()
            pictures.append(request.image)
            with files[0].open("r+b") as file:  # the same file, as `cp` writes it
                file.write(content)
                file.truncate(len(content))

    assert gap(*pictures[:2]) == gap(*pictures[1:]) == 0


def test_one_that_fails_in_a_way_of_its_own_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, real = Shelf(tmp_path), parts.part_of
    shelf.put("plain.safetensors")
    shelf.put("dora.safetensors")

    def part_of(layer: Any, *more: Any) -> Any:
        if layer.lora_magnitude_vector:
            raise NotImplementedError("a new kind of failure")
        return real(layer, *more)

    monkeypatch.setattr("carpool.engine.adapters.reader.part_of", part_of)
    with driving("flux", lora_dir=str(tmp_path)) as drive:
        assert drive.engine.loaded.card.lora == ("plain",)
        with pytest.raises(InvalidValue, match="NotImplementedError: a new kind of failure"):
            drive.submit("a cat", lora=[{"id": "dora"}], **ARGUMENTS["flux"])


def listed(server: Server) -> tuple[set[str], dict[str, str]]:
    """What every good file is called, and why each odd one is refused."""
    answer = server.get("/v1/list_loras").json()
    names = {(one["names"] or [one["nickname"]])[0] for one in answer["loaded_adapters"]}
    return names, {one["nickname"]: one["problem"] for one in answer["refused_adapters"]}


def check(server: Server, folder: Path) -> None:
    """Draw with one adapter by its file's name, and be refused another."""
    name = "Pixel Art XL v1.1"
    answer = server.draw(lora=[{"id": name, "scale": 0.8}])
    assert answer.status_code == 200, answer.text
    pipe = judge({name: folder / f"{name}.safetensors"})
    pipe.set_adapters(["a0"], [0.8])
    dice = torch.Generator().manual_seed(1)
    sizes = {"width": SIZE[0], "height": SIZE[1]}
    alone = pipe("a red circle", **DRAW, **sizes, generator=dice).images[0]
    drawn = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
    assert picture_gap(drawn, alone) <= ALIKE
    assert "find no place" in server.draw(lora=[{"id": "stray"}]).json()["warnings"][0]
    for name, reason in {"text file": "is not a readable", "explicit": "there is no file"}.items():
        if name == "explicit" and (folder.parent / "explicit.safetensors").exists():
            continue
        refused = server.draw(lora=[{"id": name}])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "lora"
        assert reason in refused.json()["error"]["message"]


@pytest.mark.timeout(150)  # starting a server may take long
def test_a_server_starts_reloads_and_restarts_with_all_good_ones(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    shelf, explicit = Shelf(folder), tmp_path / "explicit.safetensors"
    late = ["水墨画.safetensors", "alphas 4.safetensors", "characters/Robo Girl.safetensors"]
    for file in (*GOOD, *ODD, *SPECIAL):
        if file not in late:
            shelf.put(file)
    write(explicit, dict(lora(30)))
    with serving("--lora-dir", str(folder), "--lora", f"explicit={explicit}") as server:
        names, refused = listed(server)
        assert len(names) == len(GOOD) - 2 + 1
        assert len(refused) == len(ODD) - 1 + len(SPECIAL)
        check(server, folder)

        for file in late:
            shelf.put(file)
        server.signal(signal.SIGHUP)
        eventually(lambda: len(listed(server)[0]) == len(GOOD) + 1, 60, "new files are offered")
        check(server, folder)

        explicit.unlink()
        worker = server.worker()
        os.kill(worker, signal.SIGKILL)
        eventually(
            lambda: server.workers() not in ([worker], []) and server.health() == 200,
            60,
            "a worker is ready again",
        )
        names, refused = listed(server)
        assert len(names) == len(GOOD)
        assert len(refused) == len(ODD) + len(SPECIAL) + 1
        check(server, folder)
        assert server.get(f"/v1/models/{MODEL_ID}").json()["lora"][-1] != "explicit"
