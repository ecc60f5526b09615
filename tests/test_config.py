"""Settings: each has one name, one default and one rule, whoever sets it."""

import dataclasses
import math
import typing
from os import PathLike
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from carpool.cli.options import settings_options
from carpool.config import JOBS, WORKERS, EngineSettings, ServeSettings, load_settings
from carpool.errors import SettingRejected
from carpool.python.settings import LoadSettings
from carpool.settings.rules import base_type


def test_the_defaults_keep_their_own_rules() -> None:
    settings = ServeSettings()

    assert settings.engine() == EngineSettings()
    assert (settings.batching_mode, settings.max_batch_size, settings.port) == (
        "continuous",
        8,
        8000,
    )


def test_every_setting_says_what_it_is() -> None:
    for field in dataclasses.fields(ServeSettings):
        assert field.metadata["help"], field.name
        assert not field.metadata["help"].endswith("."), field.name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: must be at least 1"),
        ({"max_batch_size": 2.0}, "max_batch_size=2.0: must be a whole number"),
        ({"max_batch_size": "8"}, "max_batch_size='8': must be a whole number"),
        ({"max_batch_size": True}, "max_batch_size=True: must be a whole number"),
        ({"max_batch_size": None}, "max_batch_size=None: must be a whole number"),
        ({"max_queue": -1}, "max_queue=-1: must be at least 0"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        (
            {"batching_mode": "static"},
            "batching_mode='static': must be one of continuous, dynamic, request, off",
        ),
        ({"admit_late": 1}, "admit_late=1: must be true or false"),
        ({"min_gain": True}, "min_gain=True: must be a number"),
        (
            {"dtype": "float8"},
            "dtype='float8': must be one of auto, float32, bfloat16, float16; "
            "did you mean 'float32'?",
        ),
        ({"device": 0}, "device=0: must be text"),
        ({"revision": 5}, "revision=5: must be text"),
        ({"drain_timeout": -1}, "drain_timeout=-1: must be at least 0"),
        ({"drain_timeout": math.nan}, "drain_timeout=nan: must be at least 0"),
        ({"drain_timeout": "3"}, "drain_timeout='3': must be a number"),
        ({"api_key": "secret"}, "api_key: must be a tuple of strings, none of them empty"),
        ({"api_key": ("",)}, "api_key: must be a tuple of strings, none of them empty"),
        ({"log_level": "loud"}, "log_level='loud': must be one of debug, info, warning, error"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        ServeSettings(**given)

    assert str(refused.value) == says


def test_a_whole_number_will_do_for_a_float() -> None:
    assert ServeSettings(drain_timeout=5).drain_timeout == 5


def test_the_environment_sets_what_it_names() -> None:
    environ = {
        "CARPOOL_MAX_QUEUE": "7", "CARPOOL_DRAIN_TIMEOUT": "2.5", "CARPOOL_THREADS": "2",
        "CARPOOL_API_KEY": "one,two", "CARPOOL_BATCHING_MODE": "off", "CARPOOLING": "not ours",
        "PATH": "/bin",
    }  # fmt: skip

    settings = ServeSettings.from_environment(environ)

    assert (settings.max_queue, settings.drain_timeout, settings.threads) == (7, 2.5, 2)
    assert settings.api_key == ("one", "two")
    assert settings.batching_mode == "off"
    assert settings.max_batch_size == ServeSettings().max_batch_size


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CARPOOL_MAX_QUEU", "7", "unknown variable CARPOOL_MAX_QUEU; did you mean 'CARPOOL_MAX_Q"),
        ("CARPOOL_", "7", "unknown variable CARPOOL_"),
        ("CARPOOL_PORT", "http", "CARPOOL_PORT='http': must be a whole number"),
        ("CARPOOL_PORT", "", "CARPOOL_PORT='': must be a whole number"),
        ("CARPOOL_PORT", "8000.5", "CARPOOL_PORT='8000.5': must be a whole number"),
        ("CARPOOL_PORT", "-1", "port=-1: must be at least 0"),
        ("CARPOOL_API_KEY", "", "api_key: must be a tuple of strings, none of them empty"),
        ("CARPOOL_DTYPE", "float8", "dtype='float8': must be one of auto, float32"),
    ],
)
def test_a_wrong_environment_is_refused(variable: str, value: str, says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        ServeSettings.from_environment({variable: value})

    assert str(refused.value).startswith(says)


def test_a_flag_that_may_be_repeated_makes_one_list() -> None:
    flags: dict[str, Any] = {}

    @click.command()
    @settings_options(ServeSettings, only=("dtype", "quantize"))
    def command(**given: Any) -> None:
        flags.update(given)

    command.main(["--dtype", "bfloat16", "--dtype", "vae=float32"], standalone_mode=False)

    settings = ServeSettings.from_environment({}, **flags)
    assert (settings.dtype, settings.quantize) == ("bfloat16,vae=float32", None)


def test_json_in_the_environment_keeps_its_commas() -> None:
    text = '{"vae": {"quant_backend": "quanto", "weights_dtype": "int8"}}'

    assert ServeSettings.from_environment({"CARPOOL_QUANTIZE": text}).quantize == text


def test_an_engine_takes_its_own_settings_and_those_of_its_jobs_only() -> None:
    assert load_settings({"max_running": 3, "job_ttl": 60.0}).job_ttl == 60
    with pytest.raises(SettingRejected, match="unknown setting 'max_runing'; did you mean 'max_ru"):
        load_settings({"max_runing": 3})
    with pytest.raises(SettingRejected, match="unknown setting 'port'"):
        load_settings({"port": 3})


def test_what_torch_and_pathlib_have_objects_for_is_taken() -> None:
    given = {"dtype": torch.bfloat16, "device": torch.device("cuda:1"), "state_dir": Path("jobs")}

    taken = load_settings(given)

    assert (taken.dtype, taken.device, taken.state_dir) == ("bfloat16", "cuda:1", "jobs")
    with pytest.raises(SettingRejected, match=r"dtype='int8': must be one of auto, float32"):
        load_settings({"dtype": torch.int8})


def test_a_setting_of_another_program_is_pointed_at_ours() -> None:
    with pytest.raises(SettingRejected, match="setting 'torch_dtype'; did you mean 'dtype'"):
        load_settings({"torch_dtype": torch.bfloat16})


@pytest.mark.parametrize(
    ("hint", "plain"),
    [
        (int, int), (int | None, int), (str | None, str), (float, float), (tuple[str, ...], str),
        (EngineSettings.__annotations__["batching_mode"], str),
    ],
)  # fmt: skip
def test_every_annotation_has_a_plain_type(hint: Any, plain: type) -> None:
    assert base_type(hint) is plain


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "continuous"),
        ({"batching_max_size": 8}, "dynamic"),
        ({"batching_delay_ms": 5.0, "batching_config": "rules.json"}, "dynamic"),
        ({"enable_batching_metrics": True}, "dynamic"),
        ({"enable_batching_metrics": False, "batching_max_size": 1}, "continuous"),
        ({"batching_mode": "dynamic", "max_num_seqs": 1}, "dynamic"),
        ({"max_num_seqs": 4}, "request"),
        ({"request_batch_max_wait_ms": 20.0, "batching_mode": "request"}, "request"),
    ],
)
def test_settings_of_a_mode_choose_it(given: dict[str, Any], mode: str) -> None:
    assert load_settings(given).batching_mode == mode
    assert ServeSettings.from_environment({}, **given).batching_mode == mode
    texts = {f"CARPOOL_{name.upper()}": str(value) for name, value in given.items()}
    assert ServeSettings.from_environment(texts).batching_mode == mode


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"batching_max_size": 8, "batching_mode": "request"},
            "batching_max_size=8 is for batching_mode 'dynamic', and batching_mode is 'request': "
            "leave one of them out",
        ),
        (
            {"batching_delay_ms": 5.0, "max_num_seqs": 2},
            "batching_delay_ms is for batching_mode 'dynamic', and max_num_seqs for 'request': a "
            "server has one mode, so leave one of them out",
        ),
    ],
)
def test_settings_of_different_modes_are_refused_together(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingRejected) as refused:
        load_settings(given)
    assert str(refused.value) == says
    with pytest.raises(SettingRejected):
        ServeSettings.from_environment({}, **given)


@pytest.mark.parametrize("name", ["batching_delay_ms", "request_batch_max_wait_ms", "max_wait"])
def test_a_wait_without_an_end_is_refused(name: str) -> None:
    with pytest.raises(SettingRejected, match=f"{name}=inf: must be a finite number"):
        load_settings({name: math.inf})


def test_type_checkers_know_every_setting_of_load_with_its_type() -> None:
    texts = {
        "cost_table",
        "batching_config",
        "lora_dir",
        "state_dir",
        "model_config",
        "embeddings",
    }  # or paths
    texts |= {"stream_dir"}
    objects = {"device", "dtype"}  # or torch's
    hints = typing.get_type_hints(ServeSettings)
    engine = {field.name for field in dataclasses.fields(EngineSettings)}

    told = typing.get_type_hints(LoadSettings, localns={"torch": torch})

    assert told.keys() == (engine | {*JOBS, *WORKERS}) - {
        "lora"
    }  # which `load` takes in more forms
    same = told.keys() - texts - objects
    assert {name: told[name] for name in same} == {name: hints[name] for name in same}
    assert {told[name] for name in texts} == {str | PathLike[str] | None}
    assert told["device"] == str | torch.device
    assert told["dtype"] == hints["dtype"] | torch.dtype
