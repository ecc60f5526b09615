"""`carpool simulate`: the scheduler under a virtual clock, on the command line."""

import json
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, get_args

import click

from carpool import jsonfile
from carpool.cli.options import GroupedHelp
from carpool.config import BatchingMode
from carpool.errors import InvalidValue
from carpool.schedule.cost import Costs
from carpool_lab.options import (
    Flags,
    burst_option,
    check_folders,
    file_path,
    parse_loads,
    refuse,
    save_option,
    seed_option,
    text_of,
    traced,
)
from carpool_lab.simulate.report import Point, as_json, block, comparison, numbers
from carpool_lab.simulate.routers import ROUTERS
from carpool_lab.simulate.scenario import MIXES, Comparison, Model, compare, mix, play
from carpool_lab.tables import TABLES, Table, learned, siblings, table
from carpool_lab.tune.results import tables as tuned_tables
from carpool_lab.workload import Arrival, Mix, bursts, generators, of_file, plan, read_mix

_ONE_ONLY = ("load", "request_rate", "clients", "trace", "mode")
_COMPARE_ONLY = ("loads", "seeds", "output")


class SimulateHelp(GroupedHelp):
    """The options of most runs; those of fleets and of learning only with --help-all."""

    groups = {}
    settings = None
    rare = ("router", "slow_workers", "moves", "worker_lifetime", "slo_scale", "learned")


@click.command(cls=SimulateHelp)
@click.option(
    "--table",
    help=f"seconds of a forward by rows: {', '.join(TABLES)}, or a file of `carpool tune`; with "
    "--costs a kind of the file  [default: flux-512; with --costs the first]",
)
@click.option(
    "--costs",
    type=file_path(exists=True),
    help="what a server learned from its own forwards, as JSON, in place of a built-in table",
)
@click.option(
    "--steps", type=click.IntRange(1), default=28, show_default=True, help="usual ones of --costs"
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
    help="arrivals, in parts of what the workers can do if every step is as wide as is fastest  "
    "[default: 0.9]",
)
@click.option(
    "--loads", help="the same, of --compare  [default: 0.1,0.3,0.6,0.9,1.2,2,3]", metavar="LIST"
)
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    help="arrivals, in requests a second",
)
@burst_option
@click.option(
    "--clients",
    type=click.IntRange(1),
    help="a closed loop in place of arrivals: so many, each with one request at a time",
)
@click.option(
    "--trace",
    type=file_path(exists=True),
    help='arrivals from a file: JSON lines {"at_s": seconds, ...}, the rest as for --mix',
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="requests of a run  [default: 1000, or all of --trace]",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="devices")
@click.option(
    "--router",
    "--route",
    "router",
    default="extra-seconds",
    show_default=True,
    metavar="ROUTERS",
    help=f"which worker gets a request: {', '.join(ROUTERS)}; several, by commas, are compared",
)
@click.option(
    "--slow-workers",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="part of the workers that are four times as slow",
)
@click.option(
    "--moves/--no-moves",
    "moves",
    help="running requests move to other workers where that is worth it, as in a server",
)
@click.option(
    "--worker-lifetime",
    type=click.FloatRange(0, min_open=True),
    default=inf,
    help="mean time after which a worker dies; the next one takes 20 s to load  [default: none]",
)
@click.option(
    "--slo-scale",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="a request counts for goodput within so many times its solo latency",
)
@seed_option
@click.option(
    "--seeds", type=click.IntRange(1), help="of --compare: means of so many  [default: 2]"
)
@click.option(
    "--learned",
    is_flag=True,
    help="forwards vary, as on a machine with neighbours, and `continuous` learns its costs from "
    "them: from nothing where the seed is even, else from a table that is wrong at single widths",
)
@click.option("--output", type=file_path(), help="of --compare: write a picture (needs matplotlib)")
@save_option
@click.option("--json", "is_json", is_flag=True, help="print that JSON in place of the text")
def simulate(**flags: Any) -> None:
    """Say how a scheduling mode would do, without a model or a device.

    The modes are the very functions of the server; a forward takes what the cost table says, and
    everything around it nothing. With --learned forwards vary, and costs are learned from them.
    """
    said = Flags(**flags)
    if said.compare:
        refuse(flags, _ONE_ONLY, "does not go with --compare")
    else:
        refuse(flags, _COMPARE_ONLY, "needs --compare")
    sources = [n for n in ("load", "request_rate", "clients", "trace") if flags[n] is not None]
    if len(sources) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise click.UsageError(f"{both}: only one can say when requests arrive")
    if said.compare and "," in said.router:
        raise click.UsageError("--compare is of modes: name one --router")
    check_folders(said.output, said.save_result)
    try:
        model = Model(_tables(said))
        mix = _mix(said, model)
        result, text = (_compare if said.compare else _once)(said, model, mix)
    except InvalidValue as error:
        raise click.UsageError(str(error)) from None
    written = json.dumps(result, indent=1)
    if said.save_result is not None:
        said.save_result.write_text(written + "\n", encoding="utf-8")
    click.echo(written if said.is_json else text)


def _once(said: Flags, model: Model, mix: Mix) -> tuple[dict[str, Any], str]:
    """One run for each router; their JSON and their blocks of text."""
    runs = {router: _run(said, model, mix, router) for router in _routers(said.router)}
    if len(runs) == 1:
        return next(iter(runs.values()))
    result = {router: found for router, (found, _) in runs.items()}
    return result, "\n\n".join(f"{router}\n{text}" for router, (_, text) in runs.items())


