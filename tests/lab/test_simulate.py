"""The simulator: what it plays can be worked out by hand, and what it prints adds up."""

import json
import statistics
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from scheduling_promise import Verdict, limits, verdicts

from carpool.config import BatchingMode
from carpool.errors import InvalidValue
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind
from carpool_lab.simulate.command import simulate as command
from carpool_lab.simulate.fleet import simulate
from carpool_lab.simulate.machine import WIDTHS, Machine, wrong
from carpool_lab.simulate.report import Point, comparison, numbers
from carpool_lab.simulate.scenario import (
    MIXES,
    MODES,
    Comparison,
    Labels,
    Model,
    compare,
    mix,
    play,
)
from carpool_lab.simulate.simulator import Worker
from carpool_lab.tables import MAX_ROWS, TABLES, Table, learned, siblings, table
from carpool_lab.workload import Arrival, Mix, Setting, bursts, generators, plan

SLOW = Table("slow", 4, {1: 1.0, 16: 16.0}, 0.5, 0.5)  # rows gain nothing
FREE = Table("free", 4, {1: 1.0, 16: 1.0}, 0.5, 0.5)  # rows are free
SOLO_S = 5.0  # of both
EVERY_MODE: list[BatchingMode] = ["off", "dynamic", "request", "continuous"]


def arrivals(*times_s: float) -> list[Arrival]:
    return [Arrival(at_s, {}) for at_s in times_s]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


# What is played


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_lone_request_takes_its_solo_time_and_the_wait_of_its_mode(mode: BatchingMode) -> None:
    [ride] = play(Model([SLOW]), arrivals(3.0), mode).requests

    waits_s = {"dynamic": 0.005, "request": 0.004}.get(mode, 0.0)
    assert ride.solo_s == SOLO_S
    assert ride.latency_s == pytest.approx(SOLO_S + waits_s)


def test_off_lets_one_request_after_the_other_go_to_its_end() -> None:
    result = play(Model([FREE]), arrivals(0.0, 1.0, 2.0), "off")

    assert [ride.ended_s for ride in result.requests] == [5.0, 10.0, 15.0]
    assert (result.forwards, result.rows) == (12, 12)


def test_a_batch_ends_together_and_a_latecomer_waits_for_all_of_it() -> None:
    result = play(Model([FREE]), arrivals(0.0, 0.0, 1.0), "dynamic")

    first, second, late = (ride.ended_s for ride in result.requests)
    together_s = 0.005 + 0.75 + 4.0 + 1.0  # encoding: half is fixed; decoding: by rows
    assert first == second == pytest.approx(together_s)
    assert late == pytest.approx(together_s + SOLO_S)


def test_in_continuous_a_latecomer_joins_where_rows_are_free() -> None:
    early, late = play(Model([FREE]), arrivals(0.0, 1.0), "continuous").requests

    assert early.ended_s < SOLO_S + 1.01  # its own work, and one encoding
    assert late.ended_s < early.ended_s + 1.5 + 1.01  # steps it came too late for, two decodings


@given(
    st.lists(st.floats(0, 30), min_size=1, max_size=20).map(sorted),
    st.sampled_from(EVERY_MODE),
    st.sampled_from([SLOW, FREE]),
    st.integers(1, 3),
)
def test_everybody_ends_once_and_nobody_before_the_work_is_done(
    times_s: list[float], mode: BatchingMode, costs: Table, workers: int
) -> None:
    result = play(Model([costs]), arrivals(*times_s), mode, workers=workers)

    assert [ride.waiting.arrived_s for ride in result.requests] == times_s
    assert all(ride.latency_s >= SOLO_S - 1e-9 for ride in result.requests)
    assert result.rows == 4 * len(times_s)
    assert result.ended_s == max(ride.ended_s for ride in result.requests)


def test_the_batches_of_a_traced_worker_name_their_requests() -> None:
    model = Model([FREE])
    worker = Worker(MODES["dynamic"](model.costs), model.costs, MAX_ROWS, is_traced=True)

    result = simulate(model.requests(arrivals(0.0, 0.0), Labels()), [worker])

    decodes = [("decode", (1, 2))]
    assert result.batches == [("encode", (1, 2)), *[("denoise", (1, 2))] * 4, *decodes]


def test_clients_of_a_closed_loop_ask_again_when_they_are_answered() -> None:
    result = play(Model([SLOW]), arrivals(inf, inf, inf), "off", clients=1)

    assert [ride.waiting.arrived_s for ride in result.requests] == [0.0, 5.0, 10.0]
    assert all(ride.latency_s == SOLO_S for ride in result.requests)


