"""Every kind of people's own code: four requests at once are what a fresh plain pipeline gives.

`make test` tries the kinds that are right today, in one numerics and one round each; `make
test-custom` tries all, in both numerics and three rounds, and `WRONG` says which must fail.
"""

import pytest

from support.custom.harness import Numerics, Trial, run
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