def _run(said: Flags, model: Model, mix: Mix, router: str) -> tuple[dict[str, Any], str]:
    """One run; its JSON and its block of text."""
    arrivals, traffic = _arrivals(said, model, mix)
    mode: BatchingMode = said.mode or "continuous"
    began_s = time.process_time()
    result = play(
        model,
        arrivals,
        mode,
        workers=said.workers,
        router=router,
        clients=said.clients,
        slow=said.slow_workers,
        lifetime_s=said.worker_lifetime,
        moves=said.moves,
        learned=said.seed if said.learned else None,
    )
    took_s = time.process_time() - began_s
    found = numbers(result, said.slo_scale)
    settings = {
        "table": model.tables[0].name,
        "mix": said.mix,
        "mode": mode,
        "arrivals": traffic,
        "workers": said.workers if said.workers == 1 else f"{said.workers}, {router}",
        "requests": len(arrivals),
        "slo scale": said.slo_scale,
        "costs": "learned" if said.learned else "known",
        "simulated (s)": f"{result.ended_s:.1f}",
    }
    text = block(found, settings) + f"\n\nThe simulation took {took_s:.1f} s of one core."
    [point] = as_json([Point(model.tables[0].name, said.mix, 0.0, mode, found)])
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


def _compare(said: Flags, model: Model, mix: Mix) -> tuple[dict[str, Any], str]:
    """Simulate all modes at all loads and write the picture; returns their JSON and table."""
    wanted = Comparison(
        mix_name=said.mix,
        mix=mix,
        modes=_modes(said.compare),
        loads=parse_loads(said.loads or "0.1,0.3,0.6,0.9,1.2,2,3"),
        seeds=range(said.seed, said.seed + (said.seeds or 2)),
        count=said.num_prompts or 1000,
        burst=said.burst,
        slo_scale=said.slo_scale,
        workers=said.workers,
        router=_routers(said.router)[0],
        is_learned=said.learned,
    )
    capacity_qps = model.capacity_qps(mix) * said.workers
    title = f"{model.tables[0].name}, {said.mix}: load 1 is {capacity_qps:.3g} req/s"
    points: list[Point] = list(compare(model, wanted))
    if said.output is not None:
        from carpool_lab.simulate.plot import draw_points

        draw_points([(title, points)], said.output)
    return {"title": title, "points": as_json(points)}, f"{title}\n\n{comparison(points)}"


def _tables(said: Flags) -> Sequence[Table]:
    if said.costs is None:
        if said.table not in TABLES and Path(said.table or "").is_file():
            return _tuned(Path(said.table))
        return siblings(table(said.table or "flux-512"))
    try:
        data = jsonfile.loads(text_of(said.costs))
        entries = data["costs"] if isinstance(data, dict) else data  # of `GET /stats`, of a table
        found = learned(Costs.from_json(entries), steps=said.steps)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidValue(f"{said.costs}: is not what a server writes: {error!r}") from None
    name = said.table or next(iter(found))
    if name not in found:
        raise InvalidValue(f"table {name!r}: {said.costs} has {', '.join(found)}")
    return [found[name]]


def _tuned(path: Path) -> Sequence[Table]:
    try:
        return tuned_tables(jsonfile.loads(text_of(path)))
    except ValueError as error:
        raise InvalidValue(f"--table {path}: cannot be read: {error}") from None
    except InvalidValue as error:
        raise InvalidValue(f"--table {path}: {error}") from None


def _mix(said: Flags, model: Model) -> Mix:
    if said.mix in MIXES or not Path(said.mix).is_file():
        return mix(said.mix, model.tables)
    with of_file(Path(said.mix)):
        found = read_mix(text_of(Path(said.mix)), {})
    for setting in found.settings:
        model.stages(setting.body)  # says now which size has no table
    return found


def _arrivals(said: Flags, model: Model, mix: Mix) -> tuple[list[Arrival], str]:
    """The arrivals of a run, and their description."""
    when, what = generators(said.seed)
    if said.trace is not None:
        return traced(said.trace, mix, what, said.num_prompts), f"trace {said.trace}"
    count = said.num_prompts or 1000
    if said.clients is not None:
        return plan(bursts(inf, when, size=1), mix, what, count=count), f"{said.clients} clients"
    load = said.load or 0.9
    rate = said.request_rate or load * model.capacity_qps(mix) * said.workers
    shown = f"{rate:.4g} req/s" + (f" in bursts of {said.burst}" if said.burst > 1 else "")
    if not said.request_rate:
        shown += f", {load:g} of capacity"
    return plan(bursts(rate, when, size=said.burst), mix, what, count=count), shown


def _routers(text: str) -> list[str]:
    found = ["round-robin" if name == "in-turn" else name for name in text.split(",")]
    for name in found:
        if name not in ROUTERS:
            raise InvalidValue(f"--router {name}: must be of {', '.join(ROUTERS)}")
    return list(dict.fromkeys(found))


def _modes(text: str) -> list[BatchingMode]:
    known = get_args(BatchingMode)
    for mode in text.split(","):
        if mode not in known:
            raise InvalidValue(f"--compare {mode}: must be of {', '.join(known)}")
    return [mode for mode in known if mode in text.split(",")]
