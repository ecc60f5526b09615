"""Run a kind in a process of its own: four requests at once, one that fails, one that is cancelled.

Processes are forked from one that has imported everything. One that says nothing for a while is
killed: an engine that stands still costs its own test only. Each answer is compared with what a
fresh pipeline gives in another fork, where no class, global or file has been written before.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import carpool
import carpool.python.engine  # imported here, once, for all forks
from carpool.errors import CarpoolError
from support.custom.base import BROKEN, REQUESTS
from support.custom.judge import alone, compared, described
from support.custom.kinds import KINDS
from support.custom.switches import switches
from support.isolation import differences, state_of

PATIENCE_S = 20.0
CLOSE_S = 5.0  # that `close()` may take
TESTS = Path(__file__).parents[2]


@dataclass
class Verdict:
    """What was wrong with a kind; nothing: it is right, or was refused by name."""

    problems: list[str] = field(default_factory=list)
    refused: str = ""

    def __str__(self) -> str:
        return "; ".join(self.problems) or self.refused or "right"


Numerics = Literal["fast", "exact"]


@dataclass(frozen=True)
class Trial:
    """What is tried with a kind."""

    name: str
    numerics: Numerics
    rounds: int = 1


def run(trials: Sequence[Trial], patience_s: float = PATIENCE_S) -> dict[Trial, Verdict]:
    """Try kinds one after another in a fork; after one that is wrong, which may have left anything
    behind, in a new one.

    Args:
        patience_s: how long the process may say nothing before it counts as standing still.
    """
    verdicts: dict[Trial, Verdict] = {}
    while left := [trial for trial in trials if trial not in verdicts]:
        verdicts.update(_run_in_a_fork(left, patience_s))
    return verdicts


def _run_in_a_fork(trials: Sequence[Trial], patience_s: float) -> dict[Trial, Verdict]:
    """Verdicts of the first trials: of all, or up to the first one that is wrong."""
    verdicts = {trials[0]: Verdict()}
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = _CONTEXT.Process(target=_child, args=(trials, folder, theirs))
        with _paths_for_children():
            process.start()
        theirs.close()
        try:
            while True:
                verdict = verdicts[trials[len(verdicts) - 1]]
                if not ours.poll(patience_s):
                    verdict.problems.append(f"stands still for {patience_s:g} s")
                    break
                what, text = ours.recv()
                if what == "refused":
                    verdict.refused = text
                elif what == "problem":
                    verdict.problems.append(text)
                elif what == "end" and (verdict.problems or len(verdicts) == len(trials)):
                    break
                elif what == "end":
                    verdicts[trials[len(verdicts)]] = Verdict()
        except EOFError:
            output = (Path(folder) / "output").read_text(errors="replace")[-300:]
            verdict.problems.append(f"its process ended: {output}")
        finally:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
    return verdicts


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["support.custom.fork_server"])


@contextlib.contextmanager
def _paths_for_children() -> Iterator[None]:
    """The fork server does not get `sys.path`, only the environment that it is started in."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _child(trials: Sequence[Trial], folder: str, connection: Any) -> None:
    os.setpgid(0, 0)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    saying = threading.Lock()

    def say(what: str, text: str = "") -> None:
        with saying:
            connection.send((what, text))

    judges: dict[str, tuple[list[Any], set[str]]] = {}
    for trial in trials:  # before there are threads, with which no process is forked safely
        judges[trial.name] = judges.get(trial.name) or alone(KINDS[trial.name])
        say("judged")
    for trial in trials:
        own = tempfile.mkdtemp(dir=folder)  # nothing learned of another kind
        os.environ["XDG_CACHE_HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = own
        try:
            ride(trial, *judges[trial.name], say)
        except BaseException:  # whatever it is, it is the verdict
            say("problem", traceback.format_exc(limit=-3))
        say("end")
    os._exit(0)


def ride(trial: Trial, expected: list[Any], kept: set[str], say: Callable[..., None]) -> None:
    """Say what is wrong with a kind.

    Args:
        expected: what plain diffusers gives for each request.
        kept: the switches of the process that it leaves changed.
    """
    kind, numerics = KINDS[trial.name], trial.numerics
    pipe, arguments = kind.build()
    fresh, process = state_of(pipe), switches()
    try:
        engine = carpool.load(pipe, device="cpu", numerics=numerics)
    except CarpoolError as error:
        say("refused", f"{type(error).__name__}: {error}")
        return
    for turn in range(trial.rounds):
        for place, answer in enumerate(together(engine, arguments, say)):
            limit = 0.0 if numerics == "exact" else kind.close
            if problem := compared(answer, expected[place], limit):
                say("problem", f"{numerics} round {turn} request {place}: {problem}")
    began_s = time.monotonic()
    engine.close()
    if (took_s := time.monotonic() - began_s) > CLOSE_S:
        say("problem", f"close() took {took_s:.0f} s")
    if changed := sorted(differences(fresh, state_of(pipe))):
        say("problem", f"the pipeline keeps {', '.join(changed[:4])}")
    if changed := sorted({*differences(process, switches())} - kept):
        say("problem", f"the process keeps {', '.join(changed)}")


def together(engine: Any, arguments: Callable[[], dict[str, Any]], say: Any) -> list[Any]:
    """Answers of the four, with one that fails and one that is cancelled beside them."""
    first = REQUESTS[0]
    failing = {**first, "prompt": BROKEN, "seed": 77}
    long = {**first, "num_inference_steps": 12, "seed": 78}
    with engine._loop.together():
        handles = [
            submitted(engine, {**request, "output_type": "pt", **arguments()})
            for request in (*REQUESTS[:2], failing, long, *REQUESTS[2:])
        ]
    cancelled = handles.pop(3)
    for event in cancelled.events():
        if event.kind == "step" and event.step >= 1:
            cancelled.cancel()
    answers = []
    for handle in handles:
        answers.append(answered(handle))
        say("answer")
    answered(cancelled)
    wrong = answers.pop(2)
    if not (isinstance(wrong, CarpoolError) and "broken" in str(wrong)):
        say("problem", f"the failing request gave {described(wrong)}")
    return answers


def submitted(engine: Any, request: Mapping[str, Any]) -> Any:
    prompt, rest = request["prompt"], {k: v for k, v in request.items() if k != "prompt"}
    return engine.submit(carpool.Request(prompt, **rest))


def answered(handle: Any, timeout_s: float | None = None) -> Any:
    try:
        return handle.result(timeout_s).images
    except CarpoolError as error:
        return error
