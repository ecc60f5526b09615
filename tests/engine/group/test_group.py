"""Two ranks on the CPU compute each forward of a denoiser: pictures are plain diffusers'.

`numerics=fast` promises here what it promises of one process: the difference from plain diffusers,
which is of the last bits of sums, is below `CLOSE`.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import Cancelled, PipelineFailed
from support.engine_driver import CLOSE, Drive, Recorder, driving, gap, solo
from support.lora_files import adapter
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.timeout(180)  # a rank imports torch in a process of its own
LONG = "a painting of an astronaut riding a horse in the rain, with a red balloon and the moon"
REQUESTS: dict[str, tuple[int, str, dict[str, Any]]] = {  # turn of arrival, prompt, arguments
    "first": (0, "a photo of a cat", {"seed": 1, "num_inference_steps": 6}),
    "guided": (0, "a dog", {"seed": 2, "num_inference_steps": 5, "guidance_scale": 7.0}),
    "negative": (0, "the moon", {"seed": 3, "num_inference_steps": 4, "true_cfg_scale": 3.0,
                                 "negative_prompt": "bad, blurry"}),
    "late": (4, LONG, {"seed": 4, "num_inference_steps": 3, "guidance_scale": 2.5}),
    "odd": (4, "a boat", {"seed": 5, "num_inference_steps": 3, "max_sequence_length": 47}),
    "large": (5, "a tree", {"seed": 6, "num_inference_steps": 2, "width": 80, "height": 48}),
}  # fmt: skip


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    with driving(checkpoint("flux"), context_parallel=2, max_batch_size=12) as drive:
        yield drive


def group(drive: Drive) -> dict[str, Any]:
    found: dict[str, Any] = drive.engine.statistics()["group"]
    return found


def submit(drive: Drive, prompt: str, **arguments: Any) -> Recorder:
    return drive.submit(prompt, **{**ARGUMENTS["flux"], **arguments})


def test_mixed_requests_share_forwards_of_all_ranks_and_each_is_right(drive: Drive) -> None:
    heard: dict[str, Recorder] = {}
    for turn in range(6):
        for name, (arrives_at, prompt, arguments) in REQUESTS.items():
            if arrives_at == turn:
                heard[name] = submit(drive, prompt, **arguments)
        drive.turn()
    drive.finish()

    for name, (_, prompt, arguments) in REQUESTS.items():
        assert gap(heard[name].image, solo("flux", prompt, **arguments)) < CLOSE, name
    assert drive.widest("transformer") >= 3
    denoised = [one for one in drive.forwards if one.component == "transformer"]
    assert group(drive)["forwards"] == len(denoised)
    assert [one["rank"] for one in group(drive)["ranks"]] == [0, 1]


def test_one_that_fails_in_all_ranks_or_cannot_be_sent_or_is_cancelled_ends_alone(
    drive: Drive,
) -> None:
    """One token of text cannot be divided among two ranks; an object cannot be sent."""
    short = submit(drive, "a cat", num_inference_steps=2, max_sequence_length=1)
    strange = submit(drive, "a cat", num_inference_steps=2, joint_attention_kwargs={"a": object()})
    cancelled = submit(drive, "a monkey", seed=3, num_inference_steps=9)
    good = submit(drive, "a dog", seed=2, num_inference_steps=4)
    drive.turn_until(lambda: cancelled.step >= 2)
    drive.engine.cancel(cancelled.events[0].request_id)
    drive.finish()

    assert isinstance(short.error, PipelineFailed)
    assert "Cannot shard tensor of size" in str(short.error)
    assert isinstance(strange.error, PipelineFailed)
    assert "is given a object, which cannot be sent to the other ranks" in str(strange.error)
    assert isinstance(cancelled.error, Cancelled)
    assert gap(good.image, solo("flux", "a dog", seed=2, num_inference_steps=4)) < CLOSE


def test_constants_are_sent_once_and_forgotten_with_their_requests(drive: Drive) -> None:
    before = group(drive)
    alone = submit(drive, "a cat", num_inference_steps=8)
    drive.finish()
    after = group(drive)
    submit(drive, "a cat", num_inference_steps=1)  # tells what may be forgotten
    drive.finish()

    assert alone.error is None
    steps = after["forwards"] - before["forwards"]
    tensors, known = (after[name] - before[name] for name in ("tensors", "known"))
    assert steps == 8
    assert known >= tensors - 2 * steps - 5  # latents and timesteps are new at every step
    assert group(drive)["kept_bytes"] < 200_000


def test_adapters_by_row_are_computed_by_all_ranks(drive: Drive, tmp_path: Path) -> None:
    """Rows with one, with another scale, and without share forwards, as they do in one process."""
    file = adapter(tmp_path, "flux", seed=1)
    drive.engine.add_lora("style", file)
    scales = (None, 1.0, 0.5)
    heard = [
        submit(drive, "a cat", seed=n, num_inference_steps=3, **with_adapter(scale))
        for n, scale in enumerate(scales)
    ]
    drive.finish()
    shared = drive.forwards[-2].requests

    with driving("flux", lora=(f"style={file}",)) as one_process:
        alone = []
        for n, scale in enumerate(scales):
            alone.append(
                submit(one_process, "a cat", seed=n, num_inference_steps=3, **with_adapter(scale))
            )
            one_process.finish()

    for mine, theirs in zip(heard, alone, strict=True):
        assert gap(mine.image, theirs.image) < CLOSE
    assert gap(heard[1].image, solo("flux", "a cat", seed=1, num_inference_steps=3)) > 100 * CLOSE
    assert shared == 3


def with_adapter(scale: float | None) -> dict[str, Any]:
    return {} if scale is None else {"lora": [{"id": "style", "scale": scale}]}


def test_a_request_that_changes_the_denoiser_is_refused_not_drawn_wrongly(drive: Drive) -> None:
    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe.transformer.proj_out.weight.mul_(0.0)
        return tensors

    changing = submit(drive, "a cat", num_inference_steps=3, callback_on_step_end=change)
    good = submit(drive, "a dog", seed=2, num_inference_steps=4)
    drive.finish()

    assert isinstance(changing.error, PipelineFailed)
    assert "which the other ranks of context_parallel cannot follow" in str(changing.error)
    assert gap(good.image, solo("flux", "a dog", seed=2, num_inference_steps=4)) < CLOSE


def test_a_follower_that_dies_ends_the_group_at_once(drive: Drive) -> None:
    """The last test of this group."""
    lost = threading.Event()
    loaded: Any = drive.engine.loaded
    loaded.group.at_loss = lost.set
    running = submit(drive, "a cat", num_inference_steps=50)
    drive.turn_until(lambda: running.step >= 2)

    os.kill(group(drive)["ranks"][1]["pid"], signal.SIGKILL)

    assert lost.wait(5)
    drive.finish()
    assert isinstance(running.error, PipelineFailed)  # in a worker the process has ended by now
