"""`carpool simulate`: the scheduler under a virtual clock, on the command line."""

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, get_args

import click

from carpool import jsonfile
from carpool.cli.options import help_without
from carpool.config import BatchingMode
from carpool.errors import InvalidValue
from carpool.schedule.cost import Costs
from carpool_lab.options import (
    Flags,
    burst_option,
    check_folders,
    conclude,
    file_path,
    json_option,
    parse_loads,
    refuse,
    save_option,
    seed_option,
    text_of,
    trace_option,
    traced,
)
from carpool_lab.simulate.report import Point, as_json, block, comparison, numbers, plotted
from carpool_lab.simulate.scenario import MIXES, Comparison, Model, compare, mix, play
from carpool_lab.tables import TABLES, Table, learned, read_tables, siblings, table
from carpool_lab.workload import Arrival, Mix, bursts, generators, of_file, plan, read_mix

_ONE_ONLY = ("load", "request_rate", "clients", "trace", "mode")
_COMPARE_ONLY = ("loads", "seeds", "output")


_RARE = ("slow_workers", "moves", "worker_lifetime", "slo_scale", "learned")


@click.command(cls=help_without(*_RARE, *_COMPARE_ONLY))
@click.option(
    "--table",
    help=f"costs of forwards by rows: {', '.join(TABLES)}, or a file of `carpool check --json`; "
    "with --costs a kind in that file  [default: flux-512; with --costs the first]",
)
@click.option(
    "--costs",
    type=file_path(exists=True),
    help="a server's learned costs, as JSON, instead of a built-in table",
)
@click.option(
    "--steps", type=click.IntRange(1), default=28, show_default=True, help="steps with --costs"
)
@click.option(
    "--mix",
    default="uniform",
    show_default=True,
    help=f"{', '.join(MIXES)}, or a file as for `carpool bench`: JSON lines "
    '{"weight", "size", "num_inference_steps", "guidance_scale", "priority", "user", "deadline_s"}',
)
@click.option(
    "--mode", type=click.Choice(get_args(BatchingMode)), help="one run  [default: continuous]"
)
@click.option(
    "--compare", metavar="MODES", help="many runs: these modes, such as off,continuous, by --loads"
)
@click.option(
    "--load",
    type=click.FloatRange(0, min_open=True),
    help="arrival rate, as a fraction of the capacity with every step at its fastest width  "
    "[default: 0.9]",
)
@click.option(
    "--loads", help="loads of --compare  [default: 0.1,0.3,0.6,0.9,1.2,2,3]", metavar="LIST"
)
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    help="arrival rate, requests a second",
)
@burst_option
@click.option(
    "--clients",
    type=click.IntRange(1),
    help="clients of a closed loop instead of arrivals, each with one request at a time",
)
@trace_option
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="requests of a run  [default: 1000, or all of --trace]",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="devices")
@click.option(
    "--slow-workers",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="fraction of workers that are four times slower",
)
@click.option(
    "--moves/--no-moves", "moves", help="move running requests to other workers, as in a server"
)
@click.option(
    "--worker-lifetime",
    type=click.FloatRange(0, min_open=True),
    default=inf,
    help="mean lifetime of a worker; its successor loads for 20 s  [default: none]",
)
@click.option(
    "--slo-scale",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="latency target for goodput, as a multiple of the solo latency",
)
@seed_option
@click.option(
    "--seeds", type=click.IntRange(1), help="with --compare: seeds to average  [default: 2]"
)
@click.option(
    "--learned",
    is_flag=True,
    help="forwards vary, as on a shared machine, and `continuous` learns its costs from them: "
    "with an even seed from nothing, with an odd seed from a table with wrong widths",
)
@click.option("--output", type=file_path(), help="with --compare: plot (needs matplotlib)")
@save_option
@json_option
def simulate(**flags: Any) -> None:
    """Predict the performance of a scheduling mode, without a model or a device.

    The modes run the server's own functions; the cost table sets the time of forwards, and
    everything else takes none. With --learned forwards vary, and costs are learned from them.
    """
    options = Flags(**flags)
    if options.compare:
        refuse(flags, _ONE_ONLY, "does not go with --compare")
    else:
        refuse(flags, _COMPARE_ONLY, "needs --compare")
    sources = [n for n in ("load", "request_rate", "clients", "trace") if flags[n] is not None]
    if len(sources) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise click.UsageError(f"{names}: only one can say when requests arrive")
    check_folders(options.output, options.save_result)
    try:
        model = Model(_tables(options))
        mix = _mix(options, model)
        result, text = (_compare if options.compare else _once)(options, model, mix)
    except InvalidValue as error:
        raise click.UsageError(str(error)) from None
    conclude(result, text, options)


