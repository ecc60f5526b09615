"""The load client: when it sends, what it measures, what it reports. All in virtual time."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from carpool.errors import CarpoolError
from carpool_lab.load.client import RequestError
from carpool_lab.load.generator import RequestResult, SoloLatencies, run, samples, warm_up, with_slo
from carpool_lab.load.report import as_json, block, summarise
from carpool_lab.workload import Arrival, kind_of

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self._now_s += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


def virtually(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def one_by_one(*seconds: float) -> Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]:
    """A server that works on one request at a time: request i takes `seconds[i]`."""
    takes, turn = iter(seconds), asyncio.Lock()

    async def ask(body: Mapping[str, Any]) -> dict[str, Any]:
        async with turn:
            await asyncio.sleep(next(takes))
        return {}

    return ask


def due(*times_s: float, **body: Any) -> list[Arrival]:
    return [Arrival(at_s, body) for at_s in times_s]


def latencies(outcomes: Sequence[RequestResult]) -> list[float]:
    return [one.latency_s for one in outcomes]


# When requests are sent, and how long they take


def test_latency_counts_from_when_a_request_was_due_so_waiting_is_part_of_it() -> None:
    outcomes = virtually(run(due(0, 1, 2), one_by_one(4, 4, 4)))

    assert [one.sent_s for one in outcomes] == [0, 1, 2]
    assert latencies(outcomes) == [4, 7, 10]


def test_waiting_for_ones_turn_here_is_part_of_latency_too() -> None:
    outcomes = virtually(run(due(0, 1, 2), one_by_one(4, 4, 4), max_concurrency=1))

    assert [one.sent_s for one in outcomes] == [0, 4, 8]
    assert latencies(outcomes) == [4, 7, 10]


def test_in_a_closed_loop_latency_counts_from_the_sending() -> None:
    arrivals = due(*[0] * 6)

    outcomes = virtually(run(arrivals, one_by_one(*[3] * 6), max_concurrency=2, is_closed=True))

    assert [one.sent_s for one in outcomes] == [0, 0, 3, 6, 9, 12]
    assert latencies(outcomes) == [3, 6, 6, 6, 6, 6]


def test_a_request_that_fails_is_noted_and_the_others_go_on() -> None:
    ticks: list[None] = []

    async def ask(body: Mapping[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1)
        if body["seed"] == 1:
            raise RequestError("429 queue_full", "come back later")
        return {"peak_memory_mb": 100.0 + body["seed"]}

    arrivals = [Arrival(0, {"seed": seed}) for seed in range(3)]
    outcomes = virtually(run(arrivals, ask, tick=lambda: ticks.append(None)))

    assert [one.failure for one in outcomes] == [None, "429 queue_full", None]
    assert [one.peak_memory_mb for one in outcomes] == [100.0, None, 102.0]
    assert len(ticks) == 3


# Latency targets


def bodies(*steps: int | None, **others: Any) -> list[Mapping[str, Any]]:
    return [{**others, **({} if n is None else {"num_inference_steps": n})} for n in steps]


def test_the_fewest_and_the_most_steps_of_each_kind_are_measured_alone() -> None:
    wanted = [
        *bodies(8, 4, 20, 8, 20, size="64x64"),
        *bodies(9, size="32x32"),
        *bodies(None, 4, size="16x16"),
    ]

    measured = samples([Arrival(0, body) for body in wanted])

    assert sorted((one["size"], one.get("num_inference_steps", 0)) for one in measured) == [
        ("16x16", 0), ("16x16", 4), ("32x32", 9), ("64x64", 4), ("64x64", 20),
    ]  # fmt: skip


def test_the_fastest_warmup_round_is_the_solo_latency_and_between_steps_the_line_is_straight() -> (
    None
):
    few, many = bodies(4, 20)

    solo = virtually(warm_up([few, many], one_by_one(9, 5, 1, 6), rounds=2))

    assert (solo.of(few), solo.of(many)) == (1, 5)
    [between] = bodies(12)
    assert solo.of(between) == 3


def test_a_failing_warmup_request_ends_the_run_with_its_reason() -> None:
    async def ask(body: Mapping[str, Any]) -> dict[str, Any]:
        raise RequestError("401 invalid_api_key", "the key is wrong")

    with pytest.raises(CarpoolError, match="failed: 401 invalid_api_key: the key is wrong"):
        virtually(warm_up([{}], ask, rounds=1))


def outcome(latency_s: float, *, failure: str | None = None, at_s: float = 0.0) -> RequestResult:
    return RequestResult({}, at_s, at_s + 0.5, at_s + latency_s, latency_s, failure, failure or "")


def test_only_answers_within_their_target_are_good() -> None:
    solo = SoloLatencies({(kind_of({}), None): 2.0})
    outcomes = [outcome(3), outcome(6), outcome(7), outcome(1, failure="timeout")]

    summary = summarise(with_slo(outcomes, solo, scale=3), {})

    assert summary.slo_attainment_rate == 2 / 4
    assert summary.goodput_qps == 2 / 7
    assert summary.throughput_qps == 3 / 7


# The report


def test_the_block_has_the_lines_that_users_know() -> None:
    outcomes = [outcome(float(n)) for n in range(1, 101)]
    summary = summarise(outcomes, {"memory": {"peak_bytes": 3 * 2**20}})

    lines = dict(
        line.split(":", 1) for line in block(summary, {"Task": "x"}).splitlines() if ":" in line
    )

    assert {name: value.strip() for name, value in lines.items()} == {
        "Task": "x", "Benchmark duration (s)": "100.00", "Successful requests": "100/100",
        "Request throughput (req/s)": "1.0000", "Latency Mean (s)": "50.5000",
        "Latency Median (s)": "50.5000", "Latency P90 (s)": "90.1000", "Latency P95 (s)": "95.0500",
        "Latency P99 (s)": "99.0100", "Latency Max (s)": "100.0000", "Send Delay Max (s)": "0.5000",
        "Peak Memory Max (MB)": "3.0",
    }  # fmt: skip


def test_failures_are_listed_by_reason_the_most_frequent_first() -> None:
    reasons = ["timeout", "429 queue_full", None, "429 queue_full"]
    summary = summarise([outcome(1, failure=reason) for reason in reasons], {})

    assert [(one.reason, one.count) for one in summary.failures] == [
        ("429 queue_full", 2),
        ("timeout", 1),
    ]
    text = block(summary, {})
    assert text.index("429 queue_full:") < text.index("timeout:")
    assert "Successful requests:                     1/4" in text


def test_a_run_without_any_answer_has_no_latency_and_is_json_still() -> None:
    outcomes = [outcome(1, failure="timeout")]
    summary = summarise(outcomes, {})

    assert summary.latency_mean is None
    assert "n/a" in block(summary, {})
    told = json.loads(json.dumps(as_json(summary, {}, outcomes), allow_nan=False))
    assert told["failures"] == [{"reason": "timeout", "count": 1, "message": "timeout"}]
    assert told["requests"][0]["slo_s"] is None
