"""Files that an engine keeps between its runs may hold anything: the next one starts and draws."""

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.engine.cost_store import StoredCosts
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from support.engine_driver import CLOSE, gap
from support.odd_pipeline import drawn_alone, odd_pipeline

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of an engine that has drawn."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredCosts, "_default", lambda self: folder / "costs.json")
        draw()
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such files of the test's own: in the default folder of all engines."""
    monkeypatch.setattr(StoredCosts, "_default", lambda self: tmp_path / "costs.json")
    return Path(shutil.copytree(kept, tmp_path, dirs_exist_ok=True))


def draw() -> None:
    with carpool.load(odd_pipeline(), device="cpu") as engine:
        outputs = engine.generate(["x"] * 4, seed=0, num_inference_steps=8, output_type="pt")
    plain = drawn_alone(0, num_inference_steps=8)
    assert max(gap(output.images, plain) for output in outputs) < CLOSE


def changed(change: Callable[[Any], Any]) -> Damage:
    def damage(file: Path) -> None:
        data = json.loads(file.read_text())
        file.write_text(json.dumps(change(data) or data))

    return damage


def seconds(value: Any) -> Damage:
    def change(data: Any) -> None:
        for entry in data["costs"]:
            entry["seconds"] = dict.fromkeys(entry["seconds"], value)

    return changed(change)


def entry(**values: Any) -> Damage:
    return changed(lambda data: [one.update(values) for one in data["costs"]] and data)


def in_its_place(make: Callable[[Path], object]) -> Damage:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


ANY: dict[str, Damage] = {
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(500)),
    "torn": lambda file: os.truncate(file, file.stat().st_size // 2),
    "torn at once": lambda file: os.truncate(file, 3),
    "a list": lambda file: file.write_text("[]"),
    "null": lambda file: file.write_text("null"),
    "no JSON": lambda file: file.write_text("costs: 1"),
    "no UTF-8": lambda file: file.write_bytes(b'{"identity": "\xff\xfe\xfd"}'),
    "random": lambda file: file.write_bytes(bytes(range(256)) * 9),
    "too deep": lambda file: file.write_text("[" * 100_000),
    "huge": lambda file: os.truncate(file, 1 << 30),
    "a long number": lambda file: file.write_text("9" * 10_000),
    "a folder": in_its_place(Path.mkdir),
    "a folder that holds some": in_its_place(lambda file: (file / "more").mkdir(parents=True)),
    "a link in a circle": in_its_place(lambda file: file.symlink_to(file.name)),
    "a pipe": in_its_place(os.mkfifo),
    "a device": in_its_place(lambda file: file.symlink_to("/dev/zero")),
}
NUMBERS: list[Any] = [0, -1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324, 10**400]
NUMBERS += [True, "1", None, [], {}]
COSTS: dict[str, Damage] = {
    **{f"seconds {value!r}": seconds(value) for value in NUMBERS},
    **{
        f"rows {rows!r}": entry(seconds={rows: 0.1})
        for rows in ["0", "-1", "x", "1.5", "", "99999999999999999999", "NaN"]
    },
    "seconds of too many rows": entry(seconds={str(n): 0.1 for n in range(1, 3000)}),
    "seconds as a list": entry(seconds=[0.1]),
    "a size below 0": entry(size=-5),
    "a size that is none": entry(size="large"),
    "a size too large": entry(size=10**40),
    "a name that is none": entry(name=None),
    "a list as detail": entry(detail=[]),
    "an entry that is none": changed(lambda data: data["costs"].append(7)),
    "costs that are none": changed(lambda data: data.update(costs=7)),
    "an identity that is none": changed(lambda data: data.update(identity=[])),
    "no identity": changed(lambda data: data.pop("identity") and data),
    **{
        f"learned at {when!r}": changed(partial(dict.update, learned_unix_s=when))
        for when in [10**400, math.nan, -math.inf, "now", -1, []]
    },
}
UNDATED = {name for name in COSTS if name.startswith("learned at")}  # such a table is worth less


def with_evidence(value: Any, data: Any) -> None:
    data["fusing"]["x"] = value


EVIDENCE: dict[str, Damage] = {
    "no evidence": changed(lambda data: data.update(fusing=[])),
    **{
        f"evidence {value!r}": changed(partial(with_evidence, value))
        for value in [
            None,
            7,
            {"alone": 7},
            {"agreed": "3", "sizes": [], "widths": [], "varied": [], "shared": []},
            {"agreed": -3, "sizes": [], "widths": [], "varied": [], "shared": []},
            {"agreed": True, "sizes": [], "widths": [], "varied": [], "shared": []},
            {"agreed": 3, "sizes": [{}], "widths": [], "varied": [], "shared": []},
            {"agreed": 3, "sizes": "all", "widths": [], "varied": [], "shared": []},
        ]
    },
}


TABLE, FUSING = "costs.json", "costs.fusing.json"
DAMAGES: dict[str, dict[str, Damage]] = {
    **{name: dict.fromkeys((TABLE, FUSING), damage) for name, damage in ANY.items()},
    **{name: {TABLE: damage} for name, damage in COSTS.items()},
    **{name: {FUSING: damage} for name, damage in EVIDENCE.items()},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_costs_and_evidence_of_how_calls_fuse_are_set_aside_and_the_engine_draws(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for file, damage in DAMAGES[name].items():
        damage(folder / file)

    draw()

    fresh = json.loads((folder / TABLE).read_text())  # of this run
    values = [s for one in fresh["costs"] for s in one["seconds"].values()]
    assert values
    assert all(0 < value < 1e6 for value in values)
    for file in DAMAGES[name] if name not in UNDATED else ():
        assert os.path.lexists(folder / f"{file}.damaged")
        assert f"renamed to {file}.damaged" in caplog.text


def test_a_file_that_is_no_table_and_that_the_user_has_named_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("do not lose this")

    with carpool.load(odd_pipeline(), device="cpu", cost_table=str(file)) as engine:
        engine.generate("x", seed=0, output_type="pt")

    assert file.read_text() == "do not lose this"
    assert "stays as it is" in caplog.text


numbers = st.one_of(
    st.floats(), st.sampled_from([0.0, -1.0, 1e-320, 1e308, math.nan, math.inf]), st.floats(0, 10)
)


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(-2, 40), numbers, numbers), max_size=12),
    st.integers(0, 10**12),
    st.integers(1, 64),
)
def test_whatever_is_learned_every_prediction_is_a_positive_number_and_can_be_read_again(
    learned: list[tuple[int, int, float, float]], size: int, rows: int
) -> None:
    costs = Costs()
    for one_size, one_rows, took_s, beside_s in learned:
        kind = CallKind("net.forward", one_size)
        costs.learn(kind, one_rows, took_s)
        costs.learn_turns(kind, one_rows, [(beside_s, took_s)])

    for asked in [size, *(one for one, *_ in learned)]:
        kind = CallKind("net.forward", asked)
        for predicted in (costs.seconds(kind, rows), costs.baseline_s(kind, rows)):
            assert 0 < predicted < math.inf
        assert math.isfinite(costs.overhead_s(kind, rows))
    text = json.dumps(costs.to_json(), allow_nan=False)
    assert len(list(Costs.from_json(json.loads(text), weight=0.6))) <= len(learned)
