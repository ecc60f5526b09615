"""What an engine asks of its device: type, threads, and never to run far ahead of it."""

import pytest
import torch

from carpool.config import EngineSettings
from carpool.engine.model.device import Device
from carpool.engine.model.stopwatch import Stopwatch
from carpool.errors import SettingRejected


class FakeEvent:
    """A moment in a device's queue that is over once somebody waited for it."""

    def __init__(self) -> None:
        self.was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True


def test_the_loop_runs_ahead_by_one_forward_and_waits_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(EngineSettings(device="cpu"))
    events = [FakeEvent() for _ in range(4)]
    marks = iter(events)
    monkeypatch.setattr(device, "mark", lambda: next(marks))

    ahead = []
    for launched in range(1, 5):
        device.launched()
        ahead.append(launched - sum(event.was_waited_for for event in events))

    assert ahead == [1, 1, 1, 1]
    assert [event.was_waited_for for event in events] == [True, True, True, False]


def test_auto_means_float32_on_a_cpu_and_what_was_said_wins() -> None:
    assert Device(EngineSettings(device="cpu")).dtype == torch.float32
    assert Device(EngineSettings(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "meta", ""])
def test_what_is_no_device_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(SettingRejected, match="must be auto, cpu, cuda, xpu, mps, or cuda:N"):
        Device(EngineSettings(device=name))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_device_that_is_not_here_is_refused_with_what_torch_finds(name: str) -> None:
    kind = name.partition(":")[0].upper()
    with pytest.raises(SettingRejected, match=f"finds no {kind} here; .* a CPU only: device=cpu"):
        Device(EngineSettings(device=name))


def test_a_small_model_gets_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    Device(EngineSettings(device="cpu")).enter(parameters=4_000_000)
    Device(EngineSettings(device="cpu")).enter(parameters=12_000_000_000)
    Device(EngineSettings(device="cpu", threads=2)).enter(parameters=4_000_000)

    assert said == [1, 4, 2]


def test_the_environment_decides_over_the_default_but_not_over_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    Device(EngineSettings(device="cpu")).enter(parameters=4_000_000)
    Device(EngineSettings(device="cpu", threads=2)).enter(parameters=4_000_000)

    assert said == [2]


class TimedEvent:
    """A moment in a queue of work whose seconds the test counts."""

    now_s = 0.0

    def record(self) -> None:
        self.at_s = TimedEvent.now_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "TimedEvent") -> float:
        return (other.at_s - self.at_s) * 1000


def test_forwards_that_take_turns_are_timed_without_each_others_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(EngineSettings(device="cpu"))
    monkeypatch.setattr(TimedEvent, "now_s", 0.0)
    monkeypatch.setattr(device, "has_events", True)
    monkeypatch.setattr(device, "timed_event", TimedEvent)
    watch = Stopwatch(device)

    def work(seconds: float) -> None:
        TimedEvent.now_s += seconds

    watch.start()
    work(1.0)
    first = watch.swap(None)
    work(10.0)  # waits for weights
    watch.start()
    work(2.0)
    second = watch.swap(None)
    watch.swap(first)
    work(4.0)
    watch.stop("first")
    watch.swap(second)
    work(8.0)
    watch.stop("second")

    assert watch.read() == [("first", 5.0), ("second", 10.0)]
