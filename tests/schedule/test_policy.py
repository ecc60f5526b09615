"""Scheduling modes as the engine asks them: examples of rules, properties of promises."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import EngineSettings
from carpool.errors import SettingRejected
from carpool.schedule.batch_modes import Dynamic, Off, Waves
from carpool.schedule.cost import Costs
from carpool.schedule.policy import Policy, build, reload, weights
from carpool.schedule.views import CallKind, ParkedCall, QueuedRequest
from carpool.settings.peers.sglang_rules import Server
from carpool.telemetry.sglang_metrics import Dispatches

KIND = CallKind("transformer.forward", 100)
MODES: dict[str, Callable[[], Policy]] = {
    "off": Off,
    "dynamic": lambda: Dynamic(4, 0.005),
    "request": lambda: Waves(4, 0.02),
    "continuous": lambda: built(batching_mode="continuous"),
}


def built(**settings: object) -> Policy:
    chosen = EngineSettings(**settings)  # type: ignore[arg-type]
    server = Server("model", None, False)
    return build(chosen, Costs(), server, Dispatches(), lambda line: None)


def parked(order: int, *, key: str = "a", rows: int = 1, cap: int = 4) -> ParkedCall:
    return ParkedCall(order, order, key, rows, cap, kind=KIND, left_s=1.0, whole_s=1.0)


def waiting(number: int, *, width: int = 64, at_s: float = 0.0) -> QueuedRequest:
    return QueuedRequest(number, at_s, 1.0, 1.0, signature={"width": width}, wave=width)


def lines(max_calls: int = 12) -> st.SearchStrategy[list[ParkedCall]]:
    """Parked calls of different requests, in any order; the cap belongs to the key."""
    caps = {"a": 4, "b": 8, "c": 1}
    call = st.tuples(st.sampled_from(sorted(caps)), st.integers(1, 6), st.integers(0, 50))
    return st.lists(call, max_size=max_calls, unique_by=lambda call: call[2]).map(
        lambda calls: [parked(o, key=k, rows=r, cap=caps[k]) for k, r, o in calls]
    )


@pytest.mark.parametrize("mode", MODES)
@given(line=lines())
def test_a_forward_is_of_one_key_and_within_its_cap_unless_one_call_is_wider(
    mode: str, line: list[ParkedCall]
) -> None:
    chosen = MODES[mode]().choose(line, 0.0, 0.0).calls

    assert bool(chosen) == bool(line)
    assert len({call.key for call in chosen}) <= 1
    assert len(chosen) <= 1 or sum(call.rows for call in chosen) <= chosen[0].max_rows
    assert len({call.order for call in chosen}) == len(chosen)


@pytest.mark.parametrize("mode", MODES)
@given(line=lines(), rng=st.randoms())
def test_the_order_in_which_calls_are_given_does_not_matter(
    mode: str, line: list[ParkedCall], rng: object
) -> None:
    shuffled = rng.sample(line, len(line))  # type: ignore[attr-defined]

    assert MODES[mode]().choose(shuffled, 0.0, 0.0) == MODES[mode]().choose(line, 0.0, 0.0)


@pytest.mark.parametrize("mode", ["off", "dynamic", "request"])
def test_nobody_comes_aboard_while_a_batch_runs(mode: str) -> None:
    assert MODES[mode]().admit([waiting(1)], 1, 9.0).requests == ()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.sampled_from(sorted(MODES)))
def test_everybody_in_line_comes_aboard_once(widths: list[int], mode: str) -> None:
    policy, line = MODES[mode](), [waiting(n, width=w) for n, w in enumerate(widths, 1)]
    boarded: list[int] = []
    for turn in range(3 * len(widths)):
        taken = policy.admit(line, 0, 100.0 + turn).requests
        boarded += taken
        line = [one for one in line if one.request not in taken]

    assert sorted(boarded) == list(range(1, len(widths) + 1))


def test_settings_choose_the_mode_and_its_numbers() -> None:
    dynamic = built(batching_mode="dynamic", batching_max_size=3, batching_delay_ms=5.0)
    waves = built(batching_mode="request", max_num_seqs=2, request_batch_max_wait_ms=20.0)

    assert isinstance(dynamic, Dynamic)
    assert (dynamic.max_size, dynamic.delay_s) == (3, 0.005)
    assert isinstance(waves, Waves)
    assert (waves.max_num_seqs, waves.wait_s) == (2, 0.02)
    assert isinstance(built(batching_mode="off"), Off)


def test_weights_of_tenants_are_read_and_wrong_ones_named() -> None:
    assert weights([]) is None
    assert weights(["a=2", "*=0.5"]) == {"a": 2.0, "*": 0.5}
    for wrong in ("a", "a=", "=1", "a=0", "a=-1", "a=inf", "a=nan"):
        with pytest.raises(SettingRejected, match="write TENANT=WEIGHT"):
            weights([wrong])


# Batching rules that are read again while requests run


SERVER = Server("tiny", None, False)


def config(file: Path, most: int) -> None:
    file.write_text(json.dumps([{"model": "tiny", "max_batch_size": most}]))


def batch(policy: Policy) -> int:
    line = [QueuedRequest(request=n, signature={"width": 64, "height": 64}) for n in range(8)]
    return len(policy.admit(line, 0, 0.0).requests)


def test_batching_rules_are_read_again_and_broken_ones_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    config(file, 2)
    settings = EngineSettings(
        batching_mode="dynamic", batching_max_size=8, batching_config=str(file)
    )
    policy = build(settings, Costs(), SERVER, Dispatches(), lambda line: None)
    assert batch(policy) == 2

    config(file, 5)
    assert batch(policy) == 2
    reload(policy, settings, SERVER)
    assert batch(policy) == 5

    file.write_text("{")
    with pytest.raises(SettingRejected, match="cannot be read"):
        reload(policy, settings, SERVER)
    assert batch(policy) == 5


@pytest.mark.parametrize("mode", ["off", "request", "continuous"])
def test_modes_without_rules_have_nothing_to_read(mode: str) -> None:
    settings = EngineSettings(batching_mode=mode)  # type: ignore[arg-type]
    policy = build(settings, Costs(), SERVER, Dispatches(), lambda line: None)

    reload(policy, settings, SERVER)
