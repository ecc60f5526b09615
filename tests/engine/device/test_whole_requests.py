"""Whole requests of every family on a pretended device: right, in place, and seldom waited for."""

import re
from pathlib import Path

import pytest

from carpool.models.grid import families
from support.pretended.process import on_pretended_device

PAGE = Path(__file__).parents[3] / "docs" / "devices.md"
NOT_YET = (  # of fewer steps than the measure takes, or in stages that it does not follow
    *("helios-mid-t2v", "helios-distilled-t2v", "hunyuan3d-2"),
    *("fastwan21-t2v", "turbowan21-t2v", "turbowan22-i2v-a14b"),
)
ROWS = [
    name
    for name in dict.fromkeys(name for family in families() for name in family.cases)
    if name not in NOT_YET
]
FIRST = {family.cases[0] for family in families() if family.cases}  # of each family
LONG = {"glm-t2i"}  # draws tokens one by one
MORE = {"flux2-edit"}  # puts constants together anew at every step


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (FIRST | MORE) - LONG else [pytest.mark.slow])
        for name in ROWS
    ],
)
@on_pretended_device
def test_a_request_waits_for_the_device_where_the_page_says_and_nowhere_else(name: str) -> None:
    from support.matrix import CASES  # the device is there by now
    from support.pretended.measure import measure, row

    [case] = [one for one in CASES if one.name == name]
    case.require()

    waits = measure(name)

    ours, _, _, _ = waits.by_owner(waits.per_step)
    assert ours == 0, f"the engine waits at every step: {waits.per_step}"
    if name not in FIRST:
        return
    known = re.findall(rf"^\| {re.escape(name)} \|.*$", PAGE.read_text(), re.MULTILINE)
    assert known == [row(name, waits)], "where requests wait has changed: `make devices`"
