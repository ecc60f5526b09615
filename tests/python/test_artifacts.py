"""Meshes and sound in Python: arrays of an output, files of a job, files of the command line."""

import io
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from PIL import Image

import carpool
from carpool.cli.main import cli
from carpool.errors import InvalidValue
from carpool.media import encode_mesh, encode_sound
from carpool.python.files import write_output
from carpool.types import Timings
from carpool.worker import encoding, protocol
from carpool.worker.raw_output import raw_output
from support.mesh_pipeline import FACES, mesh_pipeline
from support.tiny import ARGUMENTS, checkpoint

PICTURE = Image.new("RGB", (16, 16), (9, 90, 200))
BELL = {name: value for name, value in ARGUMENTS["stable_audio"].items() if name != "output_type"}


@pytest.fixture
def engine() -> Any:
    with carpool.load(mesh_pipeline(), device="cpu") as opened:
        yield opened


def test_an_output_has_its_mesh_as_arrays_beside_what_the_pipeline_gave(
    engine: carpool.Engine,
) -> None:
    output = engine.submit(carpool.Request(image=PICTURE, seed=3)).result()
    generator = torch.Generator().manual_seed(3)
    [[expected]] = mesh_pipeline()(PICTURE, generator=generator).meshes

    assert output.mesh is not None
    np.testing.assert_array_equal(output.mesh.vertices, expected.vertices)
    np.testing.assert_array_equal(output.mesh.faces, FACES)
    assert output.others["meshes"][0][0].faces is FACES
    assert output.sound is None
    assert encode_mesh(output.mesh, "glb").startswith(b"glTF")


def test_a_job_of_meshes_writes_the_format_that_was_asked(engine: carpool.Engine) -> None:
    request = carpool.Request(image=PICTURE, seed=3)
    for format, begin in ((None, b"glTF"), ("ply", b"ply")):
        job = engine.jobs.submit(request, n=2, output_format=format)
        [first, second] = engine.jobs.wait(job.id, 30).files
        assert (first.name, second.name) == (f"0.{format or 'glb'}", f"1.{format or 'glb'}")
        assert first.read_bytes().startswith(begin)
        assert first.read_bytes() != second.read_bytes()
    with pytest.raises(InvalidValue, match=r"output_format='png': must be one of glb, obj, ply"):
        engine.jobs.submit(request, output_format="png")


def test_sound_is_an_output_a_job_and_a_file_of_the_command_line(tmp_path: Path) -> None:
    pipe = DiffusionPipeline.from_pretrained(checkpoint("stable_audio"))
    with carpool.load(pipe, device="cpu") as opened:
        output = opened.submit("a bell", seed=3, **BELL).result()
        job = opened.jobs.submit(carpool.Request("a bell", seed=3, **BELL))
        [file] = opened.jobs.wait(job.id, 30).files
        written = file.read_bytes()
    assert output.sound is not None
    assert file.name == "0.wav"
    with wave.open(io.BytesIO(written)) as heard:
        frames = heard.readframes(-1)
        assert heard.getframerate() == output.sound.rate == pipe.vae.config.sampling_rate
    with wave.open(io.BytesIO(encode_sound(output.sound, "wav"))) as own:
        assert own.readframes(-1) == frames

    parameters = [f"-p{name}={value}" for name, value in BELL.items()]
    target = tmp_path / "bell.wav"
    run = CliRunner().invoke(
        cli,
        ["generate", "a bell", "--model", str(checkpoint("stable_audio")), "--device", "cpu",
         "--seed", "3", "-o", str(target), *parameters],
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    with wave.open(str(target)) as told:
        assert told.readframes(-1) == frames


def test_what_crosses_to_the_front_is_what_was_made() -> None:
    whole = {"vertices": np.eye(3), "faces": [[0, 1, 2]], "visual": None}
    [coloured] = [{**whole, "vertex_channels": dict.fromkeys("RGB", torch.ones(3))}]
    samples = torch.linspace(-1, 1, 20).reshape(1, 2, 10)
    output = raw_output({"meshes": [coloured]}, spool=b"")
    output |= raw_output({"audios": samples, "sampling_rate": 50}, spool=b"")

    sent = protocol.Done("a", 1, [], Timings(), protocol.TokenUsage(1, 1), **output)
    done: Any = encoding.decode_to_front(encoding.encode_body(sent))
    own, heard = done.mesh, done.sound

    assert own.vertices.tolist() == np.eye(3).tolist()
    assert own.faces.tolist() == [[0, 1, 2]]
    assert own.colours is not None
    assert own.colours.tolist() == [[255] * 3] * 3
    assert (heard.samples.tolist(), heard.rate) == (samples[0].tolist(), 50)


@pytest.mark.parametrize("name", ["out.png", "out.mp4"])
def test_a_file_that_cannot_hold_sound_is_refused(name: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(
        cli,
        ["generate", "a bell", "--model", str(checkpoint("stable_audio")), "--device", "cpu",
         "-o", str(tmp_path / name)],
    )  # fmt: skip

    assert run.exit_code == 2
    assert "the model makes sound: use .wav, .flac, .mp3" in run.output


def test_a_video_with_sound_keeps_its_sound_in_a_file(tmp_path: Path) -> None:
    sound = np.sin(np.linspace(0, 900, 8000, dtype=np.float32))
    output = carpool.Output(
        "req-1", 3, frames=[[PICTURE] * 4], others={"audio": sound[None], "sampling_rate": 16000}
    )

    write_output(output, tmp_path / "a.mp4", 8, None)

    with av.open(str(tmp_path / "a.mp4")) as file:
        assert [stream.type for stream in file.streams] == ["video", "audio"]
        assert sum(1 for _ in file.decode(video=0)) == 4


def test_layers_become_files_beside_each_other(tmp_path: Path) -> None:
    output = carpool.Output("req-1", 3, images=[[PICTURE, PICTURE.convert("RGBA")]])
    write_output(output, tmp_path / "a.png", 8, None)
    assert [(tmp_path / n).read_bytes()[25] for n in ("a.png", "a-1.png")] == [2, 6]  # RGB, RGBA
