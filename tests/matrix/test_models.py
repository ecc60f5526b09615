"""The grid says what the matrix has shown, no more and no less."""

import json
import re
from pathlib import Path

import diffusers
import pytest
from click.testing import CliRunner
from known_pipelines import BASES, MEANING, everything, from_tests, tried
from make_models import PAGE, page

from carpool.cli.main import cli
from carpool.engine.model import turbo_pipelines
from carpool.engine.model.hunyuan3d import Hunyuan3DPipeline
from carpool.models.grid import FAMILIES, Family, families, proof, rows
from support.matrix import CASES
from support.modular import CLASSES
from support.newcomers import NEWCOMERS
from support.tiny import FAMILIES as TINY

ROOT = Path(__file__).parents[2]
KNOWN = {case.name: case for case in CASES}
PROVEN = [model for model in families() if model.cases]
OURS = {  # pipelines that diffusers has not
    cls.__name__: cls for cls in (*turbo_pipelines.PIPELINES.values(), Hunyuan3DPipeline)
}


def test_every_row_of_the_matrix_is_in_the_grid_and_was_measured() -> None:
    named = [case for model in families() for case in model.cases]

    assert set(named) == KNOWN.keys()
    assert proof().keys() == KNOWN.keys(), "run `make test-models`"


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_measured_is_what_the_case_demands(name: str) -> None:
    case, measured = KNOWN[name], proof()[name]

    assert measured["task"] == case.task
    assert 0 <= measured["largest_difference"] <= case.tolerance
    widths = measured["requests_per_forward"]
    assert widths.keys() == {*case.fuses, *case.alone}
    assert all(widths[module] >= least for module, least in case.fuses.items())


@pytest.mark.parametrize("model", PROVEN, ids=lambda model: model.family)
def test_the_denoiser_of_a_proven_model_fuses_or_its_limits_say_why_not(model: Family) -> None:
    [row] = [row for row in rows() if row["family"] == model.family]

    fuses = any(
        name in ("transformer.forward", "unet.forward", "model.forward") for name in row["fuses"]
    )
    assert fuses or "runs alone" in model.limits
    assert row["tasks"]
    assert row["pipelines"]


@pytest.mark.parametrize("model", PROVEN, ids=lambda model: model.family)
def test_a_model_takes_adapters_where_diffusers_loads_them_for_its_pipeline(model: Family) -> None:
    names = {proof()[case]["pipeline"] for case in model.cases}
    classes = {getattr(diffusers, name, None) or OURS[name] for name in names}

    assert {hasattr(one, "load_lora_weights") for one in classes} == {model.lora}


def test_every_model_of_the_grid_has_proof_and_examples() -> None:
    for model in families():
        assert model.hub_ids
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", hub) for hub in model.hub_ids)
        assert model.cases


def test_the_grid_is_laid_out_as_json_is_written() -> None:
    text = FAMILIES.read_text()

    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def test_the_page_is_what_the_registry_and_the_measurements_make() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_the_command_prints_the_same_grid_as_text_and_as_json() -> None:
    text = CliRunner().invoke(cli, ["models"]).output.splitlines()
    data = json.loads(CliRunner().invoke(cli, ["models", "--json"]).output)

    assert [row["family"] for row in data] == [model.family for model in families()]
    assert [line.split("  ")[0] for line in text[1:]] == [model.family for model in families()]
    [flux] = [row for row in data if row["family"] == "FLUX.1"]
    assert {"text-to-image", "image-to-image", "inpaint"} <= set(flux["tasks"])
    assert "transformer.forward" in flux["fuses"]


def test_every_pipeline_class_that_diffusers_ships_is_on_the_page() -> None:
    shipped = {name for name in dir(diffusers) if name.endswith("Pipeline")}
    missing = {name for name in shipped - set(BASES) if f"| `{name}` |" not in PAGE.read_text()}

    assert len(shipped) > 300
    assert not missing, "run `make docs`"


def test_a_class_is_listed_once_with_a_state_that_is_explained() -> None:
    listed = [one.pipeline for one in everything()]

    assert len(listed) == len(set(listed))
    assert {one.known for one in everything()} <= MEANING.keys()
    assert from_tests().keys() <= set(listed)
    proven = {one["pipeline"] for one in proof().values()}
    proven -= OURS.keys()
    assert proven == {one.pipeline for one in everything() if one.how.startswith(tuple(KNOWN))}


def test_what_was_tried_with_diffusers_tests_had_the_bits_of_plain_diffusers() -> None:
    states = {one.pipeline: one.known for one in everything()}

    assert tried().keys() <= states.keys()
    assert {one["exact"] for one in tried().values()} == {0.0}
    assert "tried" in states.values()


@pytest.mark.parametrize("name", from_tests())
def test_a_test_that_proves_a_class_exists_and_runs_it(name: str) -> None:
    file, _, test = from_tests()[name]["test"].partition("::")
    function, _, case = test.rstrip("]").partition("[")
    text = (ROOT / file).read_text()

    assert f"def {function}(" in text
    if file.endswith("test_newcomers.py"):
        assert (case, name in NEWCOMERS) == (name, True)
    elif file.endswith("test_modular.py"):
        assert case.partition("-")[0] == name in CLASSES
    elif case:
        assert f'"{case}"' in text
        assert TINY[case]["pipeline"] == name


def test_every_pipeline_that_the_outsiders_run_is_known_on_the_page() -> None:
    text = (ROOT / "tests/matrix/test_outsiders.py").read_text()
    run = [name for name in TINY if f'"{name}": (' in text]

    assert len(run) >= 13
    classes = {TINY[name]["pipeline"] for name in run}
    assert classes <= from_tests().keys(), "add them to docs/known_pipelines.json"
