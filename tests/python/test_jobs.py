"""Jobs of the Python API: what is accepted becomes files, whatever becomes of the process."""

import runpy
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import carpool
from carpool import errors
from carpool.python.jobs import BackgroundJob
from support.engine_driver import served
from support.pictures import picture, read_settings
from support.server_process import eventually
from support.tiny import ARGUMENTS
from training.shapes.judge import shows

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs.py"
DRAW: dict[str, Any] = {**ARGUMENTS["flux"], "width": 32, "height": 32, "num_inference_steps": 3}
DRAW = {name: value for name, value in DRAW.items() if name != "output_type"}
ENDLESS = {**DRAW, "num_inference_steps": 900}
LONG = {**DRAW, "num_inference_steps": 40}


def load(model: str | Path = "flux", /, **settings: Any) -> carpool.Engine:
    """An engine for a family of all tests, or for a folder."""
    pipe = served(model) if isinstance(model, str) else model
    return carpool.load(pipe, device="cpu", **settings)


@pytest.fixture(scope="module")
def engine() -> Iterator[carpool.Engine]:
    with load(max_running=2, metadata_prompt=True) as engine:
        yield engine


def pixels(path: Path) -> NDArray[np.uint8]:
    return np.asarray(picture(path.read_bytes()))


def drawn(engine: carpool.Engine, prompt: str, **parameters: Any) -> NDArray[np.uint8]:
    [output] = engine.generate(prompt, **parameters)
    return np.asarray(output.images[0])


def done(engine: carpool.Engine, job: BackgroundJob) -> BackgroundJob:
    ended = engine.jobs.wait(job.id, 50)
    assert (ended.state, ended.progress, ended.error) == ("completed", 100, None)
    return ended


def under_way(engine: carpool.Engine, job: BackgroundJob) -> None:
    """Wait until it has made steps."""
    eventually(lambda: engine.jobs.get(job.id).progress > 0, 30, "it is under way")


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


# What a job gives


def test_a_job_gives_files_of_the_pictures_that_generate_gives(engine: carpool.Engine) -> None:
    accepted = engine.jobs.submit("a cat", n=3, seed=7, **DRAW)
    assert accepted.state == "queued"

    ended = done(engine, accepted)

    assert list(ended.seeds) == list(accepted.seeds) == [7, 8, 9]
    assert [path.name for path in ended.files] == ["0.png", "1.png", "2.png"]
    for seed, path in zip(ended.seeds, ended.files, strict=True):
        gap = pixels(path).astype(int) - drawn(engine, "a cat", seed=seed, **DRAW)
        assert abs(gap).max() <= 1


def test_files_come_in_the_order_of_the_seeds_also_beyond_ten(engine: carpool.Engine) -> None:
    job = engine.jobs.submit(carpool.Request("a cat", seed=0, **DRAW), n=11)

    seeds = [read_settings(path.read_bytes())["seed"] for path in done(engine, job).files]

    assert seeds == list(range(11))


@pytest.mark.parametrize("mask_mode", [None, "L", "1"])
def test_a_job_begins_from_the_pictures_that_it_brings(
    tmp_path: Path, mask_mode: str | None
) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    given: dict[str, Any] = {**DRAW, "image": Image.fromarray(noise), "strength": 0.7, "seed": 3}
    if mask_mode is not None:
        mask = np.zeros((32, 32), np.uint8)
        mask[8:24, 4:20] = 255
        given["mask_image"] = Image.fromarray(mask).convert(mask_mode)

    with load(max_running=1, state_dir=tmp_path) as engine:
        under_way(engine, engine.jobs.submit("a cat", **LONG))
        job = engine.jobs.submit("a dog", **given)
    with load(max_running=1, state_dir=tmp_path) as engine:
        [path] = done(engine, job).files
        assert np.array_equal(pixels(path), drawn(engine, "a dog", **given))
    assert not [*(tmp_path / "inputs").iterdir()]