def _once(options: Flags, model: Model, mix: Mix) -> tuple[dict[str, Any], str]:
    """One run; returns its JSON and text."""
    arrivals, traffic = _arrivals(options, model, mix)
    mode: BatchingMode = options.mode or "continuous"
    began_s = time.process_time()
    result = play(
        model,
        arrivals,
        mode,
        workers=options.workers,
        clients=options.clients,
        slow=options.slow_workers,
        lifetime_s=options.worker_lifetime,
        moves=options.moves,
        learned=options.seed if options.learned else None,
    )
    took_s = time.process_time() - began_s
    run_numbers = numbers(result, options.slo_scale)
    settings = {
        "table": model.tables[0].name,
        "mix": options.mix,
        "mode": mode,
        "arrivals": traffic,
        "workers": options.workers,
        "requests": len(arrivals),
        "slo scale": options.slo_scale,
        "costs": "learned" if options.learned else "known",
        "simulated (s)": f"{result.ended_s:.1f}",
    }
    text = block(run_numbers, settings) + f"\n\nThe simulation took {took_s:.1f} s of one core."
    [point] = as_json([Point(model.tables[0].name, options.mix, 0.0, mode, run_numbers)])
    requests = [
        {
            "class": simulated.label,
            "arrived_s": simulated.waiting.arrived_s,
            "ended_s": simulated.ended_s,
            "solo_s": simulated.solo_s,
        }
        for simulated in result.requests
    ]
    return {"settings": settings, **point["numbers"], "requests": requests}, text


def _compare(options: Flags, model: Model, mix: Mix) -> tuple[dict[str, Any], str]:
    """Simulate all modes at all loads and write the plot; returns their JSON and table."""
    comparison_settings = Comparison(
        mix_name=options.mix,
        mix=mix,
        modes=_modes(options.compare),
        loads=parse_loads(options.loads or "0.1,0.3,0.6,0.9,1.2,2,3"),
        seeds=range(options.seed, options.seed + (options.seeds or 2)),
        count=options.num_prompts or 1000,
        burst=options.burst,
        slo_scale=options.slo_scale,
        workers=options.workers,
        is_learned=options.learned,
    )
    capacity_qps = model.capacity_qps(mix) * options.workers
    title = f"{model.tables[0].name}, {options.mix}: load 1 is {capacity_qps:.3g} req/s"
    points: list[Point] = list(compare(model, comparison_settings))
    if options.output is not None:
        from carpool_lab.plot import draw

        draw([(title, [plotted(point) for point in points])], options.output)
    return {"title": title, "points": as_json(points)}, f"{title}\n\n{comparison(points)}"


def _tables(options: Flags) -> Sequence[Table]:
    if options.costs is None:
        if options.table not in TABLES and Path(options.table or "").is_file():
            return _tables_of(Path(options.table))
        return siblings(table(options.table or "flux-512"))
    try:
        data = jsonfile.loads(text_of(options.costs))
        if isinstance(data, dict):  # of `GET /stats`, or a table
            data = data.get("costs", data)
        tables = learned(Costs.from_json(data), steps=options.steps)
    except ValueError as error:
        raise InvalidValue(f"{options.costs}: is not what a server writes: {error}") from None
    name = options.table or next(iter(tables))
    if name not in tables:
        raise InvalidValue(f"table {name!r}: {options.costs} has {', '.join(tables)}")
    return [tables[name]]


def _tables_of(path: Path) -> Sequence[Table]:
    try:
        return read_tables(jsonfile.loads(text_of(path)))
    except ValueError as error:
        raise InvalidValue(f"--table {path}: cannot be read: {error}") from None
    except InvalidValue as error:
        raise InvalidValue(f"--table {path}: {error}") from None


def _mix(options: Flags, model: Model) -> Mix:
    if options.mix in MIXES or not Path(options.mix).is_file():
        return mix(options.mix, model.tables)
    with of_file(Path(options.mix)):
        mix_read = read_mix(text_of(Path(options.mix)), {})
    for setting in mix_read.settings:
        model.stages(setting.body)  # raises early for a size without a table
    return mix_read


def _arrivals(options: Flags, model: Model, mix: Mix) -> tuple[list[Arrival], str]:
    """The arrivals of a run, and their description."""
    when, rng = generators(options.seed)
    if options.trace is not None:
        return traced(options.trace, mix, rng, options.num_prompts), f"trace {options.trace}"
    count = options.num_prompts or 1000
    if options.clients is not None:
        return plan(bursts(inf, when, size=1), mix, rng, count=count), f"{options.clients} clients"
    load = options.load or 0.9
    rate = options.request_rate or load * model.capacity_qps(mix) * options.workers
    description = f"{rate:.4g} req/s" + (
        f" in bursts of {options.burst}" if options.burst > 1 else ""
    )
    if not options.request_rate:
        description += f", {load:g} of capacity"
    return plan(bursts(rate, when, size=options.burst), mix, rng, count=count), description


def _modes(text: str) -> list[BatchingMode]:
    modes = get_args(BatchingMode)
    for mode in text.split(","):
        if mode not in modes:
            raise InvalidValue(f"--compare {mode}: must be of {', '.join(modes)}")
    return [mode for mode in modes if mode in text.split(",")]
