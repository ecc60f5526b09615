"""The comparison with other servers at a small scale: equal answers, and tables from numbers."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from benchmarks import agreement
from benchmarks.peers import litserve_server, locked_server, plain
from benchmarks.peers.__main__ import COLUMNS, PUBLISHED, Results, measure, row, section
from benchmarks.peers.loads import ALIKE, BURST, MIXES, Figures, wrong
from benchmarks.peers.models import MODELS
from benchmarks.peers.parties import LOCKED, Server, parties
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind
from carpool_lab.simulate.report import Latency
from carpool_lab.simulate.scenario import Model, play
from carpool_lab.tables import learned
from carpool_lab.workload import Arrival
from proof.page import BENCHMARKS, with_section
from proof.tickets import gap

SHAPES = MODELS["shapes"]
COSTS = Costs(
    {
        CallKind("text_encoder.forward", 16): Curve({1: 0.02}),
        CallKind("transformer.forward", 64): Curve({1: 0.010, 2: 0.012, 4: 0.020, 8: 0.040}),
        CallKind("vae.decode", 64): Curve({1: 0.03, 4: 0.12}),
    }
)


def cells(table: str) -> list[list[str]]:
    _, _, *rows = table.splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def png(colour: int, side: int = 4) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (colour, 0, 0)).save(out, "PNG")
    return out.getvalue()


def figures(lone_s: float, rate: float = 2.0, **fields: Any) -> Figures:
    """A round of a server whose bursts gave so many pictures a second."""
    mixes = dict.fromkeys(MIXES, rate)
    cpu_s = dict.fromkeys((*MIXES, "lone"), 0.05)
    pictures = {"equal 0": png(7)}
    rounds = {"per_s": mixes, "cpu_s": cpu_s, "pictures": pictures}
    return Figures(lone_s=lone_s, **{**rounds, **fields})


# The other servers


def test_litserve_draws_what_one_call_a_request_draws_whatever_shares_the_batch() -> None:
    api = litserve_server.create(str(SHAPES.checkpoint()), 4)
    api.setup("cpu")
    bodies = [
        api.decode_request({**SHAPES.body(seed, steps), "prompt": prompt})
        for seed, (prompt, steps) in enumerate(
            [("a red circle", 2), ("a blue ring", 3), ("a green star", 2)]
        )
    ]

    together = api.predict(bodies)

    alone = [plain.draw(api.pipe, [body])[0] for body in bodies]
    assert [gap(*pair) <= ALIKE for pair in zip(together, alone, strict=True)] == [True] * 3
    assert gap(together[0], together[2]) > 50
    assert api.encode_response(alone[0]) == plain.answer(alone[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parties_answer_alike_over_http_and_stand_in_the_table() -> None:
    short = replace(SHAPES, steps=2, mixed=(2, 3), abandoned=20)
    here = [LOCKED, *(p for p in parties((8,)) if "LitServe" in p.name or "continuous" in p.name)]

    async def rounds() -> list[Results]:
        return [results async for results in measure(short, 1, here, {})]

    [results] = asyncio.run(rounds())

    assert list(results) == [party.name for party in here]
    right = results[LOCKED.name][0].pictures
    assert len(right) == BURST * len(MIXES)
    for [figures] in results.values():
        assert figures.failed == 0
        assert wrong(figures.pictures, right) == 0
        assert figures.cpu_s["lone"] > 0
    text = section(short, results)
    assert "| continuous | 1.2 |" in text
    assert text.count(" of 48 |") == len(results)


def test_a_server_that_runs_already_takes_a_row_beside_plain_diffusers() -> None:
    app = locked_server.create_app(str(SHAPES.checkpoint()))
    paths = {getattr(route, "path", "") for route in app.routes}
    assert paths >= {"/health", "/v1/images/generations"}
    assert Server("http://127.0.0.1:1").cpu_s() is None


# Loads


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_bursts_differ_in_what_their_name_says_and_no_two_prompts_are_equal(model: Any) -> None:
    def settings(mix: str) -> set[tuple[int, float]]:
        bodies = model.burst(mix, BURST)
        assert len({body["prompt"] for body in bodies}) == BURST
        return {(body["num_inference_steps"], body[model.guidance]) for body in bodies}

    assert len(settings("equal")) == 1
    assert len(settings("steps")) == len(model.mixed)
    assert len(settings("steps+guidance")) > len(model.mixed)


def test_caps_reach_the_servers_that_have_any() -> None:
    names = [party.name for party in parties((4,))]

    assert names[0] == LOCKED.name
    assert sum(name.endswith(", 4") for name in names) == 3
    command = parties((4,))[-1].command(SHAPES.checkpoint(), 80)
    assert command[-3:] == ["4", "--port", "80"]


def test_a_picture_that_is_missing_or_of_another_size_is_wrong() -> None:
    right = {"a": png(10), "b": png(10), "c": png(10), "d": png(10)}

    count = wrong({"a": png(10 + ALIKE), "b": png(10 + ALIKE + 1), "c": png(10, side=8)}, right)

    assert count == 3


# The tables


def test_a_lone_request_is_a_ratio_of_the_same_round() -> None:
    plain_rounds = [figures(0.1), figures(0.4)]

    cells = row("ours", [figures(0.2), figures(0.4, failed=1)], plain_rounds)

    assert len(cells) == len(COLUMNS)
    assert cells[1] == "2.0/s; 50 ms"
    assert cells[4] == "300 ms, 1.50 of plain; 50 ms"
    assert cells[7] == "0 of 2, 1 failed"


def test_the_page_says_what_was_wrong_and_what_others_had() -> None:
    flux = MODELS["flux"]
    results = {
        LOCKED.name: [figures(0.1, poisson_s=[4.0])],
        "ours": [figures(0.1, pictures={}, poisson_s=[1.0, 3.0])],
    }

    text = section(flux, results)

    assert "| 2.00 / 2.98 s, 0.50 of plain | 0.00 s | 1 of 1 |" in text
    assert (PUBLISHED / "flux.md").read_text().rstrip() in text


@pytest.mark.parametrize("name", ["cpu", *(f"peers {model}" for model in MODELS)])
def test_every_benchmark_that_writes_has_its_section(name: str) -> None:
    assert with_section(BENCHMARKS.read_text(), name, "x")


# Measured and simulated


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
    bodies = SHAPES.burst("steps", 12)
    arrivals = [Arrival(0.1 * place, body) for place, body in enumerate(bodies)]
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
    [row] = cells(agreement.table([found]))
    assert row[4:] == ["1.00", "1.00", "2.00"]


def test_a_mean_beyond_the_goal_stands_out() -> None:
    apart, simulated = Latency.of([1.2]), Latency.of([1.0])

    table = agreement.table([agreement.Agreement("off", 0.5, apart, simulated, 1.0)])

    assert cells(table)[0][4] == "**1.20**"
