"""What `import carpool` gives: its names, what it costs, and an end that leaves nothing behind."""

import subprocess
import sys
import threading
from typing import Any

import pytest

import carpool
from carpool.errors import Cancelled, SettingRejected
from support.engine_driver import served
from support.tiny import ARGUMENTS

SD15 = ARGUMENTS["sd15"]


def test_leaving_the_block_ends_the_thread_and_gives_the_modules_back() -> None:
    pipe, threads = served("sd15"), set(threading.enumerate())  # one of them may be about to end
    with carpool.load(pipe, device="cpu") as engine:
        handle = engine.submit("a cat", **SD15 | {"num_inference_steps": 900})
        assert next(event for event in handle.events() if event.kind == "step")
        assert set(threading.enumerate()) - threads
        assert "_compiled_call_impl" in pipe.unet.__dict__

    assert not set(threading.enumerate()) - threads
    assert not {"forward", "_compiled_call_impl"} & pipe.unet.__dict__.keys()
    assert "decode" not in pipe.vae.__dict__
    with pytest.raises(Cancelled, match="the engine was closed"):
        handle.result(10)
    engine.close()  # a second time is harmless


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingRejected, match="unknown setting 'max_batch'; did you mean 'max_b"):
        carpool.load(served("sd15"), max_batch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"revision": "main"}], ids=str)
def test_a_setting_that_a_given_pipeline_overrides_is_refused(setting: dict[str, Any]) -> None:
    [name] = setting

    with pytest.raises(SettingRejected, match=f"{name}='.*': the given pipeline is loaded already"):
        carpool.load(served("sd15"), **setting)


def test_every_public_name_is_there() -> None:
    for name in carpool.__all__:
        assert getattr(carpool, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        carpool.nothing  # noqa: B018


def test_the_package_is_the_command_line_too() -> None:
    asked = [sys.executable, "-m", "carpool", "--version"]

    done = subprocess.run(asked, capture_output=True, text=True, check=True)

    assert done.stdout == f"python -m carpool, version {carpool.__version__}\n"
