"""`carpool check`: what is wrong is found and named, and what is right is said to be."""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from diffusers import UNet2DConditionModel

from carpool.config import EngineSettings
from carpool.engine.cost_store import StoredCosts
from carpool.engine.model.device import Device
from carpool.engine.model.load import load
from carpool.errors import MissingParameter
from carpool.request.card import Parameter, Task
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from carpool_lab.check.command import check
from carpool_lab.check.report import CheckReport
from carpool_lab.check.requests import QUICK, CheckOptions, mixed
from carpool_lab.check.results import ComponentTiming, TimingReport
from carpool_lab.check.run import Method, PlainComparison, Proof, limit, prove
from carpool_lab.check.watch import ObservedCalls, allocated, apart
from support.engine_driver import served
from support.tiny import checkpoint

NUMERICS = Path(__file__).parents[2] / "docs" / "numerics.md"
CPU = EngineSettings(device="cpu")


@pytest.fixture(autouse=True)
def modes_of_torch() -> Iterator[None]:
    """An engine's thread stays without gradients, and here that is the test's."""
    grads = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(grads)


def run(tmp_path: Path, model: object, *arguments: object) -> Result:
    fixed = ["--device", "cpu", "--cost-table", tmp_path / "costs.json", "--json", tmp_path / "out"]
    return CliRunner().invoke(check, list(map(str, [model, "--quick", *fixed, *arguments])))


def found(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "out").read_text())


def components(report: Any, mode: str) -> dict[str, Any]:
    return {one["name"]: one for one in report["numerics"][mode]["components"]}


# The command


@pytest.mark.parametrize(
    ("model", "limit_"),
    [("shapes", 2e-5), pytest.param("shapes-video", 1e-4, marks=pytest.mark.slow)],
)
def test_an_embedded_model_is_right_in_both_numerics_and_the_last_line_says_what_to_set(
    model: str, limit_: float, tmp_path: Path
) -> None:
    done = run(tmp_path, model, "--max-rows", 2, "--steps", 2)

    assert done.exit_code == 0, done.output
    report = found(tmp_path)
    assert report["limit"] == limit_
    assert report["problems"] == []
    assert report["numerics"]["fast"]["largest_difference"] <= limit_
    assert report["numerics"]["exact"]["largest_difference"] == 0
    assert report["plain"] == {"largest_difference": 0, "why_not": None}
    for mode in ("fast", "exact"):
        for name, one in components(report, mode).items():
            if name.startswith("prompt_rewriter"):  # no request asked for it
                continue
            assert (one["fuses"], one["how"]) == (True, "table")
            assert one["widest_requests"] > 1
    step = components(report, "fast")["transformer.forward"]
    assert step["row_bytes"] > 0
    [size] = report["sizes"]
    assert {one["phase"] for one in size["components"]} == {"encode", "denoise", "decode"}
    last = done.stdout.rstrip().splitlines()[-1]
    assert last == report["set"]["sentence"]
    assert last.startswith(f"Set `--max-batch-size {report['set']['max_batch_size']} --numerics ")


@pytest.fixture
def unet(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], Path]:
    """A tiny checkpoint; its UNet is given what a function makes of its input."""

    def changed(change: Callable[[Any], Any]) -> Path:
        original = UNet2DConditionModel.forward

        def forward(self: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, change(sample), *args, **kwargs)

        forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
        return checkpoint("sd15")

    return changed


def test_a_model_that_mixes_requests_fails_the_check_and_exact_is_advised(
    unet: Callable[[Callable[[Any], Any]], Path], tmp_path: Path
) -> None:
    model = unet(lambda x: x + 0.1 * x.mean(0, keepdim=True) if len(x) > 2 else x)

    done = run(tmp_path, model, "--size", "64x64", "--max-rows", 2, "--steps", 2)

    assert done.exit_code == 1, done.output
    report = found(tmp_path)
    [problem] = report["problems"]
    assert problem.startswith("fast: ")
    assert f"LARGER THAN ALLOWED: {problem}" in done.stdout
    assert components(report, "fast")["unet.forward"]["largest_difference"] > 1e-3
    exact = components(report, "exact")["unet.forward"]
    assert (exact["fuses"], exact["how"]) == (False, "alone")
    assert "differs by up to" in exact["why"]
    assert "--numerics exact`: in fast numerics answers differ" in done.stdout


