"""Forwards are learned from: each at once while a width is new, later several together."""

import pytest

from carpool.engine.learning import LEARN_EVERY, LEARN_EVERY_S
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from support.engine_driver import VirtualClock, driving
from support.tiny import ARGUMENTS


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods whose forwards were learned from."""
    names: list[str] = []
    plain = Costs.learn

    def learn(self: Costs, kind: CallKind, rows: int, *seconds: float) -> None:
        names.extend([kind.name] * len(seconds))
        plain(self, kind, rows, *seconds)

    monkeypatch.setattr(Costs, "learn", learn)
    return names


def test_every_forward_is_learned_from_and_known_widths_in_groups(learned: list[str]) -> None:
    with driving("flux", clock=VirtualClock(0.001)) as drive:
        arguments = ARGUMENTS["flux"] | {"num_inference_steps": 4 * LEARN_EVERY}
        done, groups = drive.submit(seed=1, **arguments), []
        while not done.is_done:
            before = len(learned)
            drive.turn()
            groups.append(len(learned) - before)
        forwards = len(drive.forwards)

    assert len(learned) == forwards  # the last of them at the engine's end
    at = [groups.index(batch) for batch in (1, 2, 4, 8, LEARN_EVERY)]
    assert at == sorted(at)
    assert set(groups[at[-1] - LEARN_EVERY + 1 : at[-1]]) == {0}


def test_long_forwards_are_learned_from_at_once_however_well_they_are_known(
    learned: list[str],
) -> None:
    steps = 28
    with driving("flux", clock=VirtualClock(LEARN_EVERY_S)) as drive:
        done = drive.submit(seed=1, **ARGUMENTS["flux"] | {"num_inference_steps": steps})
        while not done.is_done:
            drive.turn()
            assert len(learned) == len(drive.forwards)

    assert learned.count("transformer.forward") == steps
