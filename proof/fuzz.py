"""Fuzz a server with valid and invalid requests by its OpenAPI document: schemathesis.

usage: make fuzz     (or: python -m proof.fuzz [--examples 60] [--seed 1]
                       [--only SERVER ...] [--write])

It needs a separate environment, `build/fuzz`: `make fuzz` creates it.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from proof.house import House, adapters, open_house
from proof.page import conclude, machine, parser_of, table

PROGRAM = Path(__file__).parents[1] / "build" / "fuzz" / "bin" / "schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
RULES = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 504]\n'
"""504 is allowed: a request's `timeout_s` may run out."""
KEY = "a-key-of-a-client"
SETUPS: Mapping[str, tuple[str, ...]] = {  # models and flags of each server
    "shapes": ("shapes",),
    "shapes-video": ("shapes-video",),
    "two workers": ("shapes", "--workers", "2", "--api-key", f"client={KEY}"),
    "two models": ("pictures=shapes", "films=shapes-video", "--api-key", f"client={KEY}"),
}
"""Pictures; videos; several workers and models with a key and an adapter folder."""
FLAGS = ("--max-steps", "2", "--max-n", "2", "--max-pixels", "4096", "--max-frames", "8")
LEAST_CASES = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one server."""

    setup: str
    operations: int
    cases: int
    failures: list[str]
    statuses: Mapping[int, int]  # counts by status


async def fuzz(setup: str, examples: int, seed: int) -> Run:
    """Start a server and send some hundred requests to each endpoint.

    Args:
        setup: one of `SETUPS`.

    Raises:
        RuntimeError: schemathesis does not start or finish.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-proof-") as name:
        folder = Path(name)
        rules, report = folder / "schemathesis.toml", folder / "report.json"
        rules.write_text(RULES)
        logs = ("--log-format", "json", "--log-level", "debug", "--state-dir", "none")
        flags = (*SETUPS[setup], *FLAGS, *logs)
        if has_key := "--api-key" in flags:
            flags = (*flags, *adapters(folder))
        house = House(folder, flags, "")
        async with httpx2.AsyncClient(trust_env=False) as http, open_house(house, http):
            before = house.log.stat().st_size
            process = await asyncio.create_subprocess_exec(
                str(PROGRAM), "--config-file", str(rules), "run", f"{house.url}/openapi.json",
                "--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS),
                "--exclude-path", "/v1/events",  # endless
                "--max-examples", str(examples), "--seed", str(seed), "--no-shrink",
                "--continue-on-failure", "--request-timeout", "60", "--warnings", "off",
                "--report", "json", "--report-json-path", str(report),
                *(("--header", f"Authorization: Bearer {KEY}") if has_key else ()),
                cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await process.communicate()
            if not report.exists():
                raise RuntimeError(f"schemathesis left no report:\n{output.decode()[-2000:]}")
            results = json.loads(report.read_text())
            with house.log.open(errors="replace") as log:
                log.seek(before)
                statuses = Counter(answered(log))
    return run_of(setup, results, statuses)


def answered(lines: Iterable[str]) -> Iterable[int]:
    """The statuses in an access log."""
    for line in lines:
        if line.startswith("{"):
            record = json.loads(line)
            if record.get("logger") == "carpool.access":
                yield record["status"]


def run_of(setup: str, report: Mapping[str, Any], statuses: Mapping[int, int]) -> Run:
    """Convert a report of schemathesis.

    Raises:
        RuntimeError: it could not test everything.
    """
    if not report["complete"] or report["operations"]["tested"] < report["operations"]["selected"]:
        raise RuntimeError(f"schemathesis did not come to an end: {report['stop_reason']}")
    failures = [json.dumps(entry)[:500] for entry in (*report["failures"], *report["errors"])]
    cases = report["test_cases"]["generated"]
    return Run(setup, report["operations"]["tested"], cases, failures, dict(statuses))


def page(runs: list[Run], examples: int, seed: int) -> str:
    """The section of the page."""
    statuses = sorted({status for run in runs for status in run.statuses})
    rows = [
        [run.setup, run.operations, run.cases, len(run.failures),
         *(run.statuses.get(status, 0) for status in statuses)]
        for run in runs
    ]  # fmt: skip
    heads = ["server", "operations", "cases", "failures", *map(str, statuses)]
    return f"""Made by `python -m proof.fuzz --examples {examples} --seed {seed}`.
Machine: {machine()}.

{sum(run.cases for run in runs)} cases; server errors, undocumented statuses, content types or
bodies: **{sum(len(run.failures) for run in runs)}**. The right columns count answers by status.

{table(heads, rows)}
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--examples", type=int, default=60, help="most examples of each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[*SETUPS], choices=[*SETUPS], metavar="SERVER")
    options = parser.parse_args()
    if not PROGRAM.exists():
        print("schemathesis is missing: `make fuzz` installs it", file=sys.stderr)
        return 2
    runs = [asyncio.run(fuzz(setup, options.examples, options.seed)) for setup in options.only]
    problems = [failure for run in runs for failure in run.failures]
    if (cases := sum(run.cases for run in runs)) < LEAST_CASES:
        problems.append(f"only {cases} cases")
    is_whole = options.write and len(runs) == len(SETUPS)
    text = page(runs, options.examples, options.seed)
    return conclude(text, problems, "fuzz" if is_whole else None)


if __name__ == "__main__":
    raise SystemExit(main())
