"""What a command line or a file says of several models and their devices."""

import re
from pathlib import Path
from typing import Any

import pytest

from carpool.cli.config_file import read_config
from carpool.config import ServeSettings
from carpool.errors import LoadFailed, SettingRejected
from carpool.fleet.local import name_of
from carpool.fleet.models import ModelSpec, cuda_devices, devices_of, listed_models, models_of


def settings(**others: object) -> ServeSettings:
    return ServeSettings(**others)  # type: ignore[arg-type]


def models_in(file: Path, chosen: ServeSettings) -> list[ModelSpec]:
    return listed_models(read_config(file).get("models"), chosen, str(file))


def test_models_of_a_command_line_have_the_names_that_they_are_given_or_their_own() -> None:
    found = models_of(["shapes", "clips=shapes-video"], settings())

    assert [(one.name, one.model) for one in found] == [
        ("shapes", "shapes"),
        ("clips", "shapes-video"),
    ]


def test_one_model_keeps_a_name_that_is_only_known_once_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()

    [one] = models_of([str(folder)], settings(workers=3, device="cpu"))
    [named] = models_of(["clips=shapes-video"], settings())

    assert (one.name, one.model, one.devices) == ("", str(folder), ("cpu", "cpu", "cpu"))
    assert (named.name, named.model) == ("clips", "shapes-video")


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SettingRejected, match="two models have the name 'shapes'"):
        models_of(["shapes", "shapes=shapes-video"], settings())
    with pytest.raises(SettingRejected, match="name each, as NAME=MODEL"):
        models_of(["shapes", "shapes-video"], settings(served_model_name="x"))
    with pytest.raises(LoadFailed, match="no model at 'shaeps'"):
        models_of(["shapes", "shaeps"], settings())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"scale_up_wait": 5.0}, "scale_up_wait=5.0: does nothing without max_workers"),
        ({"scale_down_after": 5.0}, "scale_down_after=5.0: does nothing without max_workers"),
        ({"fleet_cert": "x.pem"}, "fleet_cert='x.pem': does nothing without ray"),
        ({"workers_per_node": 2}, "workers_per_node=2: does nothing without ray"),
        ({"gpus_per_worker": 0.5}, "gpus_per_worker=0.5: does nothing without ray"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingRejected, match=told):
        models_of(["shapes"], settings(**given))
    assert models_of(["shapes"], settings(**given, ray="auto", max_workers=2))


def test_more_models_at_the_start_than_may_be_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingRejected, match=r"max_loaded=1: 2 of the 2 models .* is 2 at least"):
        models_of(["shapes", "shapes-video"], settings(max_loaded=1))
    file = tmp_path / "models.yaml"
    file.write_text("models: [shapes, {model: shapes-video, load: on_demand}]\n")
    with pytest.raises(SettingRejected, match=r"max_loaded=1: 1 of the 2 models .* is 2 at least"):
        models_in(file, settings(max_loaded=1))
    assert len(models_in(file, settings(max_loaded=2))) == 2


def test_a_file_says_of_each_model_what_the_flags_say_of_all(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n"
        "  - shapes\n"
        "  - model: shapes-video\n"
        "    name: clips\n"
        "    workers: 2\n"
        "    devices: [cpu, cpu]\n"
        "    load: on_demand\n"
        "    keep_alive: 300\n"
        "    max_batch_size: 4\n"
        "    dtype: bfloat16\n"
    )

    first, second = models_in(file, settings(max_batch_size=16))

    assert (first.name, first.settings.max_batch_size, first.is_on_demand) == ("shapes", 16, False)
    assert (second.name, second.devices) == ("clips", ("cpu", "cpu"))
    assert (second.is_on_demand, second.keep_alive_s) == (True, 300.0)
    assert (second.settings.max_batch_size, second.settings.dtype) == (4, "bfloat16")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: []", "write `models:`"),
        ("model: shapes", "write `models:`"),
        ("models: [{name: x}]", "every model needs `model:`"),
        ("models: [{model: shapes, wrokers: 2}]", "did you mean 'workers'"),
        ("models: [{model: shapes, load: later}]", "must be of start, on_demand"),
        ("models: [{model: shapes, keep_alive: soon}]", "must be seconds"),
        ("models: [{model: shapes, keep_alive: .nan}]", "must be seconds"),
        ("models: [{model: shapes, workers: 0}]", "a whole number from 1"),
        ("models: [{model: shapes, max_batch_size: x}]", "max_batch_size='x'"),
        ("models: [{model: shapes", "cannot be read"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_it(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)

    with pytest.raises(SettingRejected, match=told):
        models_in(file, settings())


def test_workers_are_spread_over_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")

    assert devices_of("auto", None, None) == ("auto",)
    assert devices_of("auto", 3, None) == ("cuda:0", "cuda:1", "cuda:0")
    assert devices_of("cpu", 2, None) == ("cpu", "cpu")
    assert devices_of("cuda:3", 2, None) == ("cuda:3", "cuda:3")
    assert devices_of("auto", None, "cuda:1, cpu") == ("cuda:1", "cpu")
    assert devices_of("auto", 4, "cuda:0,cuda:1") == ("cuda:0", "cuda:1") * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of("auto", 2, None) == ("auto", "auto")


def test_devices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingRejected, match="workers=3 cannot be divided among 2 devices"):
        devices_of("auto", 3, "cuda:0,cuda:1")
    with pytest.raises(SettingRejected, match="by commas"):
        devices_of("auto", None, "cuda0")