def test_pictures_have_the_format_that_was_asked_for(engine: carpool.Engine) -> None:
    [path] = done(engine, engine.jobs.submit("a cat", output_format="webp", **DRAW)).files

    assert path.suffix == ".webp"
    assert picture(path.read_bytes()).format == "WEBP"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"metadata_prompt": True}, {"seed": 5, "prompt": "a cat", "width": 32}),
        ({}, {"seed": 5, "prompt": None, "width": 32}),
        ({"metadata": False}, {"seed": None, "prompt": None, "width": None}),
    ],
    ids=str,
)
def test_files_say_of_themselves_what_the_settings_allow(
    settings: dict[str, bool], told: dict[str, Any]
) -> None:
    with load(**settings) as engine:
        [path] = done(engine, engine.jobs.submit("a cat", seed=5, **DRAW)).files
        said = read_settings(path.read_bytes())

    assert {name: said.get(name) for name in told} == told


def test_a_job_of_videos_gives_their_files() -> None:
    parameters = {k: v for k, v in ARGUMENTS["wan21_t2v"].items() if k != "output_type"}
    with load("wan21_t2v") as engine:
        job = done(engine, engine.jobs.submit("a cat", n=2, seed=1, fps=8, **parameters))
        [output] = engine.generate("a cat", seed=1, output_type="pil", **parameters)

        assert [path.name for path in job.files] == ["0.mp4", "1.mp4"]
        with av.open(str(job.files[0])) as container:
            assert container.streams.video[0].average_rate == 8
            shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

    assert len(shown) == len(output.frames[0])
    for frame, made in zip(shown, output.frames[0], strict=True):
        gap = frame.astype(int) - np.asarray(made)
        assert abs(gap).mean() < 16  # 4:2:0 blurs the colours of noise


# Jobs under way


def test_a_job_is_waited_for_no_longer_than_wanted_and_ends_when_cancelled(
    engine: carpool.Engine,
) -> None:
    job = engine.jobs.submit("a cat", **ENDLESS)
    with pytest.raises(TimeoutError):
        engine.jobs.wait(job.id, 0.01)
    under_way(engine, job)
    assert engine.jobs.get(job.id).state == "in_progress"

    with ThreadPoolExecutor(1) as other:
        waited = other.submit(engine.jobs.wait, job.id)
        cancelled = engine.jobs.cancel(job.id)

    assert waited.result().state == cancelled.state == "cancelled"
    assert cancelled.error is not None
    assert cancelled.error["message"] == "the job was cancelled"
    assert not cancelled.files


def test_a_removed_job_is_gone_with_its_files(engine: carpool.Engine) -> None:
    job = done(engine, engine.jobs.submit("a cat", **DRAW))
    assert job.id in [one.id for one in engine.jobs.list()]

    engine.jobs.remove(job.id)

    assert not job.files[0].exists()
    assert job.id not in [one.id for one in engine.jobs.list()]
    for ask in (engine.jobs.get, engine.jobs.wait, engine.jobs.cancel, engine.jobs.remove):
        with pytest.raises(errors.JobNotFound, match=f"there is no job '{job.id}'"):
            ask(job.id)


def test_the_list_has_the_newest_jobs_first(engine: carpool.Engine) -> None:
    ids = [engine.jobs.submit("a cat", **DRAW).id for _ in range(3)]

    assert [job.id for job in engine.jobs.list(limit=2)] == [ids[2], ids[1]]
    for job_id in ids:
        engine.jobs.wait(job_id, 50)


def test_a_job_that_fails_says_why(engine: carpool.Engine) -> None:
    job = engine.jobs.submit("a cat", timeout_s=1e-9, **DRAW)

    ended = engine.jobs.wait(job.id, 50)

    assert ended.state == "expired"
    assert ended.error is not None
    assert ended.error["code"] == "deadline_exceeded"


