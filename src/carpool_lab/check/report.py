"""Report of a check: as text, as JSON, and with advice on settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from carpool_lab.check.results import ComponentTiming, TimingReport
from carpool_lab.check.run import Method, PlainComparison, Proof


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of a check: one model on this machine."""

    requests: tuple[str, ...]  # descriptions
    limit: float | None  # limit of docs/numerics.md for `fast`; None: no limit
    proofs: Mapping[str, Proof]  # proofs by numerics mode
    plain: PlainComparison
    timing: TimingReport
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Differences that exceed `docs/numerics.md`."""
        problems = []
        fast, exact = self.proofs["fast"].difference, self.proofs["exact"].difference
        if self.limit is not None and not fast <= self.limit:
            problems.append(f"fast: {show(fast)} together against alone; allowed is {self.limit:g}")
        if exact:
            problems.append(f"exact: {show(exact)} together against alone; allowed is 0")
        plain = self.plain.difference
        if self.limit is not None and plain is not None and not plain <= self.limit:
            problems.append(
                f"alone: {show(plain)} against plain diffusers; allowed is {self.limit:g}: "
                "please report it"
            )
        return problems

    @property
    def max_batch_size(self) -> int:
        """Rows of the widest worthwhile step."""
        rows = [self.timing.knee * part.rows for part in self.timing.denoisers]
        return max(rows, default=1)

    @property
    def is_widest_timed(self) -> bool:
        """Return whether steps wider than all timed steps may be worthwhile too."""
        rows = (max(part.seconds) for part in self.timing.denoisers if not part.too_wide)
        return self.max_batch_size >= max(rows, default=0) > 1

    @property
    def advice(self) -> str:
        """One sentence of advice on settings."""
        fast, exact = self.proofs["fast"].difference, self.proofs["exact"].difference
        is_fast = self.limit is None or fast <= self.limit
        if not is_fast and exact:
            return "Set `--batching-mode off`: batched requests get different answers here."
        rows, cost = self.max_batch_size, self._exact_cost()
        if not is_fast:
            return (
                f"Set `--max-batch-size {rows} --numerics exact`: in fast numerics answers differ "
                f"by {show(fast)}, which is more than {self.limit:g}."
            )
        if not any(method.fuses for method in self.proofs["fast"].methods if _is_step(method)):
            return (
                "Keep the defaults (`--numerics fast`): steps of this model run one request "
                "at a time here, for the reason above, so wider forwards gain little."
            )
        price = f" and take {cost:.2g} times as long a step" if cost and cost > 1.05 else ""
        exact_words = f"with `--numerics exact` they have the same bits{price}"
        if exact:
            exact_words = "`--numerics exact` does not hold here"
        return (
            f"Set `--max-batch-size {rows} --numerics fast`: answers of requests together differ "
            f"by {show(fast)} from those alone; {exact_words}."
        )

    def _exact_cost(self) -> float | None:
        """Time of the widest step in exact numerics, relative to fast numerics."""
        fast, exact = (
            {
                method.name: method.calls.usual_s()
                for method in self.proofs[mode].methods
                if _is_step(method) and method.calls.max_requests > 1
            }
            for mode in ("fast", "exact")
        )
        widths = [
            (rows, name)
            for name, seconds in fast.items()
            for rows in seconds
            if rows in exact.get(name, {})
        ]
        if not widths:
            return None
        rows, name = max(widths)
        return exact[name][rows] / fast[name][rows]

    def as_json(self) -> dict[str, Any]:
        """The whole report. Seconds, bytes; differences are maxima over all values of an answer."""
        return {
            **self.timing.as_json(),
            "requests": list(self.requests),
            "limit": self.limit,
            "numerics": {
                mode: {
                    "largest_difference": _finite(proof.difference),
                    "components": [_component(method) for method in proof.methods],
                }
                for mode, proof in self.proofs.items()
            },
            "plain": {
                "largest_difference": _finite(self.plain.difference),
                "why_not": self.plain.why or None,
            },
            "notes": list(self.notes),
            "problems": self.problems,
            "set": {
                "max_batch_size": self.max_batch_size,
                "exact_costs": self._exact_cost(),
                "sentence": self.advice,
            },
        }

    def as_text(self) -> str:
        """The report for a terminal; ends with advice on settings."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.timing.model} on {self.timing.device}, {self.timing.dtype}; requests:"
        yield from (f"  {request}" for request in self.requests)
        for mode, proof in self.proofs.items():
            yield ""
            allowed = show(self.limit) if self.limit is not None else "not limited here"
            allowed = "0" if mode == "exact" else allowed
            yield (
                f"numerics {mode}: together against alone {show(proof.difference)} "
                f"(allowed: {allowed})"
            )
            yield "| component | fuses | together | largest difference | why |"
            yield "|---" * 5 + "|"
            for method in proof.methods:
                observed = method.calls
                gap = show(observed.difference) if observed.compared else "-"
                how = method.how if method.fuses else f"no: {method.how}"
                yield f"| {method.name} | {how} | {observed.max_requests} | {gap} | {method.why} |"
        against = self.plain.difference
        difference = show(against) if against is not None else f"not compared: {self.plain.why}"
        yield ""
        yield f"alone against plain diffusers: {difference}"
        calls = {method.name: method.calls for method in self.proofs["fast"].methods}
        timing = self.timing
        yield ""
        yield f"{timing.size_name}{': ' * bool(timing.problem)}{timing.problem}"
        yield "| component | rows | ms | rows/s | peak MiB | |"
        yield "|---" * 6 + "|"
        for part in timing.components:
            peaks = part.peak_bytes or getattr(calls.get(part.kind.name), "bytes", {})
            yield from _timed(part, peaks, timing.min_gain)
        yield ""
        for name, its in calls.items():
            if (row_bytes := its.row_bytes) is not None:
                yield f"{name}: {row_bytes / 2**20:.3g} MiB a row"
            if its.too_wide:
                yield f"{name}: {its.too_wide} rows did not fit the memory"
        yield from self.notes
        if self.is_widest_timed:
            yield "The widest timed step is worthwhile: wider ones may be too (--max-rows)."
        yield from (f"LARGER THAN ALLOWED: {problem}" for problem in self.problems)
        yield ""
        yield self.advice


