"""Whatever is raised in a stage of a turn, healthy requests get their picture."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import carpool
from carpool.config import FAULT_VARIABLE
from carpool.engine.containment import EngineLost, RequestStage, Stages, TurnStage
from carpool.engine.faults import ERRORS, POINTS
from carpool.engine.fiber import FiberExit
from carpool.engine.journal import Answered, Journal
from carpool.errors import CarpoolError, WorkerLost
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import CLOSE, Drive, Recorder, driving, gap
from support.odd_pipeline import drawn_alone, odd_pipeline

SEEDS, GUILTY = (0, 1, 2), 13
OF_ALL, OF_ONE = sorted(get_args(TurnStage)), [*get_args(RequestStage), "forward"]


@cache
def expected(seed: int, steps: int) -> torch.Tensor:
    picture: torch.Tensor = drawn_alone(seed, num_inference_steps=steps)
    return picture


def put(drive: Drive, seed: int, steps: int, **parameters: Any) -> Recorder:
    """Submit a request with a journal, a step cache that skips nothing, and previews."""
    asked: dict[str, Any] = {"num_inference_steps": steps, "output_type": "pt", "step_cache": 1e-9}
    request = Request("x", seed=seed, **asked, **parameters)
    kept: list[Answered] = []
    recorder = Recorder()
    checked = check(drive.engine.loaded.card, request)
    drive.engine.submit(checked, recorder, 0.0, Journal((), kept.append))
    return recorder


def is_right(recorder: Recorder, seed: int, steps: int) -> bool:
    return gap(recorder.image, expected(seed, steps)) < CLOSE


@example("learn", "unprintable", "1", [4, 4, 4], "continuous")
@example("choose", "exit", "1", [4, 2, 3], "dynamic")
@example("unwind", "interrupt", "0.5", [3, 2, 5], "request")
@given(
    st.sampled_from(OF_ALL),
    st.sampled_from(sorted(ERRORS)),
    st.sampled_from(["1", "0.5", "0.1", f"seed={GUILTY}"]),
    st.lists(st.integers(2, 5), min_size=3, max_size=3),
    st.sampled_from(["continuous", "dynamic", "request", "off"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_fails_beside_the_requests_costs_none_of_them_its_picture(
    monkeypatch: pytest.MonkeyPatch, stage: str, what: str, when: str, steps: list[int], mode: Any
) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, f"{stage}:{what}:{when}")
    with driving(odd_pipeline(), mode=mode) as drive:
        heard = [put(drive, seed, some) for seed, some in zip(SEEDS, steps, strict=True)]
        guilty = put(drive, GUILTY, 3)
        drive.finish()
        later = put(drive, 5, 3)
        drive.finish()

    for seed, some, one in zip(SEEDS, steps, heard, strict=True):
        assert is_right(one, seed, some)
        assert one.kinds[-1] == "finished"
    assert is_right(guilty, GUILTY, 3)
    assert is_right(later, 5, 3)


@given(
    st.sampled_from(OF_ONE),
    st.sampled_from(sorted(ERRORS)),
    st.lists(st.integers(2, 5), min_size=3, max_size=3),
    st.sampled_from(["continuous", "dynamic", "request", "off"]),
    st.integers(0, 5),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_fails_for_one_request_fails_that_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch, stage: str, what: str, steps: list[int], mode: Any, turns: int
) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, f"{stage}:{what}:seed={GUILTY}")
    with driving(odd_pipeline(), mode=mode) as drive:
        heard = [put(drive, seed, some) for seed, some in zip(SEEDS, steps, strict=True)]
        drive.turn(turns)
        guilty = put(drive, GUILTY, 3)
        drive.finish()
        later = put(drive, 5, 3)
        drive.finish()

    assert isinstance(guilty.error, CarpoolError)
    assert guilty.kinds[-1] == "finished"
    for seed, some, one in zip(SEEDS, steps, heard, strict=True):
        assert is_right(one, seed, some)
    assert is_right(later, 5, 3)


def test_every_stage_of_a_turn_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: Counter[str] = Counter()

    def note(self: Stages, stage: str, states: Sequence[Any] = ()) -> None:
        reached[stage] += 1

    monkeypatch.setattr(Stages, "reach", note)
    monkeypatch.setenv(FAULT_VARIABLE, "turn:error:0")
    with driving(odd_pipeline(), mode="continuous") as drive:
        put(drive, 0, 3)
        drive.finish()

    assert set(POINTS) - {"forward"} == reached.keys()


@pytest.fixture
def failing_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], carpool.Engine]:
    """A function that loads an engine some of whose turns fail beside all stages."""

    def load(what: str, how_often: str) -> carpool.Engine:
        monkeypatch.setenv(FAULT_VARIABLE, f"turn:{what}:{how_often}")
        return carpool.load(odd_pipeline(), device="cpu")

    return load


@pytest.mark.parametrize("what", sorted(ERRORS))
def test_a_turn_that_fails_is_made_again_and_nothing_is_lost(
    failing_turns: Callable[[str, str], carpool.Engine], what: str
) -> None:
    with failing_turns(what, "0.2") as engine:
        outputs = engine.generate(["x"] * 4, seed=0, output_type="pt", num_inference_steps=9)
        later = engine.generate("x", seed=3, output_type="pt", num_inference_steps=9)

    for output in [*outputs, *later]:
        assert gap(output.images, expected(output.seed, 9)) < CLOSE


@pytest.mark.parametrize("what", ["error", "exit", "unprintable"])
def test_an_engine_whose_turns_all_fail_ends_and_everybody_is_told_to_try_elsewhere(
    failing_turns: Callable[[str, str], carpool.Engine], what: str
) -> None:
    engine = failing_turns(what, "1")
    ended: list[Any] = []

    def ask() -> None:
        try:
            ended.append(engine.submit("x", seed=1).result(60))
        except CarpoolError as error:
            ended.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.close()

    assert len(ended) == 4
    assert all(error.should_retry for error in ended)
    assert {type(error).__name__ for error in ended} <= {"WorkerLost", "Draining"}


def test_jobs_go_on_in_an_engine_some_of_whose_turns_fail(
    failing_turns: Callable[[str, str], carpool.Engine],
) -> None:
    with failing_turns("error", "0.2") as engine:
        jobs = [engine.jobs.submit("x", seed=seed, num_inference_steps=9) for seed in range(3)]
        states = [engine.jobs.wait(job.id, 60).state for job in jobs]

    assert states == ["completed"] * 3


def test_requests_that_cannot_be_kept_apart_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("numbers that cannot be put back")

    with carpool.load(odd_pipeline(), device="cpu") as engine:
        monkeypatch.setattr("carpool.engine.random_state.RandomState.leave", fails)
        error = engine.generate("x", seed=1, return_errors=True)[0].error

    assert isinstance(error, WorkerLost)
    assert "cannot be kept apart: RuntimeError: numbers" in str(error)


@pytest.mark.parametrize("error", [EngineLost("the device is gone"), FiberExit()])
def test_no_boundary_stops_what_ends_an_engine_or_a_fiber(error: BaseException) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)):
        Stages().contain("count", None, fails)


def test_a_stage_that_always_fails_is_logged_once_for_each_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(error: BaseException) -> None:
        raise error

    stages = Stages()
    for error in [ValueError(1), ValueError(2), KeyError(1)]:
        stages.contain("learn", None, fails, error)

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        ValueError,
        KeyError,
    ]
