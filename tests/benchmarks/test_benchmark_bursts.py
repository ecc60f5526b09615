"""Bursts of the live benchmark: what is compared with what, and the page that keeps the rows."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.bursts import (
    CLIENTS,
    MARKS,
    MODELS,
    PARTIES,
    QUICK,
    WRONG,
    Row,
    page,
    parts,
    put,
    requests,
    rows,
    wrong_table,
)


def test_rows_are_against_the_best_of_the_other_modes_in_each_of_the_two_numbers() -> None:
    seen = {party: [(8.0, 1.0, 2.0, 30)] * 5 for party in PARTIES}
    seen |= {"dynamic": [(10.0, 2.0, 2.0, 22)] * 5, "off": [(4.0, 0.5, 0.1, 99)] * 5}
    seen["continuous"] = [(9.0, 1.0, 2.5, 24)] * 4 + [
        (900.0, 0.01, 0.1, 9)
    ]  # one round says nothing

    fresh, wrong = rows("shapes/equal/quiet", seen)

    assert (fresh.table, fresh.best, fresh.throughput, fresh.latency) == (
        "fresh",
        "dynamic",
        0.9,
        2.0,
    )
    assert (wrong.table, wrong.throughput) == ("wrong", 0.8)
    assert (fresh.cpu, wrong.cpu) == (1.25, 1.0)  # of the mode with the best throughput
    assert (fresh.forwards, fresh.others) == (24, 22)
    assert not fresh.is_kept


@pytest.mark.parametrize(
    ("throughput", "latency", "is_kept"),
    [(0.97, 1.05, True), (0.96, 1.0, False), (1.5, 1.06, False)],
)
def test_a_row_keeps_the_promise_only_with_both_numbers(
    throughput: float, latency: float, is_kept: bool
) -> None:
    assert Row("part", "fresh", "off", 1.0, throughput, latency, 5).is_kept is is_kept


def test_one_width_of_each_kind_of_a_wrong_table_is_4_times_off(tmp_path: Path) -> None:
    right = {"costs": [{"name": name, "seconds": {"1": 1.0, "8": 4.0}} for name in "ab"]}
    (tmp_path / "right").write_text(json.dumps(right))

    wrong_table(tmp_path / "right", tmp_path / "wrong", seed=random.Random(0).randrange(99))

    for one in json.loads((tmp_path / "wrong").read_text())["costs"]:
        off = [one["seconds"][rows] / seconds for rows, seconds in {"1": 1.0, "8": 4.0}.items()]
        assert sorted(off) in ([1.0, WRONG], [1 / WRONG, 1.0])


@pytest.mark.parametrize("name", MODELS)
def test_a_burst_has_a_request_for_each_client_and_mixes_what_it_says(name: str) -> None:
    def settings(mix: str) -> set[tuple[object, ...]]:
        burst = requests(name, mix, QUICK)
        assert len(burst) == CLIENTS
        strength = "true_cfg_scale" if name == "qwen-image" else "guidance_scale"
        return {(one.parameters["num_inference_steps"], one.parameters[strength]) for one in burst}

    assert len(settings("equal")) == 1
    assert len(settings("steps")) == len(QUICK.mixed)
    assert len(settings("steps+guidance")) > len(QUICK.mixed)


def test_a_quick_run_has_every_model_and_says_how_it_was_made() -> None:
    quick = parts(is_quick=True)

    assert set(quick) < set(parts())
    assert len(quick) <= 8  # of some 20 s
    assert {part.split("/")[0] for part in quick} == set(MODELS)
    assert any(part.endswith("/busy") for part in quick)
    row = Row(quick[0], "fresh", "off", 1.0, 1.0, 1.0, 3)
    assert "`python -m benchmarks.bursts --quick`" in page([row], is_quick=True)


def test_the_rows_of_a_page_take_the_place_of_older_ones_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nBefore.\n")
    old, new = (Row(parts()[0], "fresh", "off", n, 1.0, 1.0, 5) for n in (1.0, 2.0))

    put(page([old]), path)
    path.write_text(path.read_text() + "\nAfter.\n")
    put(page([new]), path)

    text = path.read_text()
    assert text.startswith("# Benchmarks\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")
    assert text.count(MARKS[0]) == 1
    assert "| fresh | 2.00 |" in text
    assert "| fresh | 1.00 |" not in text
