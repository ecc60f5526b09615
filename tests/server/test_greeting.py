"""What a server says as it starts: what was loaded, where, and where to go; and no noise."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.request.card import Card, Parameter, Task
from carpool.server.greeting import example, missing_library
from carpool.telemetry.logs import without_noise
from support.server_process import serving


@pytest.mark.timeout(150)
def test_a_start_says_what_was_loaded_where_and_an_end_what_was_batched() -> None:
    """A request of many images is one batch; the last window of metrics comes at the end."""
    flags = ("--batching-max-size", "4", "--enable-batching-metrics", "--num-gpus", "1")
    with serving(*flags) as server:
        assert len(server.draw(n=6).json()["data"]) == 6
        assert server.draw().status_code == 200
        server.signal()
        server.wait()
        greeting, log = server.stdout, server.stderr

    assert "Serving flux (FluxPipeline, loaded in" in greeting
    assert "On cpu: " in greeting
    assert " of memory left" in greeting
    assert f"Playground: {server.url}/\n" in greeting
    assert "Loading pipeline components" not in log  # a library's bar
    assert "torchvision" not in log  # a library's warning
    said = [line.split(" INFO ")[-1] for line in log.splitlines() if "atch" in line]
    assert said[0].endswith("the settings choose batching mode dynamic")
    assert [line.split(", queue_wait")[0].split(", wait_avg")[0] for line in said[1:]] == [
        "Batch admission enabled: user_max=4, device_memory=0.0GiB, rules=0",
        "Dynamic batch metrics enabled; logging summary every 5 dispatches.",
        "Dynamic batch dispatch: requests=1, outputs=6/4, user_max_outputs=4",
        "Dynamic batch dispatch: requests=1, outputs=1/4, user_max_outputs=4",
        "Dynamic batch stats (last 2 dispatches): avg_requests=1.00, avg_outputs=3.50, "
        "merged_rate=0.0%, full_rate=50.0%, utilization=87.5%",
    ]


def cards() -> dict[str, Card]:
    prompt = Parameter("prompt", "str")
    image = Parameter("image", "other", required=True)
    mask = Parameter("mask_image", "other", required=True)
    tasks = {
        "draws": Task("text-to-image", "P", (prompt,)),
        "films": Task("text-to-video", "P", (prompt,)),
        "edits": Task("edit", "P", (prompt, image)),
        "fills": Task("inpaint", "P", (prompt, image, mask)),
        "plays": Task("text-to-audio", "P", (prompt,)),
        "forms": Task("image-to-mesh", "P", (image,)),
        "knows": Task("text-to-image", "P", (Parameter("class_labels", "int", required=True),)),
    }
    return {name: Card(name, (task,), {}, 8, None, 1 << 20, 100) for name, task in tasks.items()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("draws", ["curl -s U/v1/images/generations", "> out.png"]),
        ("films", ["curl -s U/v1/videos", "/content > out.mp4"]),
        ("edits", ["U/v1/images/edits -F image=@picture.png -F 'prompt=", "> out.png"]),
        ("fills", ["-F image=@picture.png -F 'prompt=", "-F mask=@mask.png"]),
        ("plays", ["curl -s U/v1/audio/generations", "> out.wav"]),
        ("forms", ["U/v1/meshes -F input_reference=@picture.png \\\n", "/content > out.glb"]),
        ("knows", ['"class_labels": 1']),
    ],
)
def test_the_printed_command_fits_the_model(name: str, parts: list[str]) -> None:
    command = example(cards()[name], "U", "curl -s")

    assert all(part in command for part in parts), command


def test_the_printed_command_names_the_model_where_there_are_several() -> None:
    assert '"model": "draws"' in example(cards()["draws"], "U", "curl -s", "draws")
    assert "-F 'model=edits'" in example(cards()["edits"], "U", "curl -s", "edits")


@pytest.mark.timeout(150)
def test_the_printed_command_of_a_clip_model_makes_a_clip(tmp_path: Path) -> None:
    with serving("--no-playground", model="shapes-video") as server:
        lines = server.stdout.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("id="))
        command = "\n".join(lines[first:])
        command = command.replace('"prompt"', '"num_inference_steps": 1, "prompt"')
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)

    assert b"ftyp" in (tmp_path / "out.mp4").read_bytes()[:16]


def test_a_library_that_answers_need_is_missed_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert missing_library(cards()["draws"]) is None
    assert "pip install av" in str(missing_library(cards()["films"]))


def record(name: str, level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, text, (), None)


def test_what_libraries_say_of_themselves_is_noise_and_a_truncated_prompt_is_not() -> None:
    warning = logging.WARNING

    assert not without_noise(record("transformers.models.auto", warning, "falling back"))
    assert without_noise(record("diffusers.loaders", logging.ERROR, "cannot read"))
    assert without_noise(record("carpool", warning, "ours"))
    assert without_noise(record("py.warnings", warning, "of Python"))
    truncated = "The following part of your input was truncated because CLIP: ['x']"
    assert without_noise(record("diffusers.pipelines.flux", warning, truncated))
