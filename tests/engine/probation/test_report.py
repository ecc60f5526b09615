"""`carpool models MODEL` says how each call of a model fuses."""

import json
from pathlib import Path

from click.testing import CliRunner

from carpool.cli.main import cli
from carpool.config import EngineSettings
from carpool.engine.probation.report import lines
from support.tiny import checkpoint


def test_a_model_without_a_table_is_on_probation_until_something_was_proven() -> None:
    found = lines(checkpoint("pixart"), EngineSettings(device="cpu"))

    fates = {one["call"]: one["fuses"] for one in found}
    assert fates["text_encoder.forward"] == fates["vae.decode"] == "table"
    assert fates["transformer.forward"] == "probation"


def test_the_command_prints_lines_or_json(tmp_path: Path) -> None:
    model = str(checkpoint("pixart"))

    text = CliRunner().invoke(cli, ["models", model, "--device", "cpu", "--no-infer-specs"])
    data = CliRunner().invoke(cli, ["models", model, "--device", "cpu", "--json"])
    missing = CliRunner().invoke(cli, ["models", str(tmp_path / "none")])

    assert "infer_specs is off" in text.stdout
    assert {one["call"] for one in json.loads(data.stdout)} >= {"vae.decode"}
    assert missing.exit_code == 1
    assert "no model at" in str(missing.exception)
