"""Progress and answers go to the front some milliseconds late at most, in few, small messages."""

from itertools import pairwise
from typing import Any

import pytest

from carpool.config import EngineSettings
from carpool.engine.journal import Answered
from carpool.engine.model.device import Device
from carpool.worker.protocol import Progress
from carpool.worker.update_sender import (
    EVERY_S,
    MOST_BYTES,
    AnswerBatch,
    ProgressUpdate,
    UpdateSender,
)


def answered(size: int = 100) -> Answered:
    return Answered("a", 0, b"", b"", Device(EngineSettings(device="cpu")), None, size)


class Writer:
    """The writing thread, in virtual time."""

    def __init__(self) -> None:
        self.now_s, self.wakes = 100.0, 0
        self.sent: list[tuple[float, ProgressUpdate]] = []
        self.sender = UpdateSender(self._put, lambda: self.now_s)

    def _put(self, update: ProgressUpdate | None) -> None:
        if update is None:
            self.wakes += 1
        else:
            self.sent.append((self.now_s, update))

    def pass_s(self, seconds: float) -> None:
        """So much time passes, in which the thread wakes whenever it has asked to."""
        end_s = self.now_s + seconds
        while (wait_s := self.sender.wait_s()) is not None and self.now_s + wait_s <= end_s:
            self.now_s += wait_s
            self.sent += [(self.now_s, update) for update in self.sender.due()]
        self.now_s = end_s

    def of(self, kind: type) -> list[Any]:
        return [update for _, update in self.sent if isinstance(update, kind)]


@pytest.mark.parametrize("step_s", [0.002, 0.03, 0.5])
def test_steps_of_several_requests_are_sent_at_most_every_50_ms_and_none_later(
    step_s: float,
) -> None:
    writer, made_s = Writer(), dict[int, float]()
    for step in range(1, 101):
        for name in "ab":
            writer.sender.add_step(name, step, 100)
        made_s[step] = writer.now_s
        writer.pass_s(step_s)
    writer.pass_s(3 * EVERY_S)

    moments = sorted({moment for moment, _ in writer.sent})
    assert min(later - before for before, later in pairwise(moments)) >= EVERY_S - 1e-9
    late_s = [moment - made_s[update.step] for moment, update in writer.sent]  # type: ignore[union-attr]
    assert max(late_s) <= EVERY_S + 1e-9
    assert writer.of(Progress)[-2:] == [Progress("a", 100, 100), Progress("b", 100, 100)]
    assert writer.wakes <= 100 * step_s / EVERY_S + 1  # of another thread, by the engine's
    assert writer.sender.wait_s() is None
    assert EVERY_S <= 0.05  # what is promised


def test_the_last_step_comes_before_the_outcome_and_a_new_start_at_once() -> None:
    writer = Writer()
    writer.sender.add_step("a", 1, 3)
    writer.pass_s(0.0)
    writer.sender.add_step("a", 2, 3)
    writer.sender.add_step("a", 0, 0)  # it starts over: what it had done does not count
    writer.sender.add_step("a", 3, 3)
    writer.sender.ends("a")
    writer.pass_s(EVERY_S)
    writer.sender.ends("unknown")

    assert [update.step for update in writer.of(Progress)] == [1, 0, 3]


def test_answers_of_short_steps_share_a_message_and_those_of_long_ones_do_not_wait() -> None:
    writer = Writer()
    for _ in range(50):  # steps of 2 ms
        writer.sender.add(answered())
        writer.pass_s(0.002)
    writer.pass_s(EVERY_S)
    batches = writer.of(AnswerBatch)
    assert len(batches) == 3
    assert len(batches[0].answered) == 1  # nothing was sent just before
    for _ in range(3):  # steps of half a second
        writer.sender.add(answered())
        writer.pass_s(0.5)
    batches = writer.of(AnswerBatch)
    assert len(batches) == 6
    assert sum(len(batch.answered) for batch in batches) == 53


def test_what_waits_never_becomes_a_large_message_and_a_flush_leaves_nothing() -> None:
    writer = Writer()
    for _ in range(10):
        writer.sender.add(answered(MOST_BYTES // 2))
        writer.pass_s(0.0)
    assert all(len(batch.answered) <= 2 for batch in writer.of(AnswerBatch))
    writer.sender.add(answered())
    before = len(writer.sent)
    writer.sender.flush()
    writer.sender.flush()
    assert len(writer.sent) == before + 1


def test_the_end_of_a_replay_is_sent_at_once_and_other_calls_with_the_next_answers() -> None:
    writer = Writer()
    writer.sender.add(answered())
    writer.pass_s(0.0)
    writer.sender.add_passed("b", 3)
    writer.pass_s(0.01)
    assert len(writer.sent) == 1

    writer.sender.replayed("a", 7)

    assert writer.of(AnswerBatch)[1].passed == {"a": 7, "b": 3}
