"""What the benchmark of a GPU makes of its measurements is right, and none of it is lost."""

import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import likeness, psnr
from benchmarks.gpu_claims import CLAIMS, listed
from benchmarks.gpu_clock import Marks, union_s
from benchmarks.gpu_models import Size
from benchmarks.gpu_page import PARTS, page
from benchmarks.gpu_records import Rows, outcome, read
from benchmarks.gpu_rows import knee
from benchmarks.gpu_waits import Watch, share_of_kernels

ROOT = Path(__file__).parents[2]


def test_the_knee_is_where_wider_forwards_hardly_give_more_rows_a_second() -> None:
    assert knee({1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1}) == 8  # a wide forward is free
    assert knee({1: 0.1, 2: 0.2, 4: 0.4, 8: 0.8}) == 1  # it gains nothing
    assert knee({1: 0.1, 2: 0.12, 4: 0.24, 8: 0.47}) == 2  # 10, 16.7, 16.7, 17 rows a second


def test_spans_that_overlap_are_counted_once() -> None:
    assert union_s([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_the_share_of_kernels_leaves_out_copies_and_what_python_did() -> None:
    kernel, copy, call = ({"cat": cat} for cat in ("kernel", "gpu_memcpy", "cpu_op"))
    events: list[dict[str, Any]] = [
        {**kernel, "ts": 10.0, "dur": 4.0},
        {**kernel, "ts": 12.0, "dur": 4.0},  # beside the first, on another stream
        {**copy, "ts": 16.0, "dur": 2.0},
        {**kernel, "ts": 18.0, "dur": 2.0},
        {**call, "ts": 0.0, "dur": 50.0},
        {"ph": "M", "name": "process_name"},
    ]

    assert share_of_kernels(events) == 8 / 10
    with pytest.raises(ValueError, match="saw no kernels"):
        share_of_kernels([copy])


class Queue(Marks):
    """A device that works off its queue while the host's clock, which the test moves, runs."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.host_s = self.free_s = 0.0

    def now(self) -> float:
        return max(self.host_s, self.free_s)

    def is_past(self, moment: float) -> bool:
        return moment <= self.host_s


def test_a_forward_is_late_when_the_device_had_run_out_of_work_before_it() -> None:
    queue = Queue()
    watch = Watch(queue)

    def works(calls: Any, rows: Any) -> list[Any]:
        [duration_s] = calls
        queue.free_s = queue.now() + duration_s
        return []

    for host_s, duration_s in ((0.0, 10.0), (4.0, 10.0), (23.0, 5.0)):
        queue.host_s = host_s
        calls: Any = [duration_s]  # until 10; in time: until 20; three seconds late
        watch(works, calls, [1])

    assert [span.is_late for span in watch.spans] == [False, False, True]
    assert watch.gaps_s() == [0.0, 3.0]


def test_equal_pictures_have_no_noise_and_one_in_a_hundred_is_forty_db() -> None:
    grey = torch.full((1, 3, 4, 4), 0.5)

    assert psnr(grey, grey) == float("inf")
    assert psnr(grey, grey + 0.01) == pytest.approx(40.0, abs=0.01)


def test_another_picture_than_that_of_plain_diffusers_is_a_failure() -> None:
    black, white = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)

    assert likeness([black, white], [black, white])["against plain"] == "equal"
    with pytest.raises(AssertionError, match="dB; two unlike ones have"):
        likeness([white, black], [black, white])


def rows_of(folder: Path, left_s: float = 600.0) -> Rows:
    return Rows(folder / "check.jsonl", time.monotonic() + left_s)


def raises() -> dict[str, Any]:
    raise RuntimeError("no driver")


def test_every_row_is_on_the_page_whatever_became_of_it(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    rows.write("machine", "machine", {"device": "D", "versions": "torch 2"})
    rows.measure("good", lambda: {"table": "T", "ms": 0.5})
    rows.measure("several", lambda: [{"table": "T", "ms": 1.5}, {"table": "T", "ms": 2.5}])
    rows.measure("bad", raises)
    rows.measure("late", lambda: {}, needs_s=9999.0)
    rows.write("deadly", "began", {})
    rows.write("end", "end", {"how": "status -11", "said": "Segmentation fault", "seconds": 1})

    text = page(tmp_path)

    assert "D; torch 2." in text
    assert "| good | 0.5 |" in text
    assert text.count("| several |") == 2
    assert "| bad | failed | RuntimeError: no driver |" in text
    assert "| late | left out | 600 s were left, it needs about 9999 s |" in text
    assert "| deadly | crashed | the process ended in the middle of it |" in text
    assert "it did not end" not in text
    assert "status -11.\n\n```\nSegmentation fault\n```" in text


def test_a_part_that_is_run_again_measures_what_it_lacks(tmp_path: Path) -> None:
    rows_of(tmp_path).measure("first", lambda: {"ms": 1})
    rows_of(tmp_path, left_s=-1.0).measure("second", lambda: {"ms": 2})

    again = rows_of(tmp_path)
    again.measure("first", raises)
    again.measure("second", lambda: {"ms": 3})

    lines = outcome(read(tmp_path / "check.jsonl"))
    assert [line["cells"].get("ms") for line in lines] == [1, 3]


def test_a_row_that_failed_or_crashed_has_a_second_try_and_no_third(tmp_path: Path) -> None:
    rows_of(tmp_path).measure("failed", raises)
    rows_of(tmp_path).write("crashed", "began", {})

    for ms in (1, 2):
        again = rows_of(tmp_path)
        again.measure("failed", raises if ms == 1 else lambda: {"ms": 2})
        again.measure("crashed", lambda ms=ms: {"ms": ms})  # type: ignore[misc]

    lines = outcome(read(tmp_path / "check.jsonl"))
    assert [(line["row"], line["state"]) for line in lines] == [
        ("failed", "failed"),
        ("crashed", "measured"),
    ]
    assert lines[1]["cells"]["ms"] == 1


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    rows_of(tmp_path).measure("first", lambda: {"ms": 1})
    with (tmp_path / "check.jsonl").open("a") as file:
        file.write('{"row": "sec')

    assert [line["row"] for line in read(tmp_path / "check.jsonl")] == ["first", "first"]


def run_page(folder: Path, *flags: str) -> int:
    command = [sys.executable, "-m", "benchmarks.gpu_page", *flags, "--output", str(folder)]
    environment = {**os.environ, "PYTHONPATH": "src"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


@pytest.mark.timeout(120)
def test_a_part_runs_in_a_process_of_its_own_and_is_on_the_page(tmp_path: Path) -> None:
    status = run_page(tmp_path, "language", "--device", "cpu", "--tiny")

    text = (tmp_path / "page.md").read_text()
    assert not status, text
    assert "TINY MODELS: A DRY RUN" in text
    assert "| 16 prompts |" in text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--device", "cpu", "--tiny", "--limit-s", "0.5"), "ended by its clock"),
        (("--device", "cpu"), "--tiny is a dry run on a CPU"),
    ],
)
def test_a_part_that_does_not_end_well_is_a_line_of_the_page(
    flags: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    status = run_page(tmp_path, "rows", *flags)

    assert status
    assert why in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_each_part_says_what_its_columns_are(part: str) -> None:
    module = importlib.import_module(f"benchmarks.gpu_{part}")

    assert (module.__doc__ or "").startswith(f"Part *{part}*")
    assert callable(module.measure)


def test_each_claim_of_the_pretended_device_names_a_test_and_stands_on_its_page() -> None:
    text = (ROOT / "docs" / "devices.md").read_text()

    for line in listed():
        assert line in text, "`make devices` writes them"
    for claim in CLAIMS.values():
        assert (ROOT / claim.test).is_file()


def test_the_wheels_are_pinned_and_bring_what_the_package_needs() -> None:
    lines = (ROOT / "benchmarks" / "gpu_wheels.txt").read_text().splitlines()
    wheels = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line
              and not line.startswith("#")}  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[<>=]", one)[0] for one in project["dependencies"]}
    come_with_torch_and_transformers = {"click", "numpy", "pyyaml", "rich", "safetensors", "torch",
                                        "tqdm", "transformers", "jinja2"}  # fmt: skip

    assert needed - wheels <= come_with_torch_and_transformers


def test_a_size_is_shown_as_it_is_asked_for() -> None:
    assert [str(Size(512, 768)), str(Size(832, 480, 17))] == ["512x768", "832x480x17f"]
