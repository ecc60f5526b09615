"""`carpool check` times forwards: what it measures can be worked out by hand; others can use it."""

import functools
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.intercept import Interception
from carpool.engine.model.load import load
from carpool.errors import InvalidValue, PipelineFailed
from carpool.schedule.views import CallKind
from carpool_lab.check.command import check
from carpool_lab.check.requests import QUICK, mixed
from carpool_lab.check.results import ComponentTiming, TimingReport
from carpool_lab.check.timing import measure
from carpool_lab.simulate.command import simulate
from carpool_lab.tables import knee, read_tables
from support.engine_driver import VirtualClock, served

OLD_KIND = CallKind("transformer.forward", 7, "another size")
Seconds = Callable[[str, int], float]
"""What a forward takes, by component and rows."""


def even(component: str, rows: int) -> float:
    """Two rows take what one takes; beyond, each adds half of that."""
    return 1.0 if rows <= 2 else rows / 2


def timed(seconds: Seconds, folder: Path, *, family: str = "flux", steps: int = 1) -> TimingReport:
    """Time a family whose forwards take `seconds` of a virtual clock; costs are kept in a folder.

    The table knows of `OLD_KIND` before.
    """
    pipe, clock = served(family), VirtualClock()
    settings = EngineSettings(
        device="cpu", isolation="shared", cost_table=str(folder / "costs.json")
    )
    loaded = load(pipe, settings)
    table = StoredCosts(loaded, settings)
    for _ in range(3):
        table.costs.learn(OLD_KIND, 1, 9.0)
    parameters: dict[str, Any] = {"width": 32, "height": 32}
    parameters |= {"max_sequence_length": 48} if family == "flux" else {}
    request = mixed(loaded.card, replace(QUICK, steps=steps, parameters=parameters))[0]
    grads = torch.is_grad_enabled()
    with pytest.MonkeyPatch.context() as patch:
        for target in Interception(pipe.components).targets:
            if target.spec is not None:
                plain = getattr(target.module, target.method)
                slow = _slowed(plain, target.component, target.spec.rows, seconds, clock)
                patch.setitem(target.module.__dict__, target.method, slow)
        try:
            return measure(
                loaded, settings, request, max_rows=4, repeats=3, table=table, clock=clock
            )
        finally:
            torch.set_grad_enabled(grads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timing")


@pytest.fixture(scope="module")
def flux(folder: Path) -> TimingReport:
    """A request is one row."""
    return timed(even, folder, steps=2)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> TimingReport:
    """A request is two rows of the UNet: its guidance is batched."""
    return timed(even, tmp_path_factory.mktemp("timing"), family="sdxl")


def _slowed(
    original: Callable[..., Any], component: str, rows: str, seconds: Seconds, clock: VirtualClock
) -> Callable[..., Any]:
    signature, widths = inspect.signature(original), set[int]()

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        width = len(signature.bind(*args, **kwargs).arguments[rows])
        # The first is slow.
        clock.pass_by(seconds(component, width) + (width not in widths) * 100.0)
        widths.add(width)
        return original(*args, **kwargs)

    return method


def part(report: TimingReport, name: str) -> ComponentTiming:
    [match] = [part for part in report.components if part.kind.name == name]
    return match


def test_every_width_takes_what_its_forwards_took_without_the_first(flux: TimingReport) -> None:
    assert flux.size == (32, 32)
    assert [part.phase for part in flux.components] == ["encode", "encode", "denoise", "decode"]
    for component in flux.components:
        assert component.seconds == {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0}
        assert component.knee(0.05) == flux.knee == 2
        assert component.peak_bytes == {}  # a CPU does not tell
    assert part(flux, "transformer.forward").calls == flux.steps == 2


def test_what_was_learned_is_there_at_the_next_start_beside_what_was_known(
    flux: TimingReport, folder: Path
) -> None:
    settings = EngineSettings(
        device="cpu", isolation="shared", cost_table=str(folder / "costs.json")
    )

    costs = dict(StoredCosts(load(served("flux"), settings), settings).costs)

    for component in flux.components:
        assert costs[component.kind].measured == component.seconds
    assert costs[OLD_KIND].measured == pytest.approx({1: 9.0}, rel=1e-3)


def test_a_request_of_two_rows_is_measured_at_even_widths(sdxl: TimingReport) -> None:
    unet = part(sdxl, "unet.forward")
    assert (unet.rows, unet.seconds) == (2, {2: 1.0, 4: 2.0})
    assert sdxl.step_s() == {1: 1.0, 2: 2.0}
    assert (unet.knee(0.05), sdxl.knee) == (2, 1)


@pytest.mark.parametrize(
    ("component", "method", "widths"),
    [("transformer", "forward", [1, 2]), ("vae", "decode", [1, 2, 3, 4])],
)
def test_a_width_that_does_not_fit_is_named_and_that_of_a_step_ends_the_search(
    component: str, method: str, widths: list[int], tmp_path: Path
) -> None:
    def little_memory(name: str, rows: int) -> float:
        if name == component and rows > 2:
            raise torch.OutOfMemoryError
        return 1.0

    report = timed(little_memory, tmp_path)

    assert part(report, f"{component}.{method}").too_wide == 3
    assert list(part(report, "transformer.forward").seconds) == widths


def test_a_request_that_does_not_fit_alone_is_the_problem_of_the_report(tmp_path: Path) -> None:
    runs = itertools.count()

    def little_memory(component: str, rows: int) -> float:
        if component == "transformer" and next(runs) < 2:  # again, when what was cached is freed
            raise torch.OutOfMemoryError
        return 1.0

    report = timed(little_memory, tmp_path)

    assert "ran out of device memory with this request alone" in report.problem
    assert report.as_json()["tables"] == []


def test_any_other_failure_ends_it_and_what_was_known_is_kept(tmp_path: Path) -> None:
    def broken(component: str, rows: int) -> float:
        raise ZeroDivisionError

    with pytest.raises(PipelineFailed, match="ZeroDivisionError"):
        timed(broken, tmp_path)

    assert OLD_KIND.detail in (tmp_path / "costs.json").read_text()


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 4.0}, 1),  # rows gain nothing
        ({1: 1.0, 2: 1.0, 4: 1.0}, 4),  # rows are free
        ({1: 1.0, 2: 1.0, 4: 1.9}, 2),  # 2.5 % a row
        ({1: 1.0, 2: 2.1, 4: 2.1}, 4),  # two do not pay, four do
    ],
)
def test_the_knee_is_the_widest_whose_rows_each_gain_enough(
    seconds: dict[int, float], rows: int
) -> None:
    assert knee(seconds, 0.05) == rows