def test_a_width_that_does_not_fit_the_memory_is_the_limit(
    unet: Callable[[Callable[[Any], Any]], Path], tmp_path: Path
) -> None:
    def little_memory(x: Any) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError("so says the test")
        return x

    done = run(tmp_path, unet(little_memory), "--size", "64x64", "--steps", 2)

    assert done.exit_code == 0, done.output
    assert "unet.forward: 4 rows did not fit the memory" in done.stdout
    assert "did not fit: the limit" in done.stdout
    assert found(tmp_path)["set"]["max_batch_size"] == 2


def test_a_request_that_does_not_fit_alone_ends_the_check(
    unet: Callable[[Callable[[Any], Any]], Path], tmp_path: Path
) -> None:
    def no_memory(x: Any) -> Any:
        raise torch.OutOfMemoryError("so says the test")

    done = run(tmp_path, unet(no_memory), "--size", "64x64")

    assert done.exit_code == 1
    assert "seed=0" in str(done.exception)
    assert "failed alone: unet.forward ran out of device memory" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_denoiser_without_a_table_is_said_to_fuse_after_proof(tmp_path: Path) -> None:
    said = ["max_sequence_length=24", "use_resolution_binning=false", "clean_caption=false"]
    flags = [word for one in said for word in ("-p", one)]

    done = run(tmp_path, checkpoint("pixart"), "--size", "64x64", "--max-rows", 2, *flags)

    assert done.exit_code == 0, done.output
    step = components(found(tmp_path), "fast")["transformer.forward"]
    assert (step["fuses"], step["how"]) == (True, "proven")
    done = run(tmp_path, checkpoint("pixart"), "--size", "64x64", "--no-infer-specs", *flags)
    step = components(found(tmp_path), "fast")["transformer.forward"]
    assert (step["fuses"], step["how"]) == (False, "alone")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nosuch"], 1, "no model at 'nosuch'"),
        (["shapes", "--size", "8x64"], 1, "the nearest size is 16x64"),
        (["shapes", "--size", "64"], 2, "write WIDTHxHEIGHT"),
        (["shapes", "--json", "no/such/folder.json"], 2, "there is no folder no/such"),
        (["shapes", "-p", "colour=1"], 1, "has no parameter 'colour'"),
        (["shapes", "-p", "seed=1"], 2, "use --seed"),
        (["shapes", "--context-parallel", "2"], 2, "`carpool check` measures one process"),
    ],
)
def test_what_cannot_be_checked_is_said_at_once(
    arguments: list[str], status: int, message: str
) -> None:
    done = CliRunner().invoke(check, [*arguments, "--device", "cpu"])

    assert (done.exit_code, message in f"{done.output}{done.exception}") == (status, True)


def test_an_interrupted_check_gives_the_modules_and_the_costs_back(tmp_path: Path) -> None:
    settings = replace(CPU, cost_table=str(tmp_path / "costs.json"))
    loaded = load(served("sd15"), settings)
    table = StoredCosts(loaded, settings)
    costs, jobs = table.costs, mixed(loaded.card, QUICK)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prove(loaded, settings, jobs, table=table, tick=interrupt)

    assert table.costs is costs
    left = {"forward", "_compiled_call_impl"}
    assert not any(left & vars(module).keys() for module in loaded.modules.values())


# The requests


def test_requests_differ_in_steps_guidance_seed_and_prompt() -> None:
    card = load(served("sd15"), CPU).card

    jobs = mixed(card, CheckOptions(parameters={"width": 64, "height": 64}))

    assert len({job.seed for job in jobs}) == len({job.arguments["prompt"] for job in jobs}) == 6
    assert {job.arguments["num_inference_steps"] for job in jobs} == {5, 4}
    assert {job.arguments.get("guidance_scale") for job in jobs} == {None, 1.0, 5.875}


def test_a_distilled_model_gets_the_steps_that_it_was_made_for() -> None:
    card = load(served("sd15"), CPU).card
    few = replace(card, defaults={**card.defaults, "num_inference_steps": 4})

    assert {job.arguments["num_inference_steps"] for job in mixed(few, CheckOptions())} == {4}