def test_more_jobs_than_may_wait_are_refused() -> None:
    with load(max_running=1, max_queue=1) as engine:
        under_way(engine, engine.jobs.submit("a cat", **ENDLESS))
        engine.jobs.submit("a cat", **DRAW)
        with pytest.raises(errors.Overloaded, match="1 jobs wait already"):
            engine.jobs.submit("a cat", **DRAW)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"steps": 3}, errors.UnknownParameter, "has no parameter 'steps'"),
        ({"n": 0}, errors.InvalidValue, "n=0: must be a whole number from 1 to 1000"),
        ({"output_format": "gif"}, errors.InvalidValue, "must be one of png, jpeg, webp"),
        ({"fps": 0}, errors.InvalidValue, "fps=0: must be from 1 to 240"),
        ({"image": np.zeros((1, 32, 32, 3), np.float32)}, errors.InvalidValue, "keeps PIL images"),
        ({"output_type": "latent"}, errors.UnsupportedParameter, "use output_format"),
        ({"prompt_embeds": np.zeros(3)}, errors.UnsupportedParameter, "cannot be sent as JSON"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_job_is_refused_at_once(
    engine: carpool.Engine, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = engine.jobs.list()

    with pytest.raises(error, match=message):
        engine.jobs.submit("a cat", **{**DRAW, **wrong})

    assert engine.jobs.list() == before


# The process ends


def test_jobs_that_are_not_done_when_the_engine_closes_run_in_the_next(tmp_path: Path) -> None:
    with load(max_running=1, state_dir=tmp_path) as engine:
        running, waiting = (engine.jobs.submit("a cat", seed=s, **LONG) for s in (1, 2))
        under_way(engine, running)

    with load(max_running=1, state_dir=tmp_path) as engine:
        assert "carpool-jobs" in threads()  # nobody had to ask
        for job in (running, waiting):
            [path] = done(engine, job).files
            assert np.array_equal(pixels(path), drawn(engine, "a cat", seed=job.seeds[0], **LONG))

    with load(state_dir=tmp_path) as engine:
        assert [job.state for job in engine.jobs.list()] == ["completed"] * 2


def test_an_engine_that_failed_leaves_its_jobs_to_the_next(tmp_path: Path) -> None:
    with load(state_dir=tmp_path) as engine:
        jobs = engine.jobs
        engine._loop.close()
        engine._thread.join()
        job = jobs.submit("a cat", **DRAW)
        with pytest.raises(TimeoutError):
            jobs.wait(job.id, 0.1)

    with load(state_dir=tmp_path) as engine:
        done(engine, job)


def test_no_thread_is_started_before_a_job_is_asked_for_and_none_is_left(tmp_path: Path) -> None:
    served("flux")  # which starts a thread of tqdm's
    before = set(threading.enumerate())  # some of them, of other tests, may end meanwhile
    for settings in ({}, {"state_dir": tmp_path / "jobs"}):
        with load(**settings) as engine:
            assert len({*threading.enumerate()} - before) == 2  # the engine's own, and its watch
            done(engine, engine.jobs.submit("a cat", **DRAW))
            assert "carpool-jobs" in threads()

        eventually(lambda: {*threading.enumerate()} <= before, 5, "its threads are gone")


def test_a_closed_engine_has_no_jobs_and_tells_those_that_wait() -> None:
    with load() as engine, ThreadPoolExecutor(1) as other:
        jobs = engine.jobs
        job = jobs.submit("a cat", **ENDLESS)
        under_way(engine, job)
        waited = other.submit(jobs.wait, job.id)
        engine.close()
        with pytest.raises(errors.Draining, match="the engine was closed"):
            waited.result(20)

    with pytest.raises(errors.Draining, match="the engine was closed"):
        jobs.submit("a cat", **DRAW)
    with pytest.raises(errors.Draining, match="the engine was closed"):
        jobs.get(job.id)
    engine.close()  # a second time is harmless
    with load() as engine:
        pass
    with pytest.raises(errors.Draining, match="the engine was closed"):
        engine.jobs  # noqa: B018


def test_settings_of_jobs_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.SettingRejected, match="job_ttl=0: must be at least 1"):
        carpool.load("/nowhere", job_ttl=0)
    with pytest.raises(
        errors.SettingRejected, match="unknown setting 'state_dirs'; did you mean 'state_"
    ):
        carpool.load("/nowhere", state_dirs=tmp_path)  # type: ignore[call-arg]
    with pytest.raises(errors.StoreFailed, match="cannot hold jobs"):
        carpool.load("/nowhere", state_dir=tmp_path / "file")
    with pytest.raises(errors.LoadFailed):
        carpool.load("/nowhere", state_dir=tmp_path / "folder")
    with (
        load(state_dir=tmp_path / "folder"),  # it was let go of
        pytest.raises(errors.StoreFailed, match="another server uses it"),
    ):
        carpool.load("/nowhere", state_dir=tmp_path / "folder")


def test_the_example_draws_each_picture_once_however_often_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jobs.py", str(tmp_path)])

    told = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        told.append(capsys.readouterr().out.split())

    assert told[0] == told[1]
    paths = [Path(word) for word in told[0] if word != "completed"]
    assert len(paths) == len(set(paths)) == 6
    for path in paths:
        image = picture(path.read_bytes())
        assert shows(image, read_settings(path.read_bytes())["prompt"])
