"""Carpool's modes, LitServe, plain diffusers behind a lock, or any server: one table a model.

usage: make bench-peers     (or: OMP_NUM_THREADS=1 python -m benchmarks.peers [--model NAME]
           [--rounds N] [--caps 4,8] [--flags=--compile] [--write])
       python -m benchmarks.peers --model NAME --url http://127.0.0.1:30000 [--pid PID]
       python -m benchmarks.peers --model NAME --checkpoint

All servers of a model stand side by side, and take turns at each load, in another order each round:
what else the machine does meets all of them. With `--url` a server that speaks OpenAI's API and has
the model loaded takes a row, too; `--checkpoint` prints the model's folder for it. The rows of
SGLang-Diffusion and vLLM-Omni were measured in November 2026 with those systems installed.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from benchmarks import agreement
from benchmarks.peers.loads import (
    ABANDONED,
    ALIKE,
    BURST,
    LOADS,
    MIXES,
    OVERLOAD,
    Figures,
    Visitor,
    median,
    wrong,
)
from benchmarks.peers.models import MODELS, PeerModel
from benchmarks.peers.parties import LOCKED, Party, Server, parties, running
from proof.page import BENCHMARKS, machine, table, write_section

SIMULATED_SIZE = 8  # the simulator's batches
COLUMNS = (
    "party", "equal", "steps and guidance", "steps", "a lone request", "Poisson", "late", "wrong",
)  # fmt: skip
PUBLISHED = Path(__file__).parent / "published"
Results = Mapping[str, Sequence[Figures]]
"""The rounds of each party, by its name; those of `LOCKED` are first."""


def row(name: str, figures: Sequence[Figures], plain: Sequence[Figures]) -> list[str]:
    """The cells of a party: medians of the rounds.

    Args:
        plain: of the server with the lock, whose pictures are the right ones.
    """
    rates = [f"{median(figures, 'per_s', mix):.1f}/s{_cpu(figures, mix)}" for mix in MIXES]
    lone_s, cells, is_plain = median(figures, "lone_s") or 0.0, [name, *rates], figures is plain
    ratios = [a.lone_s / b.lone_s for a, b in zip(figures, plain, strict=False)]
    times = "" if is_plain else f", {statistics.median(ratios):.2f} of plain"
    cells.append(f"{lone_s * 1e3:.0f} ms{times}{_cpu(figures, 'lone')}")
    if latencies_s := [latency for round_ in figures for latency in round_.poisson_s]:
        mean_s, p99_s = statistics.fmean(latencies_s), np.percentile(latencies_s, 99)
        ratio = mean_s / statistics.fmean(s for round_ in plain for s in round_.poisson_s)
        times = "" if is_plain else f", {ratio:.2f} of plain"
        cells.append(f"{mean_s:.2f} / {p99_s:.2f} s{times}")
    else:
        cells.append("")
    cells.append(f"{median(figures, 'late_s'):.2f} s")
    pairs = [(a.pictures, b.pictures) for a, b in zip(figures, plain, strict=False)]
    count = sum(wrong(*pair) for pair in pairs)
    failed = sum(round_.failed for round_ in figures)
    cells.append(
        f"{count} of {sum(len(b) for _, b in pairs)}" + f", {failed} failed" * bool(failed)
    )
    return cells


def _cpu(figures: Sequence[Figures], name: str) -> str:
    seconds = median(figures, "cpu_s", name)
    return "" if seconds is None else f"; {seconds * 1e3:.0f} ms"


def section(model: PeerModel, results: Results) -> str:
    """The section of a model on the page."""
    plain = results[LOCKED.name]
    lines = [
        f"## Side by side: {model.name}",
        "",
        f"Made by `OMP_NUM_THREADS=1 python -m benchmarks.peers`: {len(plain)} rounds, medians. "
        f"Machine: {machine()}; every server with one thread for torch.",
        f"Bursts are of {BURST} requests at once, {model.steps} steps where equal: pictures a "
        "second; CPU time of all processes of the server for a picture. *A lone request*: "
        f"{model.steps} steps, the server to itself. *Poisson*: mixed steps and guidance at "
        f"{OVERLOAD:g} times what plain diffusers can do, mean and p99 latency. *Late*: what a "
        f"lone request takes longer behind {ABANDONED} requests of {model.abandoned} steps whose "
        f"clients hung up. *Wrong*: pictures more than {ALIKE} of 255 from plain diffusers'.",
        "",
        table(COLUMNS, (row(name, figures, plain) for name, figures in results.items())),
    ]
    if simulated := [r.simulated for f in results.values() for r in f if r.simulated]:
        lines += ["", agreement.ABOUT, "", agreement.table(simulated)]
    if (published := PUBLISHED / f"{model.name}.md").exists():
        lines += ["", published.read_text(encoding="utf-8").rstrip()]
    return "\n".join(lines)


async def measure(
    model: PeerModel, rounds: int, here: Sequence[Party], servers: Mapping[str, Server]
) -> AsyncIterator[Results]:
    """Measure a model; gives all rounds so far after each, as a run of many may be cut.

    Args:
        here: are started; the first one is `LOCKED`.
        servers: servers that run already, by name, which take part.

    Raises:
        RuntimeError: a server does not start.
        RequestError: a server does not give even one picture.
    """
    async with AsyncExitStack() as stack:
        visitors: dict[str, Visitor] = {}
        for party in here:
            print(f"{model.name}: {party.name} starts", file=sys.stderr)
            server = await stack.enter_async_context(running(party, model.checkpoint()))
            is_simulated = model.is_simulated and party.name.endswith(f", {SIMULATED_SIZE}")
            visitor = Visitor(server, model, party.mode if is_simulated else None)
            visitors[party.name] = await stack.enter_async_context(visitor)
        for name, server in servers.items():
            visitors[name] = await stack.enter_async_context(Visitor(server, model))
        order = list(visitors)
        for number in range(rounds):
            for load in LOADS:
                print(f"{model.name}: round {number + 1} of {rounds}, {load}", file=sys.stderr)
                locked, capacity_qps = visitors[LOCKED.name].rounds, 1.0
                if load == "poisson":
                    capacity_qps = 1 / statistics.median(round_.lone_s for round_ in locked)
                for name in order:
                    await visitors[name].visit(load, capacity_qps)
            order = [*order[1:], order[0]]
            yield {name: visitor.rounds for name, visitor in visitors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="  [all]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--caps", default="4,8", help="requests of a batch; none: only --url")
    parser.add_argument("--flags", default="", help="of one more server of `continuous`")
    parser.add_argument("--url", help="a server that runs, too")
    parser.add_argument("--pid", type=int, help="its process, for its CPU time")
    parser.add_argument("--name", default="the server at --url", help="in the table")
    parser.add_argument("--checkpoint", action="store_true", help="print the model's folder")
    parser.add_argument("--write", action="store_true", help="write to docs/benchmarks.md")
    options = parser.parse_args()
    for name in options.model or MODELS:
        model = MODELS[name]
        if options.checkpoint:
            print(model.checkpoint())
        else:
            asyncio.run(_report(model, options))


async def _report(model: PeerModel, options: argparse.Namespace) -> None:
    servers = {options.name: Server(options.url, options.pid)} if options.url else {}
    caps = tuple(int(cap) for cap in options.caps.split(",") if cap)
    here = parties(caps, options.flags) if caps else [LOCKED]
    async for results in measure(model, options.rounds, here, servers):
        text = section(model, results)
        if options.write:
            write_section(f"peers {model.name}", text, BENCHMARKS)
    print(text)


if __name__ == "__main__":
    main()
