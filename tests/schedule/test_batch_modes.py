"""Every batching mode gives everybody the picture of the plain pipeline, and batches as it says."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from carpool.config import BatchingMode
from carpool.errors import TooLate
from carpool.request.expand import grouped, repeated
from carpool.request.parameters import check
from carpool.telemetry.activity import RunningRequest
from carpool.types import Request
from support.engine_driver import CLOSE, Drive, Recorder, VirtualClock, driving, gap, solo
from support.tiny import ARGUMENTS

PROMPT = "a photo of a cat"
BASE = {**ARGUMENTS["flux"], "num_inference_steps": 3}
MIXED: list[dict[str, Any]] = [
    {"num_inference_steps": 4},
    {"num_inference_steps": 4},
    {"num_inference_steps": 2, "guidance_scale": 2.0},
    {"num_inference_steps": 4},
    {"num_inference_steps": 3, "width": 32, "height": 32},
]


class Timed:
    """Lets forwards take time on a virtual clock: so much, and more for each row."""

    def __init__(self, drive: Drive, clock: VirtualClock, *, fixed_s: float, row_s: float) -> None:
        self._run, self._clock = drive.engine.runner.fuser.run, clock
        self._fixed_s, self._row_s, self.slower = fixed_s, row_s, 1.0
        drive.engine.runner.fuser.run = self  # type: ignore[method-assign]

    def __call__(self, calls: Any, rows: Any) -> Any:
        self._clock.pass_by(self.slower * (self._fixed_s + self._row_s * sum(rows)))
        return self._run(calls, rows)


def submit(drive: Drive, requests: list[dict[str, Any]] = MIXED) -> list[Recorder]:
    return [drive.submit(PROMPT, **{**BASE, **one}, seed=i) for i, one in enumerate(requests)]


@pytest.mark.parametrize("mode", get_args(BatchingMode))
def test_mixed_requests_get_what_they_get_alone_in_every_mode(mode: BatchingMode) -> None:
    with driving("flux", mode=mode, batching_max_size=4, max_num_seqs=4) as drive:
        heard = submit(drive)
        drive.finish()

    for seed, (recorder, one) in enumerate(zip(heard, MIXED, strict=True)):
        assert gap(recorder.image, solo("flux", PROMPT, **{**BASE, **one}, seed=seed)) < CLOSE


def test_dynamic_runs_the_compatible_of_the_whole_line_together_to_the_end() -> None:
    with driving("flux", mode="dynamic", batching_max_size=4) as drive:
        heard = submit(drive)
        drive.turn_until(lambda: heard[0].is_done)
        assert [one.is_done for one in heard] == [True, True, False, True, False]
        drive.finish()
        batches = drive.engine.statistics()["batches"]

    assert drive.widths("transformer") == [3] * 4 + [1] * 2 + [1] * 3
    assert batches["dispatches"] == 3


def test_request_mode_takes_the_line_as_it_stands() -> None:
    with driving("flux", mode="request", max_num_seqs=4) as drive:
        submit(drive)
        drive.finish()

    assert drive.widths("transformer") == [2] * 4 + [1] * 2 + [1] * 4 + [1] * 3


def test_a_dynamic_batch_waits_for_others_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with (
        caplog.at_level(logging.INFO, "carpool"),
        driving(
            "flux",
            clock=clock,
            mode="dynamic",
            batching_max_size=4,
            batching_delay_ms=5.0,
            enable_batching_metrics=True,
        ) as drive,
    ):
        drive.submit(**BASE)
        assert not drive.engine.step()  # its delay runs
        assert drive.engine.scheduler.wake_s == pytest.approx(0.005)
        clock.pass_by(0.004)
        drive.submit(**BASE, seed=1)
        assert not drive.engine.step()
        clock.pass_by(0.001)
        drive.finish()

    assert set(drive.widths("transformer")) == {2}
    assert [record.message for record in caplog.records if "atch" in record.message] == [
        "Batch admission enabled: user_max=4, device_memory=0.0GiB, rules=0",
        "Dynamic batch metrics enabled; logging summary every 5 dispatches.",
        "Dynamic batch dispatch: requests=2, outputs=2/4, user_max_outputs=4, queue_wait=5.00ms, "
        "stop_reason=delay",
        "Processed dynamic batch of 2/4 request(s) with max_delay=5.00ms",
        "Dynamic batch stats (last 1 dispatches): avg_requests=2.00, avg_outputs=2.00, "
        "merged_rate=100.0%, full_rate=0.0%, utilization=50.0%, wait_avg=5.00ms, wait_p95=5.00ms, "
        "top_rejects=none",
    ]


def test_a_batching_config_caps_what_its_rules_match(tmp_path: Path) -> None:
    file = tmp_path / "caps.json"
    rule = {"model_contains": "Flux", "resolution": "64x64", "max_batch_size": 2}
    file.write_text(json.dumps({"schema_version": 1, "rules": [rule]}))

    with driving("flux", mode="dynamic", batching_max_size=8, batching_config=str(file)) as drive:
        for size in (64, 64, 64, 32, 32, 32):
            drive.submit(**{**BASE, "width": size, "height": size})
        drive.finish()

    assert sorted(drive.widths("transformer")) == [1] * 3 + [2] * 3 + [3] * 3


def test_continuous_learns_that_rows_are_free_and_rides_wide() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, mode="continuous", max_batch_size=6) as drive:
        Timed(drive, clock, fixed_s=1.0, row_s=0.01)
        submit(drive, [{"num_inference_steps": 30}] * 6)
        drive.finish()

    widths = drive.widths("transformer")
    assert widths[0] == 6  # from the first one on
    assert widths.count(6) >= 10
    assert widths.count(1) <= 4  # what it took to learn, and the last steps


def test_continuous_learns_that_rows_gain_nothing_and_serves_one_after_the_other() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, mode="continuous") as drive:
        Timed(drive, clock, fixed_s=0.0, row_s=1.0)
        heard = submit(drive, [{"num_inference_steps": 20}] * 3)
        drive.turn_until(lambda: any(one.is_done for one in heard))
        assert sum(one.step > 15 for one in heard) < 3
        drive.finish()

    assert sum(width > 1 for width in drive.widths("transformer")) <= 24  # what it took to learn


def test_a_busy_machine_makes_no_request_look_longer_and_every_deadline_nearer() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, mode="continuous") as drive:
        timed = Timed(drive, clock, fixed_s=1.0, row_s=0.0)
        for slower in (1.0, 2.0):
            timed.slower = slower
            drive.submit(**BASE | {"num_inference_steps": 40})
            drive.finish()

        with pytest.raises(TooLate, match=r"deadline_s=5 .* it would take (5\.[5-9]|6)"):
            drive.submit(**BASE, deadline_s=5)
        drive.submit(**BASE)
        drive.turn_until(lambda: any(one.phase == "denoise" for one in shown(drive)))
        [state], [one] = drive.engine.running.states, shown(drive)
        assert state.parked is not None
        assert state.parked.left_s == pytest.approx(3.0, rel=0.1)
        assert one.left_s == pytest.approx(6.0, rel=0.1)  # who watches is told what it takes now
        drive.finish()


def shown(drive: Drive) -> Sequence[RunningRequest]:
    return drive.engine.requests().running


def test_with_admit_late_a_deadline_that_cannot_be_met_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, mode="continuous", admit_late=True) as drive:
        Timed(drive, clock, fixed_s=1.0, row_s=0.0)
        drive.submit(**BASE)
        drive.finish()
        late = drive.submit(**BASE, deadline_s=2)
        drive.finish()

    assert late.error is None
    assert "cannot be met" in caplog.text


def test_who_has_priority_goes_first_where_rows_gain_nothing() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, mode="continuous") as drive:
        Timed(drive, clock, fixed_s=0.0, row_s=1.0)
        drive.submit(**{**BASE, "num_inference_steps": 12})  # to learn from
        drive.finish()
        usual = drive.submit(**{**BASE, "num_inference_steps": 6}, seed=1)
        urgent = drive.submit(**{**BASE, "num_inference_steps": 8}, seed=2, priority=5)
        drive.turn_until(lambda: usual.is_done or urgent.is_done)

        assert urgent.is_done
        assert not usual.is_done


def test_statistics_say_why_forwards_were_not_wider() -> None:
    with driving("flux", mode="continuous") as drive:
        submit(drive)
        drive.finish()
        stats = drive.engine.statistics()

    assert {one["why"].split(":")[0] for one in stats["not_wider"]} <= {
        "cap", "knee", "untried", "nobody", "differs", "group"
    }  # fmt: skip
    assert sum(one["count"] for one in stats["not_wider"]) == sum(
        one["count"] for one in stats["forwards"]
    )
    assert stats["memory"]["peak_bytes"] > 10_000_000


@pytest.mark.parametrize(
    "settings",
    [{"mode": "dynamic", "batching_max_size": 12}, {"mode": "request", "max_num_seqs": 12}],
    ids=["dynamic", "request"],
)
@pytest.mark.parametrize("model", ["flux", "sdxl"])  # guidance embedded; two rows a request
def test_a_batch_wider_than_max_batch_size_is_one_forward(
    model: str, settings: dict[str, Any]
) -> None:
    arguments = {**ARGUMENTS[model], "num_inference_steps": 1}
    with driving(model, max_batch_size=2, **settings) as drive:
        for seed in range(10):
            drive.submit(PROMPT, **arguments, seed=seed)
        drive.finish()

    denoiser = "transformer" if model == "flux" else "unet"
    assert set(drive.widths(denoiser)) == {10}  # requests


def ask(drive: Drive, outputs: int, name: str, **values: Any) -> list[Recorder]:
    """The outputs of one request."""
    whole = Request(PROMPT, request_id=name, seed=1, **{**BASE, **values})
    single = [check(drive.engine.loaded.card, one) for one in repeated(whole, outputs)]
    heard = [Recorder() for _ in single]
    for job, recorder in zip(grouped(single, outputs), heard, strict=True):
        drive.engine.submit(job, recorder)
    return heard


def test_dynamic_runs_a_request_of_more_outputs_than_its_cap_as_one_batch() -> None:
    with driving("flux", mode="dynamic", batching_max_size=4) as drive:
        ask(drive, 6, "six")
        ask(drive, 2, "two")
        ask(drive, 2, "two more")
        ask(drive, 1, "one")
        drive.finish()
        batches = drive.engine.statistics()["batches"]

    assert drive.widths("transformer") == [6] * 3 + [4] * 3 + [1] * 3
    assert (batches["dispatches"], batches["requests"], batches["outputs"]) == (3, 4, 11)
    assert batches["stop_reasons"] == {"config_cap": 2, "delay": 1}


def test_request_mode_counts_requests_and_not_their_outputs() -> None:
    with driving("flux", mode="request", max_num_seqs=2) as drive:
        for name in ("first", "second", "third"):
            ask(drive, 3, name)
        ask(drive, 1, "fourth")
        drive.finish()

    assert drive.widths("transformer") == [6] * 3 + [3] * 3 + [1] * 3


@pytest.mark.parametrize("mode", ["dynamic", "request"])
def test_a_request_whose_outputs_do_not_all_come_runs_without_them(mode: BatchingMode) -> None:
    clock = VirtualClock()
    with driving("flux", mode=mode, clock=clock, batching_max_size=8, max_num_seqs=8) as drive:
        whole = Request(PROMPT, request_id="four", seed=1, **BASE)
        single = [check(drive.engine.loaded.card, one) for one in repeated(whole, 4)]
        for job in grouped(single, 4)[:2]:
            drive.engine.submit(job, Recorder())
        assert not drive.engine.step()
        assert drive.engine.scheduler.wake_s == pytest.approx(0.1)
        clock.pass_by(0.1)
        drive.finish()

    assert set(drive.widths("transformer")) == {2}
