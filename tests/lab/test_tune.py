"""`carpool tune`: what it measures can be worked out by hand, and others can use what it writes."""

import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.intercept import Interception
from carpool.engine.model.load import load
from carpool.errors import InvalidValue, PipelineFailed, SizeRejected
from carpool.schedule.views import CallKind
from carpool.settings.peers.sglang_rules import Caps, caps, load_rules
from carpool_lab.simulate.command import simulate
from carpool_lab.tune.command import tune as command
from carpool_lab.tune.measure import TuneSettings, tune
from carpool_lab.tune.plot import draw_curves
from carpool_lab.tune.results import ComponentResult, SizeResult, TuneReport, knee, tables
from support.engine_driver import VirtualClock, driving, served
from support.tiny import checkpoint

PNG = b"\x89PNG"
SIZES = [(32, 32), (64, 32)]
KNOWN = CallKind("transformer.forward", 7, "another size")
Seconds = Callable[[str, int], float]
"""What a forward takes, by component and rows."""


def even(component: str, rows: int) -> float:
    """Two rows take what one takes; beyond, each adds half of that."""
    return 1.0 if rows <= 2 else rows / 2


def measure(
    seconds: Seconds,
    folder: Path,
    *,
    family: str = "flux",
    sizes: Sequence[tuple[int, int]] = SIZES[:1],
    steps: int = 1,
) -> TuneReport:
    """Tune a family whose forwards take `seconds` of a virtual clock; costs are kept in a folder.

    The table knows of `KNOWN` before.
    """
    pipe, clock = served(family), VirtualClock()
    settings = EngineSettings(
        device="cpu", isolation="shared", cost_table=str(folder / "costs.json")
    )
    loaded = load(pipe, settings)
    table = StoredCosts(loaded, settings)
    for _ in range(3):
        table.costs.learn(KNOWN, 1, 9.0)
    parameters = {"max_sequence_length": 48} if family == "flux" else {}
    wanted = TuneSettings(sizes, max_rows=4, repeats=3, steps=steps, parameters=parameters)
    grads = torch.is_grad_enabled()
    with pytest.MonkeyPatch.context() as patch:
        for target in Interception(pipe.components).targets:
            if target.spec is not None:
                plain = getattr(target.module, target.method)
                new = _timed(plain, target.component, target.spec.rows, seconds, clock)
                patch.setitem(target.module.__dict__, target.method, new)
        try:
            return tune(loaded, settings, wanted, table=table, clock=clock)
        finally:
            torch.set_grad_enabled(grads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def flux(folder: Path) -> TuneReport:
    """A request is one row."""
    return measure(even, folder, sizes=SIZES, steps=2)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> TuneReport:
    """A request is two rows of the UNet: its guidance is batched."""
    return measure(even, tmp_path_factory.mktemp("tune"), family="sdxl")


def _timed(
    original: Callable[..., Any], component: str, rows: str, seconds: Seconds, clock: VirtualClock
) -> Callable[..., Any]:
    signature, seen = inspect.signature(original), set[int]()

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        width = len(signature.bind(*args, **kwargs).arguments[rows])
        clock.pass_by(seconds(component, width) + (width not in seen) * 100.0)  # the first is slow
        seen.add(width)
        return original(*args, **kwargs)

    return method


def part(size: SizeResult, name: str) -> ComponentResult:
    [one] = [one for one in size.components if one.kind.name == name]
    return one


# What is measured


def test_every_width_takes_what_its_forwards_took_without_the_first(flux: TuneReport) -> None:
    assert [size.resolution for size in flux.sizes] == SIZES
    for size in flux.sizes:
        assert [one.phase for one in size.components] == ["encode", "encode", "denoise", "decode"]
        for one in size.components:
            assert one.seconds == {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0}
            assert one.knee(0.05) == size.most(0.05) == 2
            assert one.peak_bytes == {}  # a CPU does not tell
        assert part(size, "transformer.forward").calls == size.steps == 2


def test_what_was_learned_is_there_at_the_next_start_beside_what_was_known(
    flux: TuneReport, folder: Path
) -> None:
    settings = EngineSettings(
        device="cpu", isolation="shared", cost_table=str(folder / "costs.json")
    )

    kept = dict(StoredCosts(load(served("flux"), settings), settings).costs)

    for size in flux.sizes:
        for one in size.components:
            assert kept[one.kind].measured == one.seconds
    assert kept[KNOWN].measured == pytest.approx({1: 9.0}, rel=1e-3)


def test_a_request_of_two_rows_is_measured_at_even_widths(sdxl: TuneReport) -> None:
    [size] = sdxl.sizes

    unet = part(size, "unet.forward")
    assert (unet.rows, unet.seconds) == (2, {2: 1.0, 4: 2.0})
    assert size.step_s() == {1: 1.0, 2: 2.0}
    assert (unet.knee(0.05), size.most(0.05)) == (2, 1)


def test_a_width_that_does_not_fit_ends_the_search_and_is_named(tmp_path: Path) -> None:
    def little_memory(component: str, rows: int) -> float:
        if component == "transformer" and rows > 2:
            raise torch.OutOfMemoryError
        return 1.0

    tuned = measure(little_memory, tmp_path)

    transformer = part(tuned.sizes[0], "transformer.forward")
    assert transformer.too_wide == 3
    assert list(transformer.seconds) == [1, 2]
    rule, _ = tuned.batching_config()["rules"]
    assert (rule["max_batch_size"], rule["calibration"]["did_not_fit"]) == (2, 3)
    draw_curves(tuned, tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(PNG)


def test_a_decode_that_does_not_fit_does_not_keep_steps_from_being_measured(
    tmp_path: Path,
) -> None:
    def little_memory(component: str, rows: int) -> float:
        if component == "vae" and rows > 2:
            raise torch.OutOfMemoryError
        return 1.0

    [size] = measure(little_memory, tmp_path).sizes

    assert part(size, "vae.decode").too_wide == 3
    assert list(part(size, "transformer.forward").seconds) == [1, 2, 3, 4]


def test_a_size_that_does_not_fit_even_alone_is_reported_and_others_are_measured(
    tmp_path: Path,
) -> None:
    runs = itertools.count()

    def little_memory_at_first(component: str, rows: int) -> float:
        if component == "transformer" and next(runs) < 2:  # again, when what was cached is freed
            raise torch.OutOfMemoryError
        return 1.0

    tuned = measure(little_memory_at_first, tmp_path, sizes=SIZES)

    broken, whole = tuned.sizes
    assert "ran out of device memory with this request alone" in broken.problem
    assert whole.most(0.05) == 4
    assert [one["name"] for one in tuned.as_json()["tables"]] == ["FluxPipeline-64x32"]
    assert [rule["max_batch_size"] for rule in tuned.batching_config()["rules"]] == [1, 4, 4]


def test_any_other_failure_ends_it_and_what_was_known_is_kept(tmp_path: Path) -> None:
    def broken(component: str, rows: int) -> float:
        raise ZeroDivisionError

    with pytest.raises(PipelineFailed, match="ZeroDivisionError"):
        measure(broken, tmp_path)

    assert KNOWN.detail in (tmp_path / "costs.json").read_text()


def test_a_size_that_no_request_may_have_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def never(component: str, rows: int) -> float:
        raise AssertionError("it ran")

    with pytest.raises(SizeRejected, match="nearest size is 4x64"):
        measure(never, tmp_path, sizes=[(64, 64), (3, 64)])


# What is made of it


@pytest.mark.parametrize(
    ("seconds", "widest"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 4.0}, 1),  # rows gain nothing
        ({1: 1.0, 2: 1.0, 4: 1.0}, 4),  # rows are free
        ({1: 1.0, 2: 1.0, 4: 1.9}, 2),  # 2.5 % a row
        ({1: 1.0, 2: 2.1, 4: 2.1}, 4),  # two do not pay, four do
    ],
)
def test_the_knee_is_the_widest_whose_rows_each_gain_enough(
    seconds: dict[int, float], widest: int
) -> None:
    assert knee(seconds, 0.05) == widest


