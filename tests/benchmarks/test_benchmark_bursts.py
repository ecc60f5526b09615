"""Bursts of the live benchmark: what is compared with what, and the page that keeps the rows."""

import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.bursts import CLIENTS, MODELS, PARTIES, QUICK, parts, requests, wrong_table
from benchmarks.bursts_page import MARKS, WRONG, Played, Row, page, put, rows


def test_rows_are_against_the_best_of_the_other_modes_in_each_of_the_two_numbers() -> None:
    seen = {party: [Played(8.0, 1.0, 2.0, 30)] * 5 for party in PARTIES}
    seen |= {"dynamic": [Played(10.0, 2.0, 2.0, 22)] * 5, "off": [Played(4.0, 0.5, 0.1, 99)] * 5}
    seen["continuous"] = [Played(9.0, 1.0, 2.5, 24)] * 4 + [
        Played(900.0, 0.01, 0.1, 9)
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


def test_a_ratio_is_of_bursts_of_one_round_however_slow_the_machine_was() -> None:
    slower = (1.0, 2.0, 1.5, 3.0, 1.1, 2.5, 1.2)
    seen = {party: [Played(8 / by, by, by, 30) for by in slower] for party in PARTIES}
    seen["continuous"] = [Played(6 / by, 2 * by, by, 30) for by in slower[:-1]] + [
        Played(7 / slower[-1], 1.0, 1.0, 30)
    ]

    fresh, wrong = rows("shapes/equal/busy", seen)

    assert (fresh.throughput, fresh.throughput_error, fresh.latency) == (0.75, 0.0, 2.0)
    assert (wrong.throughput, wrong.latency, wrong.latency_error) == (1.0, 1.0, 0.0)


def test_the_error_of_a_ratio_is_that_of_a_median() -> None:
    """Of normally distributed rounds, the spread of their medians over many draws."""
    rng = random.Random(0)

    def drawn() -> Row:
        seen = {party: [Played(1.0, 1.0, 1.0, 30)] * 21 for party in PARTIES}
        seen["continuous"] = [Played(rng.gauss(1.0, 0.1), 1.0, 1.0, 30) for _ in range(21)]
        return rows("shapes/equal/quiet", seen)[0]

    several = [drawn() for _ in range(400)]

    spread = statistics.stdev(row.throughput for row in several)
    assert statistics.fmean(row.throughput_error for row in several) == pytest.approx(
        spread, rel=0.1
    )


@pytest.mark.parametrize(
    ("throughput", "latency", "error", "is_decided"),
    [
        (0.99, 1.0, 0.009, True),  # kept
        (0.99, 1.0, 0.011, False),
        (0.97, 1.0, 0.0, False),  # it may be missed yet
        (0.99, 1.06, 0.004, True),  # missed, whatever the other comes to
        (0.98, 1.06, 0.004, True),
        (0.96, 1.06, 0.006, False),
    ],
)
def test_rounds_go_on_until_chance_decides_nothing(
    throughput: float, latency: float, error: float, is_decided: bool
) -> None:
    row = Row(
        "part",
        "fresh",
        "off",
        1.0,
        throughput,
        latency,
        7,
        throughput_error=error,
        latency_error=error,
    )

    assert row.is_decided is is_decided


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
    assert "`python -m benchmarks.bursts --quick`" in page([row], CLIENTS, is_quick=True)


def test_the_rows_of_a_page_take_the_place_of_older_ones_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("# Benchmarks\n\nBefore.\n")
    old, new = (Row(parts()[0], "fresh", "off", n, 1.0, 1.0, 5) for n in (1.0, 2.0))

    put(page([old], CLIENTS), path)
    path.write_text(path.read_text() + "\nAfter.\n")
    put(page([new], CLIENTS), path)

    text = path.read_text()
    assert text.startswith("# Benchmarks\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")
    assert text.count(MARKS[0]) == 1
    assert "| fresh | 5 | 2.00 |" in text
    assert "| fresh | 5 | 1.00 |" not in text
