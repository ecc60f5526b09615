"""Report of a check: as text, as JSON, and with advice on settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from carpool_lab.check.run import Method, PlainComparison, Proof
from carpool_lab.tune.results import ComponentResult, TuneReport


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of a check: one model on this machine."""

    requests: tuple[str, ...]  # in words
    limit: float | None  # that docs/numerics.md sets for `fast`; None: it sets none
    proofs: Mapping[str, Proof]  # by numerics mode
    plain: PlainComparison
    tuned: TuneReport
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Differences that are larger than `docs/numerics.md` allows."""
        found = []
        fast, exact = self.proofs["fast"].difference, self.proofs["exact"].difference
        if self.limit is not None and not fast <= self.limit:
            found.append(f"fast: {show(fast)} together against alone; allowed is {self.limit:g}")
        if exact:
            found.append(f"exact: {show(exact)} together against alone; allowed is 0")
        plain = self.plain.difference
        if self.limit is not None and plain is not None and not plain <= self.limit:
            found.append(
                f"alone: {show(plain)} against plain diffusers; allowed is {self.limit:g}: "
                "please report it"
            )
        return found

    @property
    def max_batch_size(self) -> int:
        """Rows of the widest step that pays at every size."""
        rows = [
            size.most(self.tuned.min_gain) * one.rows
            for size in self.tuned.sizes
            for one in size.components
            if one.phase == "denoise"
        ]
        return max(rows, default=1)

    @property
    def is_widest_timed(self) -> bool:
        """Return whether a step wider than all that were timed might pay, too."""
        widest = (
            max(one.seconds)
            for size in self.tuned.sizes
            for one in size.components
            if one.phase == "denoise" and not one.too_wide
        )
        return self.max_batch_size >= max(widest, default=0) > 1

    @property
    def advice(self) -> str:
        """One sentence of advice on settings."""
        fast, exact = self.proofs["fast"].difference, self.proofs["exact"].difference
        is_fast = self.limit is None or fast <= self.limit
        if not is_fast and exact:
            return "Set `--batching-mode off`: requests that share forwards get other answers here."
        rows, cost = self.max_batch_size, self._exact_cost()
        if not is_fast:
            return (
                f"Set `--max-batch-size {rows} --numerics exact`: in fast numerics answers differ "
                f"by {show(fast)}, which is more than {self.limit:g}."
            )
        if not any(one.fuses for one in self.proofs["fast"].methods if _is_step(one)):
            return (
                "Keep the defaults (`--numerics fast`): steps of this model run request by "
                "request here, for the reason above, so that wider forwards are of little use."
            )
        price = f" and take {cost:.2g} times as long a step" if cost and cost > 1.05 else ""
        same = f"with `--numerics exact` they have the same bits{price}"
        if exact:
            same = "`--numerics exact` does not hold here"
        return (
            f"Set `--max-batch-size {rows} --numerics fast`: answers of requests together differ "
            f"by {show(fast)} from those alone; {same}."
        )

    def _exact_cost(self) -> float | None:
        """Seconds of the widest step in exact numerics, in parts of those in fast ones."""
        fast, exact = (
            {
                one.name: one.seen.usual_s()
                for one in self.proofs[mode].methods
                if _is_step(one) and one.seen.widest > 1
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
        """The whole report. Seconds, bytes; differences are of any value of an answer."""
        timed = self.tuned.as_json()
        keep = ("model", "device", "dtype", "versions", "min_gain", "repeats")
        return {
            **{name: timed[name] for name in keep},
            "requests": list(self.requests),
            "limit": self.limit,
            "numerics": {
                mode: {
                    "largest_difference": _finite(proof.difference),
                    "components": [_component(one) for one in proof.methods],
                }
                for mode, proof in self.proofs.items()
            },
            "plain": {
                "largest_difference": _finite(self.plain.difference),
                "why_not": self.plain.why or None,
            },
            "sizes": timed["sizes"],
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
        yield f"{self.tuned.model} on {self.tuned.device}, {self.tuned.dtype}; requests:"
        yield from (f"  {one}" for one in self.requests)
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
            for one in proof.methods:
                gap = show(one.seen.difference) if one.seen.compared else "-"
                how = one.how if one.fuses else f"no: {one.how}"
                yield f"| {one.name} | {how} | {one.seen.widest} | {gap} | {one.why} |"
        against = self.plain.difference
        told = show(against) if against is not None else f"not compared: {self.plain.why}"
        yield ""
        yield f"alone against plain diffusers: {told}"
        seen = {one.name: one.seen for one in self.proofs["fast"].methods}
        for size in self.tuned.sizes:
            yield ""
            yield f"{size.name}{': ' * bool(size.problem)}{size.problem}"
            yield "| component | rows | ms | rows/s | peak MiB | |"
            yield "|---" * 6 + "|"
            for part in size.components:
                peaks = part.peak_bytes or getattr(seen.get(part.kind.name), "bytes", {})
                yield from _timed(part, peaks, self.tuned.min_gain)
        yield ""
        for name, its in seen.items():
            if (more := its.row_bytes) is not None:
                yield f"{name}: {more / 2**20:.3g} MiB a row"
            if its.too_wide:
                yield f"{name}: {its.too_wide} rows did not fit the memory"
        yield from self.notes
        if self.is_widest_timed:
            yield "The widest step that was timed pays: wider ones may, too (--max-rows)."
        yield from (f"LARGER THAN ALLOWED: {one}" for one in self.problems)
        yield ""
        yield self.advice


def _is_step(method: Method) -> bool:
    return method.seen.phase == "denoise"


def _timed(part: ComponentResult, peaks: Mapping[int, int], min_gain: float) -> Iterator[str]:
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
    seen = method.seen
    return {
        "name": method.name,
        "phase": seen.phase,
        "fuses": method.fuses,
        "how": method.how,
        "why": method.why or None,
        "widest_requests": seen.widest,
        "largest_difference": _finite(seen.difference) if seen.compared else None,
        "seconds": seen.usual_s(),
        "peak_bytes": dict(sorted(seen.bytes.items())),
        "row_bytes": seen.row_bytes,
        "did_not_fit_rows": seen.too_wide,
    }


def show(difference: float) -> str:
    """A difference for people; 0 is exact."""
    return f"{difference:.1e}" if difference else "0"


def _finite(value: float | None) -> float | str | None:
    """A number as JSON has them; JSON has no infinity."""
    return "inf" if value == float("inf") else value
