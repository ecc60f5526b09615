"""`carpool serve` with the flags and deploy files of other engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import carpool.server.run
from carpool.config import ServeSettings
from support.command_line import Ended, Run

Serve = Callable[..., tuple[Ended, list[tuple[str, ServeSettings]]]]


@pytest.fixture
def serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `carpool serve`, without a server: its end, and what would have been served."""
    served: list[tuple[str, ServeSettings]] = []

    def note(model: str, settings: ServeSettings) -> int:
        served.append((model, settings))
        return 0

    monkeypatch.setattr(carpool.server.run, "serve", note)

    def invoke(*arguments: Any) -> tuple[Ended, list[tuple[str, ServeSettings]]]:
        served.clear()
        return run("serve", *map(str, arguments)), served

    return invoke


def test_flags_of_a_mode_choose_it_and_say_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, served = serve("--batching-max-size", 8)
    assert served[0][1].batching_mode == "dynamic"
    assert ended.err == "carpool: the settings choose batching mode dynamic\n"

    ended, served = serve("--request-batch-max-wait-ms", 20)
    assert served[0][1].batching_mode == "request"
    assert ended.err == (
        "carpool: the settings choose batching mode request; max_num_seqs is 1, so nothing is "
        "batched\n"
    )
    monkeypatch.setenv("CARPOOL_MAX_NUM_SEQS", "4")
    ended, served = serve()
    assert served[0][1].batching_mode == "request"


def test_flags_of_two_modes_are_refused(serve: Serve) -> None:
    ended, served = serve("--batching-max-size", 8, "--batching-mode", "request")

    assert (ended.status, served) == (2, [])
    assert "batching_max_size=8 is for batching_mode 'dynamic', and batching_mode is 'request'" in (
        ended.err
    )


def test_a_mode_on_the_command_line_wins_over_that_of_a_deploy_file(
    serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: [{stage_id: 0, max_num_seqs: 4}]")

    assert serve("--deploy-config", file)[1][0][1].max_num_seqs == 4
    ended, served = serve("--deploy-config", file, "--batching-max-size", 8)

    assert (served[0][1].batching_mode, served[0][1].max_num_seqs) == ("dynamic", 1)
    assert f"max_num_seqs of {file}: not with mode dynamic" in ended.err