def test_a_model_that_needs_a_picture_says_how_to_give_one() -> None:
    parameters = (Parameter("image", "other", required=True), Parameter("prompt", "str"))
    task = Task("image-to-image", "EditPipeline", parameters)
    card = replace(load(served("sd15"), CPU).card, tasks=(task,))

    with pytest.raises(MissingParameter, match=r"image is missing.*--image FILE"):
        mixed(card, QUICK)


# What is measured


def test_the_largest_difference_is_that_of_any_number_and_infinite_where_shapes_differ() -> None:
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])

    assert apart({"x": one}, {"x": torch.tensor([1.0, 2.5])}) == 0.5
    assert apart([one, one], [one, one]) == 0
    assert apart(nan, nan) == 0
    assert apart(nan, one) == apart(one, one[:1]) == float("inf")
    assert apart(torch.tensor([torch.inf]), torch.tensor([torch.inf])) == 0


def test_memory_is_what_was_held_at_once() -> None:
    given = torch.zeros(1024)
    with allocated(Device(CPU)) as peak:
        kept = given + 1  # 4 KiB
        for _ in range(3):
            kept = kept * 2  # 4 KiB beside the one before it
        kept.add_(1)

    assert peak == [2 * 4096]


def test_the_limits_are_those_of_the_page() -> None:
    loaded = load(served("sd15"), CPU)
    jobs = mixed(loaded.card, QUICK)
    half = replace(loaded, device=Device(replace(CPU, dtype="bfloat16")))

    assert limit(loaded.card, loaded, jobs) == 2e-5
    assert limit(loaded.card, half, jobs) is None
    assert "at most 2e-5 (pictures) or 1e-4 (video)" in NUMERICS.read_text()


# What is advised


def report(
    fast: float,
    exact: float,
    *,
    limit: float | None = 2e-5,
    plain: float | None = 0.0,
    how: str = "table",
) -> CheckReport:
    """Of a model whose step of two rows pays, of four not."""
    kind = CallKind("unet.forward", 7)
    step = ComponentTiming(kind, "denoise", 2, 4.0, {2: 1.0, 4: 1.1, 8: 2.2}, {})
    timing = TimingReport("M", "cpu", "float32", {}, 50, 0.05, 3, (64, 64), 4, (step,), Costs())

    def proof(difference: float, seconds: float) -> Proof:
        seen = ObservedCalls("denoise", "UNet", max_requests=2, compared=1, difference=difference)
        seen.seconds[4] = [9.0, seconds]
        return Proof(difference, (Method("unet.forward", seen, how, ""),), ())

    proofs = {"fast": proof(fast, 1.0), "exact": proof(exact, 1.5)}
    return CheckReport(("one",), limit, proofs, PlainComparison(plain), timing)


@pytest.mark.parametrize(
    ("made", "problems", "sentence"),
    [
        (
            report(1e-6, 0),
            0,
            "Set `--max-batch-size 4 --numerics fast`: answers of requests together differ by "
            "1.0e-06 from those alone; with `--numerics exact` they have the same bits and take "
            "1.5 times as long a step.",
        ),
        (report(0, 0, how="alone"), 0, "Keep the defaults (`--numerics fast`): steps of this"),
        (report(1e-3, 0), 1, "Set `--max-batch-size 4 --numerics exact`: in fast numerics"),
        (report(float("inf"), 0), 1, "Set `--max-batch-size 4 --numerics exact`"),
        (report(1e-3, 1e-3), 2, "Set `--batching-mode off`: batched requests get different"),
        (report(1e-6, 1e-6), 1, "--numerics fast`: answers of requests together differ by 1.0e-06"),
        (report(0.02, 0, limit=None), 0, "Set `--max-batch-size 4 --numerics fast`"),
        (report(0, 0, plain=0.1), 1, "Set `--max-batch-size 4 --numerics fast`"),
        (report(0, 0, plain=None), 0, "Set `--max-batch-size 4 --numerics fast`"),
    ],
)
def test_the_advice_follows_from_what_was_found(
    made: CheckReport, problems: int, sentence: str
) -> None:
    assert len(made.problems) == problems
    assert sentence in made.advice
    assert made.as_text().endswith(made.advice)
    json.dumps(made.as_json(), allow_nan=False)
