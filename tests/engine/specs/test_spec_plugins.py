"""Tables that packages add by entry points fuse calls, or say why not; nothing else breaks."""

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import Tensor, nn

from carpool.engine.fuse import Fuser
from carpool.engine.specs import SPECS, STACK, Pad, Spec, plugins
from support.fake_models import call_on

PADS = Pad(mask="mask")
TABLES = {("Reader", "forward"): Spec(rows="x", rules={"x": STACK, "text": PADS, "mask": PADS})}
KNOWN = {("CLIPTextModel", "forward"): Spec(rows="nothing", rules={})}
NAMED_ONLY = {"Reader": TABLES["Reader", "forward"]}


class Reader(nn.Module):
    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        return x + (text * mask).sum(dim=1, keepdim=True)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install entry points: names of this module's attributes."""

    def these(*values: str) -> None:
        plugins.added_specs.cache_clear()
        found = [EntryPoint(f"e{i}", one, plugins.GROUP) for i, one in enumerate(values)]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)

    yield these
    plugins.added_specs.cache_clear()


def one(length: int) -> dict[str, Tensor]:
    ones = torch.ones(1, length)
    return {"x": torch.full((1, 1), float(length)), "text": 2 * ones, "mask": ones}


def test_a_table_of_another_package_pads_texts_of_different_lengths(install: Install) -> None:
    install(f"{__name__}:TABLES")
    fuser, calls = Fuser(), [call_on(Reader(), **one(length)) for length in (2, 5)]

    described = [fuser.describe(call) for call in calls]
    answers = fuser.run(calls, [rows for _, rows in described])

    assert described[0][0] == described[1][0]
    assert [answer.item() for answer in answers] == [2 + 4, 5 + 10]


def test_carpools_own_table_stays(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(f"{__name__}:KNOWN", f"{__name__}:TABLES", f"{__name__}:TABLES")

    assert plugins.spec_of("CLIPTextModel", "forward") is SPECS["CLIPTextModel", "forward"]
    assert plugins.spec_of("Reader", "forward") is TABLES["Reader", "forward"]
    assert [record.message.partition(" has")[2] for record in caplog.records] == [
        " a table for CLIPTextModel.forward, which is known already",
        " a table for Reader.forward, which is known already",
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere_to_be_found:TABLES", "ModuleNotFoundError: No module named"),
        (f"{__name__}:MISSING", "AttributeError: module"),
        (f"{__name__}:PADS", "it is not a dict {(class name, method): Spec}"),
        (f"{__name__}:NAMED_ONLY", "it is not a dict {(class name, method): Spec}"),
    ],
)
def test_tables_that_cannot_be_used_say_why_and_take_no_others_along(
    value: str, reason: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(value, f"{__name__}:TABLES")

    with caplog.at_level(logging.WARNING, "carpool"):
        assert plugins.spec_of("Reader", "forward") is TABLES["Reader", "forward"]

    [record] = caplog.records
    assert f"(entry point 'e0' of carpool.specs) are not used: {reason}" in record.message