def test_the_simulator_plays_what_was_timed(flux: TimingReport, tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    path.write_text(json.dumps(flux.as_json()))

    for flag in ("--table", "--costs"):
        arguments = [flag, str(path), "--num-prompts", "20", "--mode", "off", "--json"]
        result = CliRunner().invoke(simulate, arguments)

        assert result.exit_code == 0, result.output
        solo = {request["solo_s"] for request in json.loads(result.output)["requests"]}
        assert solo == {2.0 + 28.0 + 1.0}  # two encoders, steps, a decode


def test_a_table_has_seconds_by_requests_not_by_rows(sdxl: TimingReport) -> None:
    [table] = read_tables(sdxl.as_json())

    assert (table.name, table.side_px, table.steps) == ("StableDiffusionXLPipeline-32", 32, 50)
    assert table.denoise_s == {1: 1.0, 2: 2.0}


TABLE = {"name": "x", "steps": 4, "denoise_s": {"1": 1.0}, "encode_s": 0.0, "decode_s": 0.0}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "Object missing required field `tables`"),
        ({"tables": [3]}, r"Expected `object`, got `int` - at `\$.tables\[0\]`"),
        ({"tables": [{"name": "x"}]}, "Object missing required field `steps`"),
        ({"tables": [{**TABLE, "steps": 0}]}, "Expected `int` >= 1"),
        ({"tables": [{**TABLE, "denoise_s": {"0": 1.0}}]}, "Expected `int` >= 1"),
        ({"tables": [{**TABLE, "denoise_s": {"1": -1.0}}]}, "Expected `float` >= 0.0"),
    ],
)
def test_a_file_that_is_something_else_is_refused(data: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(data))

    with pytest.raises(InvalidValue, match="is not a file of `carpool check --json` or.*" + told):
        read_tables(data)
    result = CliRunner().invoke(simulate, ["--table", str(path)])
    assert (result.exit_code, f"--table {path}: is not a file" in result.output) == (2, True)


@pytest.mark.parametrize("tables", [[], [TABLE, {**TABLE, "denoise_s": {"2": 1.0}}]])
def test_a_file_without_costs_of_one_request_is_refused(tables: Any) -> None:
    assert read_tables({"tables": [TABLE]})[0].denoise_s == {1: 1.0}
    with pytest.raises(InvalidValue, match="has no table of one request"):
        read_tables({"tables": tables})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_wider_forward_is_told_to_need_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    CliRunner().invoke(check, ["--max-rows", "8", "--device", "cuda", "--json", str(path)])

    [size] = json.loads(path.read_text())["sizes"]
    for component in size["components"]:
        peaks = {int(rows): peak for rows, peak in component["peak_bytes"].items()}
        assert peaks.keys() == {int(rows) for rows in component["seconds"]} == {1, 2, 3, 4, 6, 8}
        assert peaks[8] > peaks[1]
