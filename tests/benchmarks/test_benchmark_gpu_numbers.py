"""What the benchmark of a GPU makes of its measurements is right, and none of it is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_clock import Deadline, Marks, union_s
from benchmarks.gpu_engine import Watch, psnr, share_of_kernels
from benchmarks.gpu_models import Size
from benchmarks.gpu_page import Report, page
from benchmarks.gpu_report import (
    Curve,
    Kernels,
    Likeness,
    Machine,
    Missing,
    Record,
    parsed,
    written,
)


def a_curve(*seconds: float, rows: tuple[int, ...] = (1, 2, 4, 8)) -> Curve:
    by_rows = dict(zip(map(str, rows), seconds, strict=True))
    return Curve("M", "8x8", tflop=10.0, seconds=by_rows, tflops=500.0, peak_gib=1.0)


def test_the_knee_is_where_wider_forwards_hardly_give_more_rows_a_second() -> None:
    assert a_curve(0.1, 0.1, 0.1, 0.1).knee == 8  # a wide forward is free
    assert a_curve(0.1, 0.2, 0.4, 0.8).knee == 1  # it gains nothing
    assert a_curve(0.1, 0.12, 0.24, 0.47).knee == 2  # 10, 16.7, 16.7, 17 rows a second


def test_the_share_of_the_ceiling_is_operations_over_time_over_the_ceiling() -> None:
    assert a_curve(0.04, 0.05, 0.1, 0.2).ceiling(2) == pytest.approx(2 * 10 / 0.05 / 500)


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


class Works(nn.Module):
    """Keeps the device busy for as long as it is told to."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    def forward(self, duration_s: float) -> None:
        self._queue.free_s = self._queue.now() + duration_s


def test_a_forward_is_late_when_the_device_had_run_out_of_work_before_it() -> None:
    queue = Queue()
    works, watch = Works(queue), Watch(queue)
    pipe: Any = type("Pipe", (), {"components": {"transformer": works}})

    with watch.on(pipe):
        works.forward(10.0)  # the device is busy until 10
        queue.host_s = 4.0
        works.forward(10.0)  # launched in time: until 20
        queue.host_s = 23.0
        works.forward(5.0)  # three seconds late

    assert watch.late == [2]
    assert watch.waited_s() == 3.0
    assert watch.busy_s() == 25.0
    assert "forward" not in vars(works)


def test_equal_pictures_have_no_noise_and_one_in_a_hundred_is_forty_db() -> None:
    grey = torch.full((1, 3, 4, 4), 0.5)

    assert psnr(grey, grey) == float("inf")
    assert psnr(grey, grey + 0.01) == pytest.approx(40.0, abs=0.01)


def test_every_record_comes_back_from_its_line() -> None:
    records: list[Record] = [
        Machine("D", "torch 2", 700.0, "command"),
        a_curve(0.1, 0.1, 0.2, 0.4),
        Kernels("M", "8x8", "eager", 0.9),
        Likeness("M", "8x8", 4, float("inf"), float("inf"), 9.0),
        Missing("M", "compiled", "no time"),
    ]

    assert [parsed(written(one)) for one in records] == records


def test_the_page_grows_with_every_record_and_goes_on_where_a_killed_run_stopped(
    tmp_path: Path,
) -> None:
    output = tmp_path / "page.md"
    Report(output).add(Kernels("M", "8x8", "eager", 0.5))

    assert "50.0%" in output.read_text()
    Report(output).add(Kernels("N", "8x8", "eager", 0.25))
    assert "50.0%" in output.read_text()
    assert "25.0%" in output.read_text()


def test_what_was_measured_later_replaces_and_what_is_missing_later_does_not() -> None:
    missing = Missing("M", "kernels 8x8 eager", "no time")
    old, new = (Kernels("M", "8x8", "eager", share) for share in (0.25, 0.5))

    text = page([missing, old, new, missing])

    assert "50.0%" in text
    assert "25.0%" not in text
    assert "no time" not in text


def test_a_deadline_is_shared_in_equal_parts_of_what_is_left() -> None:
    deadline = Deadline.after(300.0)

    assert deadline.share(3).left_s == pytest.approx(100.0, abs=1.0)
    assert deadline.left_s == pytest.approx(300.0, abs=1.0)


def test_a_size_is_shown_as_it_is_asked_for() -> None:
    assert [str(Size(512, 768)), str(Size(832, 480, 17))] == ["512x768", "832x480x17f"]
