"""The lines of `--enable-batching-metrics`: their form, and that their figures are true."""

import re

from hypothesis import given
from hypothesis import strategies as st

from carpool.telemetry.sglang_metrics import Dispatches, processed, started


def test_a_dispatch_is_a_line_as_the_docs_show_it() -> None:
    lines = Dispatches("docs").record(2, 8, 8, 0.00512, "delay", {})

    assert lines == [
        "Dynamic batch dispatch: size=2/8, user_max=8, queue_wait=5.12ms, stop_reason=delay"
    ]


def test_lines_are_those_of_sglang_diffusion_0_5_23() -> None:
    """Recorded from its scheduler, fed with the same dispatches."""
    dispatches = Dispatches()
    reject = {"sampling_params.width": 1}
    lines = [
        *dispatches.record(2, 8, 8, 0.00512, "sampling_params.width", reject, requests=1),
        *dispatches.record(8, 8, 8, 0.001, "config_cap:8", {}, requests=4),
        *dispatches.record(9, 4, 8, 0.002, "config_cap:4", {}, requests=1),
        *dispatches.record(1, 1, 8, 0.0, "head:image_conditioning", {}, requests=1),
        *dispatches.record(1, 8, 8, 0.003, "delay", {}, requests=1),
    ]

    assert lines == [
        "Dynamic batch dispatch: requests=1, outputs=2/8, user_max_outputs=8, queue_wait=5.12ms, "
        "stop_reason=sampling_params.width",
        "Dynamic batch dispatch: requests=4, outputs=8/8, user_max_outputs=8, queue_wait=1.00ms, "
        "stop_reason=config_cap:8",
        "Dynamic batch dispatch: requests=1, outputs=9/4, user_max_outputs=8, queue_wait=2.00ms, "
        "stop_reason=config_cap:4",
        "Dynamic batch dispatch: requests=1, outputs=1/1, user_max_outputs=8, queue_wait=0.00ms, "
        "stop_reason=head:image_conditioning",
        "Dynamic batch dispatch: requests=1, outputs=1/8, user_max_outputs=8, queue_wait=3.00ms, "
        "stop_reason=delay",
        "Dynamic batch stats (last 5 dispatches): avg_requests=1.60, avg_outputs=4.20, "
        "merged_rate=20.0%, full_rate=60.0%, utilization=72.4%, wait_avg=2.22ms, wait_p95=5.12ms, "
        "top_rejects=sampling_params.width=1",
    ]
    assert dispatches.window() == []


def test_at_size_1_no_batch_is_full() -> None:
    dispatches = Dispatches()
    dispatches.record(1, 1, 1, 0.0, "dynamic_disabled", {}, requests=1)

    [line] = dispatches.window()

    assert line == (
        "Dynamic batch stats (last 1 dispatches): avg_requests=1.00, avg_outputs=1.00, "
        "merged_rate=0.0%, full_rate=0.0%, utilization=100.0%, wait_avg=0.00ms, wait_p95=0.00ms, "
        "top_rejects=none"
    )


def test_the_start_and_a_merged_batch_are_told_as_there() -> None:
    metrics = "Dynamic batch metrics enabled; logging summary every 5 dispatches."

    assert started(8, 79.25, 2) == [
        "Batch admission enabled: user_max=8, device_memory=79.2GiB, rules=2", metrics
    ]  # fmt: skip
    assert started(1, None, 0) == [metrics]
    assert processed(3, 8, 0.005) == (
        "Processed dynamic batch of 3/8 request(s) with max_delay=5.00ms"
    )


def test_every_fifth_dispatch_brings_the_summary_of_those_five() -> None:
    dispatches = Dispatches("docs")
    given_ = [(1, 0.004), (2, 0.001), (8, 0.002), (2, 0.0), (1, 0.003)]

    lines = [
        dispatches.record(size, 8, 8, wait_s, "delay", {"sampling_params.width": 1})
        for size, wait_s in given_
    ]

    assert [len(each) for each in lines] == [1, 1, 1, 1, 2]
    assert lines[-1][1] == (
        "Dynamic batch stats (last 5 dispatches): avg_size=2.80, merged_rate=60.0%, "
        "full_rate=20.0%, utilization=35.0%, wait_avg=2.00ms, wait_p95=4.00ms, "
        "top_rejects=sampling_params.width=5"
    )
    again = [dispatches.record(4, 4, 8, 0.0, "config_cap:4", {}) for _ in range(5)][-1]
    assert again[1].startswith(
        "Dynamic batch stats (last 5 dispatches): avg_size=4.00, merged_rate=100.0%, "
        "full_rate=100.0%, utilization=100.0%, "
    )
    assert again[1].endswith("top_rejects=none")


def test_the_five_commonest_rejects_are_named_with_their_numbers() -> None:
    dispatches = Dispatches("docs")
    for _ in range(4):
        dispatches.record(1, 4, 4, 0.0, "delay", {})

    rejects = {"f": 1, "config_cap:4": 2, "e": 3, "d": 4, "c": 5, "b": 6}
    line = dispatches.record(1, 4, 4, 0.0, "delay", rejects)[1]

    assert line.endswith("top_rejects=b=6, c=5, d=4, e=3, config_cap:4=2")


def test_reasons_are_counted_by_kind_so_that_there_are_few() -> None:
    dispatches = Dispatches()
    for most in range(7):
        dispatches.record(1, 4, 4, 0.0, f"config_cap:{most}", {f"cost_budget:9>{most}": 2})

    summary = dispatches.summary()

    assert summary["stop_reasons"] == {"config_cap": 7}
    assert summary["rejects"] == {"cost_budget": 14}


def test_before_the_first_dispatch_all_figures_are_nothing() -> None:
    summary = Dispatches().summary()

    assert summary.pop("stop_reasons") == summary.pop("rejects") == {}
    assert set(summary.values()) == {0}


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 8), st.floats(0, 10)), min_size=1, max_size=12
    )
)
def test_figures_stay_in_their_bounds_and_nothing_is_lost(
    batches: list[tuple[int, int, float]],
) -> None:
    dispatches = Dispatches()
    lines = [
        line
        for size, cap, wait_s in batches
        for line in dispatches.record(size, cap, 8, wait_s, "delay", {})
    ]

    summary = dispatches.summary()
    assert summary["dispatches"] == len(batches)
    assert summary["outputs"] == sum(size for size, _, _ in batches)
    assert len(lines) == len(batches) + len(batches) // 5
    for rate in ("merged_rate", "full_rate", "utilization"):
        assert 0 <= summary[rate] <= 1
    assert 0 <= summary["wait_avg_s"] <= max(wait_s for _, _, wait_s in batches)
    for line in lines:
        assert re.fullmatch(
            r"Dynamic batch (dispatch: requests=\d+, outputs=\d+/\d+|stats \(last 5).*", line
        )