def _is_step(method: Method) -> bool:
    return method.calls.phase == "denoise"


def _timed(part: ComponentTiming, peaks: Mapping[int, int], min_gain: float) -> Iterator[str]:
    bend = part.knee(min_gain)
    for rows, seconds in part.seconds.items():
        peak = f"{peaks[rows] / 2**20:.3g}" if rows in peaks else "-"
        mark = "knee" if rows == bend else ""
        yield (
            f"| {part.kind.name} | {rows} | {seconds * 1000:.3g} | {rows / seconds:.4g} | {peak} "
            f"| {mark} |"
        )
    if part.too_wide:
        yield f"| {part.kind.name} | {part.too_wide} | - | - | - | did not fit: the limit |"


def _component(method: Method) -> dict[str, Any]:
    calls = method.calls
    return {
        "name": method.name,
        "phase": calls.phase,
        "fuses": method.fuses,
        "how": method.how,
        "why": method.why or None,
        "widest_requests": calls.max_requests,
        "largest_difference": _finite(calls.difference) if calls.compared else None,
        "seconds": calls.usual_s(),
        "peak_bytes": dict(sorted(calls.bytes.items())),
        "row_bytes": calls.row_bytes,
        "did_not_fit_rows": calls.too_wide,
    }


def show(difference: float) -> str:
    """A difference as text; 0 is exact."""
    return f"{difference:.1e}" if difference else "0"


def _finite(value: float | None) -> float | str | None:
    """A number for JSON, which has no infinity."""
    return "inf" if value == float("inf") else value