def test_the_devices_of_a_machine_are_divided_among_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    four = "cuda:0,cuda:1,cuda:2,cuda:3"

    assert devices_of("auto", 2, four, 2) == ("cuda:0+cuda:1", "cuda:2+cuda:3")
    assert devices_of("auto", None, four, 4) == ("+".join(four.split(",")),)
    assert devices_of("cpu", 2, None, 2) == ("cpu", "cpu")  # ranks share it
    assert devices_of("auto", None, "cpu,cpu", 2) == ("cpu", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert devices_of("auto", None, None, 2) == ("cuda:0+cuda:1",)
    assert devices_of("cuda", 2, None, 2) == ("cuda:0+cuda:1", "cuda:2+cuda:3")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("auto", None, "cuda:0,cuda:1,cuda:2", 2), "takes 2 different devices a worker"),
        (("auto", None, "cuda:0,cuda:0", 2), "takes 2 different devices a worker, and here are 1"),
        (("auto", 3, "cuda:0,cuda:1,cuda:2,cuda:3", 2), "workers=3 cannot be divided among 2"),
        (("cuda:0", None, None, 2), "say them, as --devices cuda:0,cuda:1"),
        (("cuda", 2, None, 2), "2 workers take 4 devices, and this machine has 3"),
        (("cuda:0+cuda:1", 2, None, 2), "is of one worker, and there are 2"),
    ],
)
def test_devices_that_groups_cannot_share_are_refused(
    given: tuple[Any, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    with pytest.raises(SettingRejected, match=re.escape(told)):
        devices_of(*given)


def test_groups_take_the_devices_that_ray_gives_them_and_none_that_are_named() -> None:
    [spec] = models_of(["shapes"], settings(ray="auto", context_parallel=2, workers=3))
    assert spec.devices == ("auto",) * 3
    assert name_of(spec) == "shapes (2 ranks)"  # no worker with one device is taken for it
    with pytest.raises(SettingRejected, match="the 2 devices that Ray gives it"):
        models_of(["shapes"], settings(ray="auto", context_parallel=2, device="cuda:0+cuda:1"))


def test_what_hides_all_devices_leaves_none() -> None:
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert cuda_devices({"HIP_VISIBLE_DEVICES": "0,1"}) == 2


@pytest.mark.parametrize(
    ("files", "there"),
    [
        ({}, 0),
        ({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""}, 2),
        ({f"sys/class/kfd/kfd/topology/nodes/{i}/gpu_id": f"{i and 4711}\n" for i in range(4)}, 3),
    ],
    ids=["none", "nvidia", "amd"],
)
def test_devices_of_nvidia_and_of_amd_are_counted(
    files: dict[str, str], there: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert cuda_devices({}, tmp_path) == there


def test_workers_may_be_on_devices_of_intel() -> None:
    assert devices_of("auto", None, "xpu:0,xpu:1") == ("xpu:0", "xpu:1")


def test_workers_follow_the_load_from_the_fewest_on_and_have_devices_for_the_most() -> None:
    [one] = models_of(["shapes"], settings(min_workers=2, max_workers=4, device="cpu"))
    [more] = models_of(["shapes"], settings(workers=3, max_workers=4, device="cpu"))
    [fixed] = models_of(["shapes"], settings(workers=3, device="cpu"))

    assert one.scale is not None
    assert (one.workers, one.scale.low, one.scale.high, len(one.devices)) == (2, 2, 4, 4)
    assert more.scale is not None
    assert (more.workers, more.scale.low) == (3, 1)
    assert (fixed.workers, fixed.scale, len(fixed.devices)) == (3, None, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"min_workers": 2}, "needs max_workers"),
        ({"min_workers": 3, "max_workers": 2}, "must not decrease in the order"),
        ({"workers": 5, "max_workers": 4}, "workers=5, min_workers=1, max_workers=4"),
        ({"workers": 1, "min_workers": 2, "max_workers": 4}, "must not decrease"),
        ({"ray": "auto", "devices": "cuda:0"}, "each worker takes what Ray gives it"),
    ],
)
def test_bounds_and_places_that_do_not_fit_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(SettingRejected, match=told):
        models_of(["shapes"], settings(**given))


def test_on_ray_no_device_of_this_machine_is_counted() -> None:
    [one] = models_of(["shapes"], settings(ray="auto", workers=3, device="cuda"))

    assert one.devices == ("cuda", "cuda", "cuda")
