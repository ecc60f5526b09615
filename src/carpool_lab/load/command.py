"""The command `carpool bench`. It imports its optional libraries when it runs."""

import asyncio
import sys
from math import inf, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from carpool.cli.options import help_without
from carpool.config import BatchingMode
from carpool.errors import CarpoolError, InvalidValue
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
from carpool_lab.workload import Arrival, Mix, Setting, bursts, generators, of_file, plan, read_mix

if TYPE_CHECKING:
    from carpool_lab.load.generator import Tick

_SWEEP_ONLY = ("modes", "loads", "output")
_RARE = (*_SWEEP_ONLY, "trace", "burst", "warmup", "timeout", "mix")
_NOT_IN_SWEEP = ("url", "trace", "request_rate")


@click.command(cls=help_without(*_RARE))
@click.option("--url", help="URL of the server  [default: http://127.0.0.1:8000]")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="none", help="bearer token to send")
@click.option("--model", help="id to send  [default: none]; with --sweep: model to serve [shapes]")
@click.option(
    "--task",
    type=click.Choice(["text-to-image", "text-to-video"]),
    default="text-to-image",
    show_default=True,
    help="POST /v1/images/generations, or POST /v1/videos with the download of its file",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="requests to send  [default: 100, or all of --trace]",
)
@click.option(
    "--request-rate",
    type=float,
    help="requests a second, at random times (Poisson); inf: all at once  [default: inf]",
)
@burst_option
@trace_option
@click.option(
    "--max-concurrency",
    type=click.IntRange(1),
    help="most concurrent requests. With --request-rate inf the loop is closed: latency counts "
    "from the sending, otherwise from the arrival. With --sweep: clients of the closed loop that "
    "measures capacity  [default: no limit; 16 with --sweep]",
)
@click.option("--size", help="WIDTHxHEIGHT in pixels  [default: the model's]")
@click.option("--steps", type=click.IntRange(1), help="denoising steps  [default: the model's]")
@click.option(
    "--mix",
    type=file_path(exists=True),
    help='mix of requests: JSON lines or a JSON list of {"weight", "prompt" or "prompts", "size", '
    '"num_inference_steps", ...}; other fields go into the request unchanged',
)
@seed_option
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="warm-up rounds, one request at a time: for each setting one with the fewest and one "
    "with the most steps",
)
@click.option(
    "--slo-scale",
    type=click.FloatRange(0, min_open=True),
    help="latency target of a request, as a multiple of its solo latency: its setting's fastest "
    "warm-up request, interpolated between step counts  [default: none; 5 with --sweep]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="limit for each answer",
)
@save_option
@json_option
@click.option(
    "--sweep",
    is_flag=True,
    help="compare the batching modes: serve --model in each mode, at each of --loads; other "
    "settings of the servers come from CARPOOL_* variables",
)
@click.option("--modes", help=f"of --sweep  [default: {','.join(get_args(BatchingMode))}]")
@click.option(
    "--loads", help="with --sweep: fractions of the measured capacity  [default: 0.3,0.6,0.9,1.2]"
)
@click.option("--output", type=file_path(), help="with --sweep: plot  [default: bench.png]")
def bench(**flags: Any) -> None:
    """Send load to an OpenAI-compatible server and report the results.

    Requests are sent on schedule, without waiting for earlier answers, and their latency counts
    from the scheduled time. Failures count against the server and are listed by reason.
    """
    options = Flags(**flags)
    if options.sweep:
        refuse(flags, _NOT_IN_SWEEP, "does not go with --sweep")
    else:
        refuse(flags, _SWEEP_ONLY, "needs --sweep")
    if not options.warmup and (options.sweep or options.slo_scale):
        raise click.UsageError("--warmup 0: latency targets come from warmup requests")
    check_folders(options.output, options.save_result)
    try:
        result, text = _sweep(options) if options.sweep else _once(options)
    except InvalidValue as error:
        raise click.UsageError(str(error)) from None
    conclude(result, text, options)
    if not options.sweep and not result["completed_requests"]:
        raise CarpoolError("no request succeeded")