@given(st.integers(1, 6), st.sampled_from(EVERY_MODE), st.integers(1, 2))
def test_a_closed_loop_never_has_more_requests_under_way_than_clients(
    clients: int, mode: BatchingMode, workers: int
) -> None:
    rides = play(
        Model([FREE]), arrivals(*[inf] * 12), mode, clients=clients, workers=workers
    ).requests

    for one in rides:
        now_s = one.waiting.arrived_s
        assert sum(ride.waiting.arrived_s <= now_s < ride.ended_s for ride in rides) <= clients


def test_sizes_have_kinds_and_keys_of_their_own_but_share_encoders() -> None:
    model = Model(siblings(table("flux-512")))

    small, large = model.stages({"size": "512x512"}), model.stages({"size": "1024x1024"})

    assert small[0] == large[0]
    assert small[1].key != large[1].key
    assert large[1].call_s > small[1].call_s
    with pytest.raises(InvalidValue, match=r"256x256.*there are flux-512, flux-1024"):
        model.stages({"size": "256x256"})


def test_capacity_is_the_rate_at_the_best_width_over_the_whole_mix() -> None:
    many = Mix([Setting({"num_inference_steps": 1}), Setting({"num_inference_steps": 3}, weight=3)])

    assert Model([FREE]).capacity_qps(Mix([Setting()])) == pytest.approx(1 / (1 + 4 / 8))
    assert Model([SLOW]).capacity_qps(many) == pytest.approx(1 / (1 + 2.5))


@pytest.mark.parametrize("name", TABLES)
def test_no_built_in_table_gets_faster_with_rows_and_every_mix_plays_on_it(name: str) -> None:
    tables = siblings(table(name))
    seconds = list(tables[0].denoise_s.values())

    assert seconds == sorted(seconds)
    for mix_name in MIXES:
        if mix_name != "sizes" or len(tables) > 1:
            when, what = generators(0)
            asked = plan(bursts(1.0, when, size=1), mix(mix_name, tables), what, count=5)
            assert len(play(Model(tables), asked, "continuous").requests) == 5


def test_a_mix_or_table_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidValue, match="must be of uniform, steps, sizes, tenants, or a file"):
        mix("odd", [SLOW])
    with pytest.raises(InvalidValue, match="only one table of slow"):
        mix("sizes", [SLOW])
    with pytest.raises(InvalidValue, match=r"table 'odd': must be of flux-512, "):
        table("odd")


def test_tables_come_from_what_an_engine_learned() -> None:
    costs = Costs(
        {
            CallKind("transformer.forward", 9, "16x64x64"): Curve({1: 1.0, 2: 1.5}),
            CallKind("text_encoder.forward", 4): Curve({1: 0.1}),
            CallKind("text_encoder.forward", 8): Curve({1: 0.3}),
            CallKind("text_encoder_2.forward", 8): Curve({1: 1.0}),
            CallKind("vae.decode", 9): Curve({1: 0.5}),
        }
    )

    [(name, found)] = learned(costs, steps=7).items()

    assert name == "transformer.forward 16x64x64"
    assert found.denoise_s == {1: 1.0, 2: 1.5}
    assert (found.steps, found.decode_s) == (7, 0.5)
    assert found.encode_s == pytest.approx(1.2)
    with pytest.raises(InvalidValue, match="no denoiser"):
        learned(Costs(), steps=7)


# What is found


def test_numbers_are_those_of_the_rides() -> None:
    asked = [Arrival(0.0, {"deadline_s": 6.0}), Arrival(0.0, {"deadline_s": 7.0})]

    found = numbers(play(Model([SLOW]), asked, "off"), slo_scale=1.5)

    assert found.throughput_qps == 2 / 10
    assert (found.goodput_qps, found.slo_attainment) == (1 / 10, 0.5)
    assert (found.deadlines, found.deadline_misses) == (2, 1)
    assert found.latency.mean_s == 7.5
    assert found.latency.p50_s == statistics.median([5.0, 10.0])
    assert {label: one.mean_s for label, one in found.by_class.items()} == {
        "deadline_s=6.0": 5.0,
        "deadline_s=7.0": 10.0,
    }


def test_a_comparison_has_every_mode_at_every_load_with_the_same_requests() -> None:
    wanted = Comparison("uniform", Mix([Setting()]), ["off", "continuous"], [0.1, 0.5], [0, 1], 20)

    points = list(compare(Model([SLOW]), wanted))

    assert [(p.load, p.mode, p.numbers.latency.count) for p in points] == [
        (0.1, "off", 40),
        (0.1, "continuous", 40),
        (0.5, "off", 40),
        (0.5, "continuous", 40),
    ]
    assert comparison(points).count("\n") == 5


