"""The live benchmark at a small scale: parties that answer alike, and tables made from numbers."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import agreement, live
from benchmarks.live_rounds import ALIKE, LivePoint, LiveSettings, Reference, gap, judged, turns
from benchmarks.others import litserve_server, plain
from benchmarks.parties import LITSERVE, LOCKED, PARTIES, Party
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind
from carpool_lab.load.generator import RequestResult, SoloLatencies
from carpool_lab.load.report import summarise
from carpool_lab.simulate.scenario import Model, play
from carpool_lab.tables import learned

CONTINUOUS = PARTIES[-1]
NO_REFERENCE = Reference(2.0, SoloLatencies({}), {})
COSTS = Costs(
    {
        CallKind("text_encoder.forward", 16): Curve({1: 0.02}),
        CallKind("transformer.forward", 64): Curve({1: 0.010, 2: 0.012, 4: 0.020, 8: 0.040}),
        CallKind("vae.decode", 64): Curve({1: 0.03, 4: 0.12}),
    }
)


def point(
    party: Party, number: int, latencies_s: Sequence[float], *, load: float = 0.9, **others: Any
) -> LivePoint:
    """A run whose requests came at once and were answered after so long; none: it failed."""
    outcomes = [
        RequestResult({}, 0.0, 0.0, s or 9.0, s, None if s else "connection", slo_s=1.0)
        for s in latencies_s
    ]
    fields = {"right": 1.0, "plain_right": 1.0, "alike": 1.0, "before": {}, "after": {}, **others}
    return LivePoint(party, load, number, [], outcomes, summarise(outcomes, {}), **fields)


def cells(table: str) -> list[list[str]]:
    _, _, *rows = table.splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# The other servers


def test_litserve_draws_what_one_call_a_request_draws_whatever_shares_the_batch() -> None:
    api = litserve_server.create()
    api.setup("cpu")
    asked = [("a red circle", 2, 2.0), ("a blue ring", 3, 2.0), ("a green star", 2, 2.0)]
    bodies = [
        api.decode_request(
            {"prompt": prompt, "seed": seed, "num_inference_steps": n, "guidance_scale": g}
        )
        for seed, (prompt, n, g) in enumerate(asked)
    ]

    together = api.predict(bodies)

    alone = [plain.draw(api.pipe, [body])[0] for body in bodies]
    assert [gap(*pair) <= ALIKE for pair in zip(together, alone, strict=True)] == [True] * 3
    assert gap(together[0], together[2]) > 50
    assert api.encode_response(alone[0]) == plain.answer(alone[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parties_answer_alike_over_http_and_are_on_the_page() -> None:
    parties = (LOCKED, LITSERVE, CONTINUOUS)
    wanted = LiveSettings(parties, loads=(1.0,), steps=(2, 3), count=4, rounds=1)

    known, points = asyncio.run(live.measure(wanted))

    assert [(one.party, one.summary.failed_requests, one.alike) for one in points] == [
        (party, 0, 1.0) for party in parties
    ]
    assert len(known.pictures) == 4
    text = live.page(wanted, known, points)
    assert [row[1] for row in cells(live.table(points))] == [party.name for party in parties]
    assert "| continuous | 1 |" in text
    assert "Failed requests: 0." in text


# Rounds


def test_every_party_comes_first_in_some_round() -> None:
    order = list(turns(PARTIES, len(PARTIES)))

    firsts = order[:: len(PARTIES)]
    assert {party for _, party in firsts} == set(PARTIES)
    assert {(n, party) for n in range(1, 1 + len(PARTIES)) for party in PARTIES} == set(order)


def test_rounds_ask_for_the_same_at_other_moments_and_loads_last_alike() -> None:
    wanted = LiveSettings(PARTIES)

    first, second = (wanted.arrivals(1.5, 3.0, number) for number in (1, 2))
    calm = wanted.arrivals(0.5, 1.0, 1)

    assert [one.body for one in first] == [one.body for one in second]
    assert [one.at_s for one in first] != [one.at_s for one in second]
    assert [one.body for one in calm] == [one.body for one in first[: len(calm)]]
    assert len(calm) / 1.0 == len(first) / 3.0


def test_a_picture_that_is_missing_is_neither_right_nor_alike() -> None:
    [arrival, other] = LiveSettings(PARTIES, count=2).arrivals(1.5, 1.0, 0)
    pipe = plain.load()
    body = plain.Body.model_validate(arrival.body)
    [image] = plain.draw(pipe, [body.model_copy(update={"num_inference_steps": 2})])
    seeds = [one.body["seed"] for one in (arrival, other)]

    shares = judged([arrival, other], {seeds[0]: image}, dict.fromkeys(seeds, image))

    assert shares[2] == 0.5
    assert shares[0] <= shares[1]


# The tables


def test_a_ratio_is_that_of_the_same_round_and_latencies_are_of_all_rounds() -> None:
    points = [
        point(LOCKED, 1, [1.0, 3.0]),
        point(LOCKED, 2, [4.0, 4.0]),
        point(CONTINUOUS, 1, [0.5, 0.5], right=0.5),
        point(CONTINUOUS, 2, [0.5, 1.5]),
    ]

    locked, ours = cells(live.table(points))

    assert locked[:2] == ["0.9", "FastAPI, lock"]
    assert (locked[2], locked[4], locked[9]) == ("3.50", "3.00", "1.00x")
    assert (ours[2], ours[4], ours[9]) == ("0.50", "0.75", "4.00x")  # 2/0.5 and 4/1
    assert ours[7:9] == ["75.0%", "100.0%"]


def test_goodput_counts_answers_in_time_and_failures_are_told() -> None:
    points = [point(CONTINUOUS, 1, [0.5, 2.0, 0.0])]

    [row] = cells(live.table(points))

    assert (row[5], row[6]) == ("0.22", "0.11")  # 2 and 1 in 9 s
    assert row[9] == "n/a"
    assert not live.agreements(points)
    assert "Failed requests: 1." in live.page(LiveSettings(PARTIES), NO_REFERENCE, points)


def told(forward_s: float, turn_s: float, forwards: dict[tuple[str, int], int]) -> dict[str, Any]:
    """Statistics of a server."""
    return {
        "forward_s": forward_s,
        "turn_s": turn_s,
        "costs": COSTS.to_json(),
        "forwards": [
            {"component": c, "method": "forward", "requests": n, "rows": n, "count": count}
            for (c, n), count in forwards.items()
        ],
    }


def test_a_run_as_the_simulator_says_agrees_with_it_at_any_speed() -> None:
    arrivals = LiveSettings(PARTIES).arrivals(0.9, 3.0, 1)
    [table] = learned(COSTS, steps=28).values()
    slower = {rows: 2 * seconds for rows, seconds in table.denoise_s.items()}
    double = replace(table, denoise_s=slower, encode_s=0.04, decode_s=0.06)
    calls = sum(one.body["num_inference_steps"] + 2 for one in arrivals)
    rides = play(Model([double], own_s=0.001), arrivals, "continuous").requests
    before = told(1.0, 1.5, {("transformer", 1): 10})
    after = told(
        1.0 + 2 * 100 * 0.012,
        1.5 + 2.4 + calls * 0.001,
        {("transformer", 1): 10, ("transformer", 2): 100},
    )

    found = agreement.agreement(
        "continuous", 0.9, arrivals, [ride.latency_s for ride in rides], before, after
    )

    assert found.drift == pytest.approx(2.0)
    assert found.measured.mean_s == pytest.approx(found.simulated.mean_s)
    assert found.by_table.mean_s < found.simulated.mean_s
    [row] = cells(agreement.table([found]))
    assert row[4:7] == ["1.00", "1.00", "1.00"]
    assert row[8] == "2.00"


def test_a_mean_beyond_the_goal_stands_out() -> None:
    apart = agreement.Latencies(1.2, 1.0, 1.0)
    simulated = agreement.Latencies(1.0, 1.0, 1.0)

    table = agreement.table([agreement.Agreement("off", 0.5, apart, simulated, simulated, 1.0)])

    assert cells(table)[0][4] == "**1.20**"