def test_the_batching_config_caps_sizes_at_their_knees_and_others_by_cost(
    flux: TuneReport, tmp_path: Path
) -> None:
    path = tmp_path / "batching.json"
    path.write_text(json.dumps(flux.batching_config()))
    server = load(served("flux"), EngineSettings(device="cpu")).server

    rules = load_rules(path)

    widest = 2 * flux.sizes[1].cost
    for size in [*SIZES, (512, 512)]:
        assert caps(rules, server, size, user_max=16) == Caps(outputs=2, cost=widest)


def test_a_server_in_dynamic_mode_starts_with_the_batching_config(
    flux: TuneReport, tmp_path: Path
) -> None:
    path = tmp_path / "batching.json"
    path.write_text(json.dumps(flux.batching_config()))

    with driving("flux", mode="dynamic", batching_max_size=16, batching_config=str(path)) as drive:
        drawn = [drive.submit(width=32, height=32, num_inference_steps=1) for _ in range(3)]
        drive.finish()

    assert all(one.error is None for one in drawn)
    assert drive.widths("transformer") == [2, 1]  # the knee, not sixteen


def test_the_simulator_plays_what_was_tuned(flux: TuneReport, tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_text(json.dumps(flux.as_json()))

    for flag in ("--table", "--costs"):
        arguments = [flag, str(path), "--num-prompts", "20", "--mode", "off", "--json"]
        done = CliRunner().invoke(simulate, arguments)

        assert done.exit_code == 0, done.output
        solo = {one["solo_s"] for one in json.loads(done.output)["requests"]}
        assert solo == {2.0 + 28.0 + 1.0}  # two encoders, steps, a decode


def test_a_table_has_seconds_by_requests_not_by_rows(sdxl: TuneReport) -> None:
    [found] = tables(sdxl.as_json())

    assert (found.name, found.side_px, found.steps) == ("StableDiffusionXLPipeline-32", 32, 50)
    assert found.denoise_s == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("data", [[], {}, {"tables": [{"name": "x"}]}, {"tables": [3]}, 7])
def test_a_file_that_is_something_else_is_refused(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(data))

    with pytest.raises(InvalidValue, match="is not what `carpool tune` writes"):
        tables(data)
    done = CliRunner().invoke(simulate, ["--table", str(path)])
    assert (done.exit_code, f"--table {path}: is not what" in done.output) == (2, True)


# The command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_the_speed_factor_is_seconds_now_over_those_of_the_table_before(tmp_path: Path) -> None:
    first = measure(even, tmp_path)
    second = measure(lambda component, rows: 2.5 * even(component, rows), tmp_path)

    assert first.speed_factor == 1.0  # nothing to compare with
    assert second.speed_factor == pytest.approx(2.5)
    assert second.as_json()["speed_factor"] == second.speed_factor


def test_the_command_writes_a_picture_rules_and_everything_and_says_where(tmp_path: Path) -> None:
    model = checkpoint("sd15")

    done = run(model, "--sizes", "64x64,128x64", "--max-rows", 4, "--repeats", 3, "--steps", 2,
               "--device", "cpu", "--output", tmp_path)  # fmt: skip

    assert done.exit_code == 0, done.output
    picture, everything, rules = (
        tmp_path / f"{model.name}-{name}" for name in ("tune.png", "tune.json", "batching.json")
    )
    assert picture.read_bytes().startswith(PNG)
    assert load_rules(rules)[0].model == str(model)
    assert [one["size"] for one in json.loads(everything.read_text())["sizes"]] == [
        "64x64",
        "128x64",
    ]
    for path in (picture, everything, rules, tmp_path / "costs.json"):
        assert str(path) in done.output
    saved = json.loads(everything.read_text())
    for part in saved["sizes"][0]["components"]:
        assert part["sd"].keys() == part["seconds"].keys()
        assert all(0 <= sd < part["seconds"][rows] for rows, sd in part["sd"].items())
        assert all(runs >= 2 for runs in part["tries"].values())  # the first of 3 is cold
    assert any(sd > 0 for part in saved["sizes"][0]["components"] for sd in part["sd"].values())
    assert saved["speed_factor"] == 1.0
    assert "speed factor" in done.output
    assert "| sd (ms) | runs |" in done.output
    assert done.output.count("| unet.forward") == 4  # 2 and 4 rows of each size
    assert "text_encoder.forward 77: as for 64x64" in done.output


def test_the_json_of_the_command_is_what_it_saves_and_there_is_no_picture_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "carpool_lab.tune.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    done = run(checkpoint("sd15"), "--max-rows", 1, "--repeats", 3, "--steps", 1, "--json",
               "--sizes", "64x64", "--device", "cpu", "--output", tmp_path)  # fmt: skip

    [saved] = tmp_path.glob("*-tune.json")
    assert done.stdout == saved.read_text()
    assert saved.name in done.stderr
    assert "needs matplotlib" in done.stderr
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("size", ["64", "64x", "x64", "0x64", "64x64,", "64 x 64"])
def test_a_size_that_is_none_is_a_usage_error(size: str) -> None:
    done = run("--sizes", size)

    assert done.exit_code == 2
    assert "write WIDTHxHEIGHT" in done.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_a_wider_forward_is_told_to_need_more_memory(tmp_path: Path) -> None:
    done = run("--max-rows", 8, "--device", "cuda", "--output", tmp_path, "--json")

    [size] = json.loads(done.stdout)["sizes"]
    for one in size["components"]:
        peaks = {int(rows): peak for rows, peak in one["peak_bytes"].items()}
        assert peaks.keys() == {int(rows) for rows in one["seconds"]} == {1, 2, 3, 4, 6, 8}
        assert peaks[8] > peaks[1]