@pytest.mark.parametrize("learned", [None, 0])
def test_one_worker_that_gets_everything_at_once_needs_no_account_of_what_it_has(
    learned: int | None,
) -> None:
    model = Model(siblings(TABLES["zimage-turbo-512"]))
    asked = mix("sizes", model.tables)
    when, what = generators(5)
    arrivals = plan(bursts(0.9 * model.capacity_qps(asked), when, size=1), asked, what, count=60)
    ended = [ride.ended_s for ride in play(model, arrivals, "continuous", learned=learned).requests]

    accounted = play(model, arrivals, "continuous", learned=learned, moves=True)

    assert [ride.ended_s for ride in accounted.requests] == ended


def test_a_verdict_names_what_of_the_promise_is_broken() -> None:
    kept = Verdict("t", "steps", 0.9, mean=1.02, p99=1.1, goodput=1.5, must_fuse=True)
    broken = Verdict("t", "steps", 0.9, mean=1.07, p99=1.21, goodput=1.4, must_fuse=True)

    assert not kept.broken
    assert str(broken) == (
        "t, steps, load 0.9: mean 1.070 > 1.06, p99 1.210 > 1.2, goodput 1.40 < 1.5"
    )


@pytest.mark.parametrize(
    ("is_learned", "broken"),
    [
        (False, ["mean latency, mean of ratios", "mean latency, worst point", "p99, worst point"]),
        (True, ["p99, worst point"]),
    ],
)
def test_the_promise_is_about_the_mean_of_ratios_and_about_the_worst_point(
    is_learned: bool, broken: list[str]
) -> None:
    points = [
        Verdict("t", "steps", 0.9, mean, p99, inf, must_fuse=False, is_learned=is_learned)
        for mean, p99 in ((0.95, 0.8), (1.1, 1.21))
    ]

    found = list(limits(points, is_learned=is_learned))

    assert [limit.value for limit in found] == pytest.approx([1.025, 1.1, 1.005, 1.21])
    assert [limit.name for limit in found if not limit.is_kept] == broken


def test_verdicts_compare_continuous_with_the_best_of_the_others() -> None:
    def point(mode: BatchingMode) -> Point:
        asked = arrivals(0.0, 0.0, 0.0, 0.0)
        return Point("free", "steps", 0.9, mode, numbers(play(Model([FREE]), asked, mode), 1.5))

    points = {mode: point(mode) for mode in EVERY_MODE}

    [verdict] = verdicts(list(points.values()), fusing_pays=["free"])

    best_s = min(one.numbers.latency.mean_s for one in points.values() if one.mode != "continuous")
    assert verdict.mean == points["continuous"].numbers.latency.mean_s / best_s
    assert verdict.must_fuse
    [other] = verdicts(list(points.values()), fusing_pays=[])
    assert not other.must_fuse


# Learned costs


@pytest.mark.parametrize("name", ["flux-512", "sana-512", "qwen-512-streamed"])
def test_learned_costs_keep_the_promise_on_a_machine_with_neighbours(name: str) -> None:
    every: tuple[BatchingMode, ...] = ("off", "dynamic", "request", "continuous")
    wanted = Comparison("steps", mix("steps", [TABLES[name]]), every, [0.9], [0, 1], 150)

    points = compare(Model([TABLES[name]]), replace(wanted, is_learned=True))

    [verdict] = verdicts(list(points), (), is_learned=True)
    assert not verdict.broken


def test_a_machine_has_one_outlier_in_a_hundred_and_phases_of_half_a_minute() -> None:
    machine = Machine(seed=1)

    seconds = [
        statistics.median(machine.factor(n + i / 100, 2, (1, n, i), 0.01) for i in range(100))
        for n in range(500)
    ]
    hundred = [machine.factor(500.0, 2, (2, 1, i), 0.01) for i in range(100)]

    assert sum(factor > 4.5 for factor in hundred) == 1
    busy = sum(factor > 1.5 for factor in seconds)
    assert busy % 30 in (29, 0, 1)
    assert 0 < busy < 400


