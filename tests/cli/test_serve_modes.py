"""`carpool serve` with the flags and deploy files of other engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import carpool.server.run
from carpool.config import ServeSettings
from carpool.fleet.models import ModelSpec
from support.command_line import Ended, Run

Serve = Callable[..., tuple[Ended, list[tuple[str, ServeSettings]]]]


@pytest.fixture
def serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Runs `carpool serve`, without a server: its end, and what would have been served."""
    served: list[tuple[str, ServeSettings]] = []

    def note(specs: Sequence[ModelSpec], settings: ServeSettings, _: object) -> int:
        served.append((specs[0].model, settings))
        return 0

    monkeypatch.setattr(carpool.server.run, "serve", note)
    monkeypatch.setattr("carpool.preflight.check", lambda *_: None)  # models are names here
    monkeypatch.setattr("carpool.worker.start.ForkingStarter.start_server", lambda _: None)
    monkeypatch.setattr("carpool.server.startup.set_limits", lambda: None)

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


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trust-remote-code", "org/model"),
        ("--omni", "--enforce-eager", "org/model"),
        ("--dit-layerwise-offload", "False", "org/model"),
        ("org/model", "--vae-cpu-offload"),
        ("--vae-cpu-offload=true", "org/model", "--enable-metrics", "1"),
    ],
)
def test_a_flag_that_is_passed_over_takes_no_model_for_its_value(
    serve: Serve, arguments: tuple[str, ...]
) -> None:
    ended, served = serve(*arguments)

    assert [model for model, _ in served] == ["org/model"]
    assert ("layerwise" in ended.err) is False


def test_variables_of_others_say_nothing_about_settings(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "carpool.yaml"
    file.write_text("port: 9000\nmodel: org/mine\nmax_queue: 7")
    for name in ("PORT", "MODEL", "MAX_QUEUE"):
        monkeypatch.setenv(name, "8080")
    monkeypatch.setenv("CARPOOL_MAX_QUEUE", "11")

    [(model, settings)] = serve("--config", file)[1]

    assert (model, settings.port, settings.max_queue) == ("org/mine", 9000, 11)


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


# The commands of the pages that announced the two peers' batching


def test_a_command_of_sglang_runs_as_it_is(serve: Serve) -> None:
    ended, served = serve(
        *("--model-path", "org/model", "--backend", "diffusers", "--num-gpus", 1),
        *("--dit-layerwise-offload", "true", "--tp-size", 1),
        *("--dynamic-batch-max-size", 8, "--dynamic-batch-delay-ms", 5, "--port", 8001),
    )

    [(model, settings)] = served
    assert (model, settings.port, settings.batching_mode) == ("org/model", 8001, "dynamic")
    assert (settings.batching_max_size, settings.batching_delay_ms) == (8, 5.0)
    assert ended.err == (
        "carpool: --dit-layerwise-offload is ignored: --memory 20GiB streams what does not fit "
        "the device\n"
        "carpool: the settings choose batching mode dynamic\n"
    )


def test_a_command_of_vllm_omni_runs_as_it_is(serve: Serve) -> None:
    _, served = serve(
        *("org/model", "--omni", "--port", 8091, "--max-num-seqs", 4, "--enforce-eager"),
        *("--request-batch-max-wait-ms", 20),
        *("--default-sampling-params", '{"0": {"num_inference_steps": 4}}'),
    )

    [(model, settings)] = served
    assert (model, settings.batching_mode, settings.max_num_seqs) == ("org/model", "request", 4)
    assert settings.default_sampling_params == '{"0": {"num_inference_steps": 4}}'


def test_step_execution_is_the_mode_continuous(serve: Serve) -> None:
    [(_, settings)] = serve("--omni", "--step-execution", "--max-num-seqs", 6)[1]

    assert (settings.batching_mode, settings.max_running) == ("continuous", 6)


def test_overrides_of_stages_overlay_a_deploy_file_or_stand_for_one(
    serve: Serve, tmp_path: Path
) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: [{stage_id: 0, max_num_seqs: 4, request_batch_max_wait_ms: 20}]")
    overrides = '{"0": {"max_num_seqs": 2}}'

    [(_, settings)] = serve("--stage-overrides", overrides)[1]
    assert (settings.batching_mode, settings.max_num_seqs) == ("request", 2)
    [(_, settings)] = serve("--deploy-config", file, "--stage-overrides", overrides)[1]
    assert (settings.max_num_seqs, settings.request_batch_max_wait_ms) == (2, 20.0)

    ended, served = serve("--stage-overrides", "[1]")
    assert (ended.status, served) == (2, [])
    assert "must be JSON such as" in ended.err


def test_replicas_of_the_peers_are_workers(serve: Serve) -> None:
    ended, [(_, settings)] = serve("--model-path", "org/model", "--dp-size", 2)

    assert ended.status == 0, ended.err
    assert settings.workers == 2


@pytest.mark.parametrize(
    ("flags", "ranks", "kind"),
    [
        (("--ulysses-degree", 2), 2, "ulysses"),
        (("--num-gpus", 4, "--ulysses-degree", 4, "--ring-degree", 1), 4, "ulysses"),
        (("--ring-degree", 2, "--attention-backend", "_native_flash"), 2, "ring"),
        (("--num-gpus", 4, "--sp-degree", 2, "--dp-size", 2), 2, "ulysses"),
    ],
)
def test_sequence_parallelism_of_the_peers_is_context_parallelism(
    serve: Serve, flags: tuple[Any, ...], ranks: int, kind: str
) -> None:
    ended, [(_, settings)] = serve("--model-path", "org/model", *flags)

    assert ended.status == 0, ended.err
    assert (settings.context_parallel, settings.context_parallel_kind) == (ranks, kind)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--num-gpus", 2), "--num-gpus 2: here weights are on one device; --workers 2 puts"),
        (("--tp-size", 4), "--context-parallel 4 has them compute each request together"),
        (("--num-gpus", 8, "--ulysses-degree", 4, "--dp-size", 4), "--num-gpus 8: here"),
        (("--ulysses-degree", 2, "--ring-degree", 2), "share a sequence in one of the two ways"),
        (
            ("--sp-degree", 4, "--ulysses-degree", 2),
            "--sp-degree 4 and --context-parallel 2 are the same setting",
        ),
        (
            ("--dynamic-batch-max-size", 8, "--batching-max-size", 4),
            "--dynamic-batch-max-size 8 and --batching-max-size 4 are the same setting",
        ),
    ],
)
def test_what_carpool_has_not_is_refused_with_what_to_use(
    serve: Serve, flags: tuple[Any, ...], says: str
) -> None:
    ended, served = serve(*flags)

    assert (ended.status, served) == (2, [])
    assert says in ended.err
