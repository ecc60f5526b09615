"""Run tests in a process that has the pretended device.

The device cannot be taken out of a process again, and other tests are to see the machine as it is.
So a function under `@on_pretended_device` runs in a second process, one for each process of
pytest, which is started by the first such test and ends with it.
"""

import atexit
import contextlib
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

_MARK = "CARPOOL_ON_PRETENDED_DEVICE"
_TESTS = Path(__file__).parents[2]

Test = TypeVar("Test", bound=Callable[..., None])


def on_pretended_device(test: Test) -> Test:
    """Run a test there. Its arguments are parameters that JSON can say, and no fixtures."""
    if _MARK in os.environ:
        return test

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        file = sys.modules[test.__module__].__file__
        answer = _child().ask({"file": file, "test": test.__name__, "arguments": arguments})
        if "skipped" in answer:
            pytest.skip(answer["skipped"])
        if "failed" in answer:
            pytest.fail(answer["failed"], pytrace=False)

    return run  # type: ignore[return-value]


class _Child:
    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        path = os.pathsep.join([str(_TESTS), str(_TESTS.parent), str(_TESTS.parent / "docs")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.pretended.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, _MARK: "1", "PYTHONPATH": path},
        )  # fmt: skip
        atexit.register(self.end)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BaseException:  # such as pytest's timeout: it may be in the middle of something
            self.end()
            raise
        if not line:
            self._log.seek(0)
            said = self._log.read()[-2000:]
            self.end()
            return {"failed": f"the process of the pretended device has died; it said: {said}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        _child.cache_clear()  # the next test gets a new one
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


@functools.cache
def _child() -> _Child:
    return _Child()


def main() -> None:
    """Answer questions, a line each, until the parent has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no answer
    gc.disable()  # and rare below, as in tests/conftest.py
    from support import torchvision_cpu

    torchvision_cpu.install()
    from support.pretended import device

    device.install()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # engines begin without costs
        _serve(sys.stdin, answers)


def _serve(questions: IO[str], answers: IO[str]) -> None:
    for line in questions:
        print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


def _answer(file: str, test: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from support.pretended.order import LACKS, MEMORY, Order
    from support.pretended.report import REPORT

    LACKS.clear()
    Order.races.clear()
    REPORT.clear()
    MEMORY.limit = 80 * 2**30
    try:
        getattr(_module(file), test)(**arguments)
        assert not Order.races, Order.races
        assert not REPORT.mismatches, REPORT.mismatches
    except pytest.skip.Exception as skipped:
        return {"skipped": str(skipped)}
    except BaseException:
        return {"failed": traceback.format_exc()}
    return {}


@functools.cache
def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"pretended_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
