"""What all tests share: one thread, no network, the same examples at every run."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
from hypothesis import settings

from support import torchvision_cpu

gc.disable()  # until all is collected: nothing of what is imported is garbage
torchvision_cpu.install()

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers come first: of two processes, none is left alone with them."""
    starts = {"serving", "starting"}
    items.sort(key=lambda item: starts.isdisjoint(vars(getattr(item, "module", item))))


def pytest_collection_finish() -> None:
    """Collections of garbage do not look at what was imported: that is most of all there is."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_learned_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines begin without costs, and leave none in the user's cache folder."""
    if "carpool.engine.cost_store" in sys.modules:
        from carpool.engine.cost_store import Table

        monkeypatch.setattr(Table, "_default", lambda self: tmp_path / "costs.json")


@pytest.fixture
def fusing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are believed to take no longer for more rows, whatever a busy machine shows."""
    from carpool.schedule.cost import Costs, Curve

    flat = Curve({1: 1.0, 1024: 1.0})
    monkeypatch.setattr(Costs, "curve", lambda self, kind: flat)


@pytest.fixture(scope="module")
def fake_specs() -> Iterator[None]:
    """Give `Fake` and `Half` of `fake_models` specs, as model classes in `engine/specs` have."""
    from support import fake_models  # brings torch, which not every test needs

    with fake_models.fake_specs():
        yield
