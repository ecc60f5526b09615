"""Every kind of people's own code: four requests at once are what a fresh plain pipeline gives.

`make test` tries the kinds that are right today, in one numerics and one round each; `make
test-custom` tries all, in both numerics and three rounds, and `WRONG` says which must fail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import carpool
from support.custom.base import REQUESTS, Custom, Kind
from support.custom.harness import Numerics, Trial, answered, run, submitted
from support.custom.judge import compared, plain
from support.custom.kinds import KINDS
from support.custom.wrong import WRONG

GROUPS = 12  # of kinds that share a process
NUMERICS: tuple[Numerics, ...] = ("fast", "exact")
RIGHT = [name for name in KINDS if name not in WRONG]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("group", range(GROUPS))
def test_kinds_that_are_right_stay_right(group: int) -> None:
    names = RIGHT[group::GROUPS]

    verdicts = run([Trial(name, NUMERICS[i % 2]) for i, name in enumerate(names)])

    assert {trial.name: str(v) for trial, v in verdicts.items() if v.problems} == {}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(reason=WRONG[name], strict=True)] if name in WRONG else [],
        )
        for name in KINDS
    ],
)
def test_a_kind_is_right_from_the_first_round_in_both_numerics(name: str) -> None:
    verdicts = run([Trial(name, numerics, rounds=3) for numerics in NUMERICS])

    assert [problem for verdict in verdicts.values() for problem in verdict.problems] == []


def test_the_table_names_kinds() -> None:
    assert WRONG.keys() - KINDS.keys() == set()


# A lone request on the user's own pipeline is what plain diffusers gives, whatever its callback


STEPS = 4


@dataclass(frozen=True)
class Operation:
    """Something that a callback does at one step."""

    step: int
    name: str
    value: float
    outer: bool  # on the user's pipeline, not on the callback's argument


READS: dict[str, Callable[[Any], Any]] = {
    "guidance": lambda pipe: getattr(pipe, "_guidance_scale", 0),
    "interrupt": lambda pipe: getattr(pipe, "_interrupt", False),
    "count": lambda pipe: getattr(pipe, "_num_timesteps", 0),
    "note": lambda pipe: getattr(pipe, "note", 0),
    "step index": lambda pipe: pipe.scheduler.step_index or 0,
    "timesteps": lambda pipe: len(pipe.scheduler.timesteps),
    "a sigma": lambda pipe: pipe.scheduler.sigmas[2],
    "shift": lambda pipe: pipe.scheduler.config.shift,
    "a mark of the scheduler": lambda pipe: getattr(pipe.scheduler, "mark", 0),
    "a mark of the net": lambda pipe: getattr(pipe.unet, "mark", 0),
}
WRITES: dict[str, Callable[[Any, float], object]] = {
    "guidance": lambda pipe, value: setattr(pipe, "_guidance_scale", value),
    "interrupt": lambda pipe, value: setattr(pipe, "_interrupt", value > 1),
    "note": lambda pipe, value: setattr(pipe, "note", value),
    "sigmas": lambda pipe, value: pipe.scheduler.sigmas.mul_(1 - value / 10),
    "a mark of the scheduler": lambda pipe, value: setattr(pipe.scheduler, "mark", value),
    "a mark of the net": lambda pipe, value: setattr(pipe.unet, "mark", value),
}


def callback(pipe: Any, program: list[Operation]) -> Callable[..., Any]:
    def on_step(own: Any, i: int, t: Any, kwargs: dict[str, Any]) -> Any:
        latents = kwargs["latents"]
        for operation in program:
            if operation.step != i:
                continue
            kind, _, name = operation.name.partition(" ")
            target = pipe if operation.outer else own
            if kind == "write":
                WRITES[name](target, operation.value)
            else:
                latents = latents * (1 + 0.1 * float(READS[name](target)))
        return {"latents": latents}

    return on_step


def programs(outer: st.SearchStrategy[bool]) -> st.SearchStrategy[list[Operation]]:
    names = [f"read {name}" for name in READS] + [f"write {name}" for name in WRITES]
    operation = st.builds(
        Operation, st.integers(0, STEPS - 1), st.sampled_from(names),
        st.sampled_from([0.0, 0.5, 2.0]), outer,
    )  # fmt: skip
    return st.lists(operation, min_size=1, max_size=6)


def check(program: list[Operation]) -> None:
    kind = Kind("", Custom)
    request = {**REQUESTS[0], "num_inference_steps": STEPS}
    judge = kind.build()[0]
    expected = plain(judge, lambda: {"callback_on_step_end": callback(judge, program)}, request)
    pipe = kind.build()[0]
    more = {"output_type": "pt", "callback_on_step_end": callback(pipe, program)}

    with carpool.load(pipe, device="cpu") as engine:
        answer = answered(submitted(engine, {**request, **more}), 40)

    assert compared(answer, expected, kind.close) == ""


@settings(max_examples=25)  # each loads an engine
@given(programs(st.just(False)))
def test_a_callback_may_do_anything_with_its_argument(program: list[Operation]) -> None:
    check(program)


@settings(max_examples=25)
@given(programs(st.booleans()))
def test_a_callback_may_do_anything_with_the_users_pipeline(program: list[Operation]) -> None:
    check(program)
