"""What calls were answered goes to the front: some milliseconds late at most, in small messages."""

from carpool.config import EngineSettings
from carpool.engine.journal import Answered
from carpool.engine.model.device import Device
from carpool.worker.journal_sender import EVERY_S, MOST_BYTES, AnswerBatch, JournalSender


def answered(size: int = 100) -> Answered:
    return Answered("a", 0, b"", b"", Device(EngineSettings(device="cpu")), None, size)


def test_answers_of_short_steps_share_a_message_and_those_of_long_ones_do_not_wait() -> None:
    now_s, sent = 100.0, list[AnswerBatch]()
    sender = JournalSender(sent.append, lambda: now_s)
    for _ in range(20):  # steps of 2 ms
        sender.add(answered())
        sender.after_turn()
        now_s += 0.002
    assert len(sent) == 2
    assert len(sent[0].answered) == 1  # nothing was sent just before
    for _ in range(3):  # steps of half a second
        now_s += 0.5
        sender.add(answered())
        sender.after_turn()
    assert len(sent) == 5
    assert sum(len(batch.answered) for batch in sent) == 23


def test_what_waits_never_becomes_a_large_message_and_a_flush_leaves_nothing() -> None:
    sent = list[AnswerBatch]()
    sender = JournalSender(sent.append, lambda: 0.0)
    for _ in range(10):
        sender.add(answered(MOST_BYTES // 2))
        sender.after_turn()
    assert all(len(batch.answered) <= 2 for batch in sent)
    sender.add(answered())
    sender.after_turn()
    before = len(sent)
    sender.flush()
    sender.flush()
    assert len(sent) == before + 1
    assert EVERY_S <= 0.02  # what is promised


def test_the_end_of_a_replay_is_sent_at_once_and_other_calls_with_the_next_answers() -> None:
    sent = list[AnswerBatch]()
    sender = JournalSender(sent.append, lambda: 0.0)
    sender.add(answered())
    sender.after_turn()
    sender.add_passed("b", 3)
    sender.after_turn()
    assert len(sent) == 1

    sender.replayed("a", 7)

    assert sent[1].passed == {"a": 7, "b": 3}
