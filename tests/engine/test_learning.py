"""Forwards are learned from: each at once while a width is new, later several together."""

import pytest

from carpool.engine.learning import KNOWN_WELL, LEARN_EVERY
from carpool.schedule.cost import Costs
from carpool.types import CallKind
from support.engine_driver import VirtualClock, driving
from support.tiny import ARGUMENTS


class Ticking(VirtualClock):
    """A clock by which everything takes a while."""

    def __call__(self) -> float:
        self.pass_by(0.001)
        return super().__call__()


def test_every_forward_is_learned_from_and_known_widths_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[str] = []
    plain = Costs.learn

    def learn(self: Costs, kind: CallKind, rows: int, seconds: float) -> None:
        learned.append(kind.name)
        plain(self, kind, rows, seconds)

    monkeypatch.setattr(Costs, "learn", learn)
    steps = KNOWN_WELL + 3 * LEARN_EVERY + 1
    with driving("flux", clock=Ticking()) as drive:
        done = drive.submit(seed=1, **ARGUMENTS["flux"] | {"num_inference_steps": steps})
        groups = []
        while not done.is_done:
            before = len(learned)
            drive.turn()
            groups.append(len(learned) - before)
        forwards = len(drive.forwards)

    assert len(learned) == forwards  # the last of them at the engine's end
    at = groups.index(LEARN_EVERY)
    assert set(groups[at - LEARN_EVERY + 1 : at]) == {0}
    assert groups[:at].count(1) >= KNOWN_WELL
