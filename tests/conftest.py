"""What all tests share: one thread, no network, the same examples at every run."""

import asyncio
import gc
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
from hypothesis import settings

from support import torchvision_cpu

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

LONG = ("tests/engine/device/", "tests/lab/test_routing.py", "tests/training/")
PRETENDED = ("tests/engine/device/",)
NUMBERS = itertools.count()  # of the tests of this process

gc.disable()  # until all is collected: nothing of what is imported is garbage
torchvision_cpu.install()

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers come first, then other long ones: no process is left alone with
    them."""
    starts = {"serving", "starting"}

    def is_short(item: pytest.Item) -> tuple[bool, bool]:
        starts_none = starts.isdisjoint(vars(getattr(item, "module", item)))
        return starts_none, not item.nodeid.startswith(LONG)

    items.sort(key=is_short)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape half characters in what a test has logged: processes of tests send it as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def played() -> None:
        await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        for _ in range(20):  # transports are closed in a later turn of the loop
            await asyncio.sleep(0)

    asyncio.run(played())
    return True


@pytest.fixture(autouse=True)
def _unmuted_log() -> None:
    """Each test begins with a log that no test before it has muted, in whatever way."""
    root, logger = logging.getLogger(), logging.getLogger("carpool")
    logging.disable(logging.NOTSET)
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.NOTSET)
    logger.disabled, logger.propagate = False, True
    for filterer in (root, logger, *root.handlers):
        filterer.filters.clear()
    for handler in root.handlers:  # an engine quietens those of diffusers, caplog's among them once
        handler.setLevel(logging.NOTSET)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling | None":
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        """Each file in one process; those with the pretended device in the same, which starts it
        once."""

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "a pretended device" if file.startswith(PRETENDED) else file

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Collections of garbage do not look at what was imported: that is most of all there is.

    They are rare, too: models that tests keep are many objects, and each collection walks them all.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_learned_before(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines begin without costs, and leave none in the user's cache folder.

    The file has a folder with others: to make a folder for each test, pytest lists all before it.
    """
    if "carpool.engine.cost_store" in sys.modules:
        from carpool.engine.cost_store import StoredCosts

        file = tmp_path_factory.getbasetemp() / f"costs-{next(NUMBERS)}.json"
        monkeypatch.setattr(StoredCosts, "_default", lambda self: file)


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