def test_forwards_that_are_shared_are_disturbed_alike_however_wide_they_are() -> None:
    def lost_s(seconds: list[float]) -> float:
        machine = Machine(seed=1)
        factors = [machine.factor(0.0, 2, (1, 1, i), s) for i, s in enumerate(seconds)]
        return sum((factor - 1) * s for factor, s in zip(factors, seconds, strict=True))

    widths = [0.28] * 500, [0.07, 0.15, 0.06] * 500, [0.04, 0.24] * 500  # the same seconds in all

    for seconds in widths:  # one in a hundred ten times as long: 9 % more, to within one of them
        assert lost_s(seconds) == pytest.approx(0.09 * 140, abs=0.28 * 9)


def test_a_request_that_runs_alone_varies_in_the_same_way_in_every_mode() -> None:
    machines = [Machine(seed=1) for _ in range(2)]
    machines[0].factor(0.0, 8, (9, 0, 0), 1.0)  # one of them has run something else

    assert len({machine.factor(1.0, 1, (1, 1, 5), 1.0) for machine in machines}) == 1


def test_a_wrong_table_is_wrong_by_four_times_at_one_width_of_each_kind() -> None:
    true = Costs(TABLES["flux-512"].costs())

    for (kind, curve), (_, exact) in zip(wrong(true, seed=3), true, strict=True):
        ratios = [curve.measured[rows] / exact.seconds(rows) for rows in WIDTHS]
        off = [ratio for ratio in ratios if ratio != pytest.approx(1.0)]
        assert off == [pytest.approx(4.0)] or off == [pytest.approx(0.25)], kind


# The command


def test_the_command_learns_costs_from_forwards_that_vary() -> None:
    flags = ("--table", "sana-512", "--num-prompts", 20, "--json")

    exact, learned = (json.loads(run(*flags, *more).output) for more in ((), ("--learned",)))

    assert (exact["settings"]["costs"], learned["settings"]["costs"]) == ("known", "learned")
    assert learned["latency"]["mean_s"] > exact["latency"]["mean_s"]


def test_the_command_prints_each_class_and_how_long_it_took() -> None:
    done = run("--table", "sana-512", "--mix", "steps", "--num-prompts", 30)

    assert done.exit_code == 0
    assert "| num_inference_steps=50 |" in done.output
    assert "0.9 of capacity" in done.output
    assert "of one core" in done.output


def test_the_command_saves_every_request(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    done = run("--clients", 3, "--num-prompts", 7, "--mode", "off", "--save-result", path)

    assert done.exit_code == 0
    saved = json.loads(path.read_text())
    assert len(saved["requests"]) == 7
    assert saved["latency"]["count"] == 7
    assert saved["settings"]["arrivals"] == "3 clients"


def test_the_command_takes_mixes_traces_and_learned_costs_from_files(tmp_path: Path) -> None:
    costs, trace, entries = (tmp_path / name for name in ("costs.json", "trace", "mix"))
    curves = {CallKind("transformer.forward", 9): Curve({1: 1.0, 2: 1.5})}
    costs.write_text(json.dumps(Costs(curves).to_json()))
    trace.write_text('{"at_s": 0}\n{"at_s": 1, "user": "b"}')
    entries.write_text('{"num_inference_steps": 3, "deadline_s": 3.5, "user": "a"}')

    done = run("--costs", costs, "--trace", trace, "--mix", entries, "--mode", "off", "--json")

    found = json.loads(done.output)
    assert found["deadline_misses"] == 1
    assert found["by_class"].keys() == {"user=a", "user=b"}
    assert [one["ended_s"] for one in found["requests"]] == pytest.approx([3.0, 6.0])


def test_the_command_compares_modes_and_draws_them(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"

    done = run(
        "--compare", "continuous,off", "--loads", "0.5,2", "--num-prompts", 10, "--output", path
    )  # fmt: skip

    assert done.exit_code == 0
    assert done.output.count("| continuous |") == done.output.count("| off |") == 2
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--loads", "1"), "--loads needs --compare"),
        (("--compare", "off", "--load", 1), "--load does not go with --compare"),
        (("--load", 1, "--clients", 2), "--load and --clients: only one can say"),
        (("--compare", "on"), "--compare on: must be of continuous, dynamic, request, off"),
        (("--compare", "off", "--loads", "x"), "write numbers, such as 0.5,0.9"),
        (("--compare", "off", "--loads", "0"), "--loads 0: must be above 0"),
        (("--table", "odd"), "table 'odd': must be of flux-512"),
        (("--mix", "odd"), "mix 'odd': must be of uniform"),
        (("--save-result", "/nowhere/at/all"), "there is no folder /nowhere/at"),
    ],
)
def test_what_the_command_cannot_do_it_says_before_it_starts(
    flags: tuple[object, ...], message: str
) -> None:
    done = run(*flags)

    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