def _once(options: Flags) -> tuple[dict[str, Any], str]:
    """One run against a running server; returns its JSON and its text."""
    from carpool_lab.load.client import LoadClient
    from carpool_lab.load.generator import RequestResult, run, samples, warm_up, with_slo
    from carpool_lab.load.report import as_json, block, summarise

    url = options.url or "http://127.0.0.1:8000"
    rate = inf if options.request_rate is None else options.request_rate
    arrivals = _arrivals(options, rate)

    async def measure() -> tuple[list[RequestResult], dict[str, Any]]:
        async with LoadClient(
            url, options.task, api_key=options.api_key, timeout_s=options.timeout
        ) as client:
            bodies = samples(arrivals)
            tick = _bar("warmup", options.warmup * len(bodies))
            solo = await warm_up(bodies, client.ask, rounds=options.warmup, tick=tick)
            outcomes = await run(
                arrivals,
                client.ask,
                max_concurrency=options.max_concurrency,
                is_closed=options.max_concurrency is not None and not options.trace and isinf(rate),
                tick=_bar("requests", len(arrivals)),
            )
            if options.slo_scale is not None:
                outcomes = with_slo(outcomes, solo, options.slo_scale)
            return outcomes, await client.statistics()

    outcomes, statistics = asyncio.run(measure())
    summary = summarise(outcomes, statistics)
    traffic = f"trace {options.trace}" if options.trace else f"{rate:g}"
    rows: dict[str, Any] = {
        "Task": options.task,
        "Model": options.model or "the server's own",
        "Request rate (req/s)": traffic,
        "Max request concurrency": options.max_concurrency,
    }
    if options.slo_scale is not None:
        rows["SLO Scale"] = options.slo_scale
    settings = {
        "url": url,
        "task": options.task,
        "model": options.model,
        "request_rate": traffic,
        "burst": options.burst,
        "max_concurrency": options.max_concurrency,
        "num_prompts": len(arrivals),
        "seed": options.seed,
        "slo_scale": options.slo_scale,
    }
    return as_json(summary, settings, outcomes), block(summary, rows)


def _sweep(options: Flags) -> tuple[dict[str, Any], str]:
    """Run all modes at all loads and write the plot; returns their JSON and table."""
    from carpool_lab.load.sweep import SweepSettings, sweep
    from carpool_lab.plot import draw

    all_modes = get_args(BatchingMode)
    modes = options.modes.split(",") if options.modes else all_modes
    for mode in modes:
        if mode not in all_modes:
            raise click.UsageError(f"--modes {mode}: must be of {', '.join(all_modes)}")
    loads = parse_loads(options.loads or "0.3,0.6,0.9,1.2")
    output = options.output or Path("bench.png")
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--output {output}: must end in .png, .svg or .pdf")
    sweep_settings = SweepSettings(
        model=options.model or "shapes",
        modes=modes,
        loads=loads,
        mix=_mix(options),
        task=options.task,
        count=options.num_prompts or 100,
        burst=options.burst,
        clients=options.max_concurrency or 16,
        warmup=options.warmup,
        slo_scale=options.slo_scale or 5.0,
        seed=options.seed,
        api_key=options.api_key,
        timeout_s=options.timeout,
    )
    swept = asyncio.run(sweep(sweep_settings, _bar))
    points = [
        (p.mode, p.load, (s.latency_mean, s.latency_p99, s.slo_attainment_rate))
        for p in swept.points
        for s in [p.summary]
    ]
    draw([(f"{swept.model}: load 1 is {swept.capacity_qps:.3g} req/s", points)], output)
    return swept.as_json(), swept.table()


def _mix(options: Flags) -> Mix:
    body = {
        "model": None if options.sweep else options.model,
        "size": options.size,
        "num_inference_steps": options.steps,
    }
    body = {name: value for name, value in body.items() if value is not None}
    if options.mix is None:
        return Mix([Setting(body)])
    with of_file(options.mix):
        return read_mix(text_of(options.mix), body)


def _arrivals(options: Flags, rate: float) -> list[Arrival]:
    when, rng = generators(options.seed)
    mix = _mix(options)
    if options.trace is None:
        times = bursts(rate, when, size=options.burst)
        return plan(times, mix, rng, count=options.num_prompts or 100)
    if options.request_rate is not None:
        raise click.UsageError("--trace says when requests arrive: leave out --request-rate")
    return traced(options.trace, mix, rng, options.num_prompts)


def _bar(label: str, count: int) -> "Tick":
    """A progress bar on standard error, if that is a terminal."""
    from tqdm import tqdm

    return tqdm(total=count, desc=label, disable=not sys.stderr.isatty()).update
