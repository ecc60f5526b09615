"""`carpool.load(workers=2)`: the Python API before worker processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import errors
from support.server_process import MODEL

SMALL: dict[str, Any] = {
    "width": 64, "height": 64, "max_sequence_length": 48, "num_inference_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[carpool.Engine]:
    with carpool.load(MODEL, workers=2, device="cpu") as one:
        yield one


def test_requests_give_what_an_engine_in_this_process_gives(engine: carpool.Engine) -> None:
    outputs = engine.generate(["a red circle", "a blue star"], seed=5, **SMALL)
    with carpool.load(MODEL) as own:
        plain = own.generate(["a red circle", "a blue star"], seed=5, **SMALL)

    for mine, its in zip(outputs, plain, strict=True):
        assert mine.seed == its.seed
        pairs = zip(mine.images[0].tobytes(), its.images[0].tobytes(), strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 1
        assert mine.timings.total_s > 0


def test_a_request_can_be_followed_cancelled_and_explained(engine: carpool.Engine) -> None:
    handle = engine.submit("a red circle", **SMALL)
    events = list(handle)
    kinds = [event.kind for event in events]
    assert kinds[:2] == ["queued", "started"]
    assert kinds[-1] == "finished"
    steps = [event.step for event in events if event.kind == "step"]
    assert steps[-1] == 3  # the last one; short ones before it may share an event
    explained = engine.explain(handle.request_id)
    assert explained is not None
    assert explained["status"] == "ok"

    long = engine.submit("a red circle", **{**SMALL, "num_inference_steps": 900})
    long.cancel()
    with pytest.raises(errors.Cancelled):
        long.result(30)


def test_jobs_become_files(engine: carpool.Engine) -> None:
    job = engine.jobs.submit("a red circle", n=2, **SMALL)

    done = engine.jobs.wait(job.id, timeout=60)

    assert (done.state, len(done.files)) == ("completed", 2)


def test_what_cannot_cross_to_another_process_is_refused(
    engine: carpool.Engine, tmp_path: Path
) -> None:
    with pytest.raises(errors.UnsupportedParameter, match="give PIL images"):
        engine.submit("a red circle", output_type="np", **SMALL)
    with pytest.raises(errors.LoraRejected, match="no file"):
        engine.add_lora("nothing", tmp_path / "nothing.safetensors")
    pipeline: Any = object()
    with pytest.raises(errors.SettingRejected, match="give its hub id or folder"):
        carpool.load(pipeline, workers=2)
    with pytest.raises(errors.LoadFailed, match="no model at"):
        carpool.load("shaeps", workers=2)
