"""Built-in cost tables of the simulator: seconds of a forward by rows.

Each table is one denoiser at one size: measured points, the gain of rows until the device
saturates, or the maximum of copying weights and computing. FLOPs set the times of encoding and
decoding. Assumed, not measured: half of an encoding is constant and half grows with the rows,
because prompts are short; decoding is proportional to rows, because pictures are large.

Sources: Qwen-Image at 512 px on H200, seconds a step: measured, SGLang issue 22183. The others:
FLOPs counted with PyTorch's FlopCounterMode over the published configs, 790 TFLOP/s and 4.3 TB/s
as measured on one H200, 7 us of eager dispatch for each operation, and for the 24 GB card
165 TFLOP/s and weights over PCIe at 25 GB/s, copied while computing. They are estimates.
`streamed-mixed-sizes` is Qwen-Image on that card with shared sweeps: compute seconds in proportion
to the tokens of each size, plus the seconds of copying the weights once for both guidance
branches.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from carpool.errors import InvalidValue
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind
from carpool.types import Phase, phase_of

MAX_ROWS: Mapping[Phase, int] = {"encode": 8, "denoise": 8, "decode": 4}  # rows, as in the server
ENCODE_FIXED = 0.5  # constant part of an encoding's seconds


_Rows = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_kind = cache(CallKind)  # one object per kind: faster look-ups


@dataclass(frozen=True, slots=True)
class Table:
    """Costs of a model's stages at one size."""

    name: str
    steps: Annotated[int, Meta(ge=1)]  # default steps
    denoise_s: Mapping[_Rows, _Seconds]  # a denoising step, by requests in it
    encode_s: _Seconds
    decode_s: _Seconds
    is_streamed: bool = False  # weights do not fit; every forward copies them
    sweep_s: float = 0.0  # copying them once for a sweep; not in `denoise_s`
    px: int = 0  # side, if the name does not have it

    @property
    def model(self) -> str:
        return self.name.partition("-")[0]

    @property
    def side_px(self) -> int:
        """The side of a square picture in pixels; 0 if unknown."""
        return self.px or next((int(word) for word in self.name.split("-") if word.isdecimal()), 0)

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT in pixels; "" if unknown."""
        if self.side_px:
            return f"{self.side_px}x{self.side_px}"
        words = (word.split("x") for word in self.name.split("-"))
        return next(("x".join(w) for w in words if len(w) == 2 and all(map(str.isdecimal, w))), "")

    def kind(self, phase: Phase) -> CallKind:
        if phase == "encode":  # all sizes share it
            return _kind(phase, 0, self.model)
        return _kind(phase, self.side_px**2, self.name)

    @property
    def streams(self) -> dict[str, float]:
        """Seconds of copying weights, by kind of call that shares sweeps."""
        return {self.kind("denoise").name: self.sweep_s} if self.sweep_s else {}

    def costs(self) -> dict[CallKind, Curve]:
        max_rows = MAX_ROWS["encode"]
        encoded_s = self.encode_s * (ENCODE_FIXED + (1 - ENCODE_FIXED) * max_rows)
        return {
            self.kind("encode"): Curve({1: self.encode_s, max_rows: encoded_s}),
            self.kind("denoise"): Curve(self.denoise_s),
            self.kind("decode"): Curve({n: n * self.decode_s for n in (1, MAX_ROWS["decode"])}),
        }


def _saturating(first_s: float, gains: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows, from the seconds of one row and the gains of more rows."""
    return {1: first_s, **{rows: rows * first_s / gain for rows, gain in gains.items()}}


def _streamed(copy_s: float, row_s: float) -> dict[int, float]:
    """Seconds by rows if copying of weights and computing overlap."""
    return {rows: max(copy_s, rows * row_s) for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}


TABLES = {
    table.name: table
    for table in (
        Table("flux-512", 28, _saturating(0.0433, {2: 1.12, 4: 1.19, 8: 1.24, 16: 1.24}), 0.009,
              0.004),
        Table("flux-1024", 28, _saturating(0.129, {2: 1.03, 4: 1.05, 8: 1.07, 16: 1.08}), 0.009,
              0.018),
        Table("qwen-512", 50, {1: 0.167, 2: 0.183, 3: 0.186, 4: 0.240, 8: 0.425, 16: 0.832}, 0.020,
              0.005),
        Table("qwen-1024", 50, {1: 0.243, 2: 0.474, 3: 0.711, 16: 3.75}, 0.020, 0.020),
        Table("zimage-turbo-512", 8, _saturating(0.0274, {2: 1.08, 4: 1.16, 8: 1.21, 16: 1.24}),
              0.010, 0.004),
        Table("zimage-turbo-1024", 8, _saturating(0.0926, {2: 1.01, 4: 1.04, 8: 1.04, 16: 1.04}),
              0.010, 0.018),
        Table("sana-512", 20, _saturating(0.0107, {2: 2.0, 4: 3.54, 8: 3.76, 16: 3.9}), 0.004,
              0.004),
        Table("sana-1024", 20, _saturating(0.0107, {2: 1.12, 4: 1.18, 8: 1.25}), 0.004, 0.015),
        *(
            Table(f"streamed-mixed-sizes{suffix}", 50, {1: row_s, 16: 16 * row_s}, 0.6, decode_s,
                  is_streamed=True, sweep_s=3.27, px=side)
            for suffix, side, row_s, decode_s in (
                ("", 512, 0.202, 0.03), ("-384", 384, 0.123, 0.017), ("-256", 256, 0.067, 0.008),
            )
        ),
        Table("flux-512-streamed", 28, _streamed(0.952, 0.130), 0.4, 0.03, is_streamed=True),
        Table("qwen-512-streamed", 50, _streamed(3.27, 0.202), 0.6, 0.03, is_streamed=True),
    )
}  # fmt: skip


def _flux(side_px: int, gains: Mapping[int, float]) -> Table:
    """FLUX at any square size: linear in pixels, through 512 and 1024 px."""
    mpx = side_px**2 / 1e6
    return Table(
        f"flux-{side_px}", 28, _saturating(0.0147 + 0.109 * mpx, gains), 0.009, 0.018 * mpx
    )


MIXED_SIZES = (
    _flux(512, {2: 1.12, 4: 1.19, 8: 1.24}),
    _flux(768, {2: 1.06, 4: 1.10, 8: 1.13}),
    _flux(1024, {2: 1.03, 4: 1.05, 8: 1.07}),
    _flux(1536, {2: 1.01, 4: 1.02, 8: 1.02}),
)
"""Sizes of llm-d's measurements of its diffusion router (llm-d-router pull request 2053)."""


def table(name: str) -> Table:
    """A built-in table.

    Raises:
        InvalidValue: no table has this name.
    """
    if name not in TABLES:
        raise InvalidValue(f"table {name!r}: must be of {', '.join(TABLES)}")
    return TABLES[name]


def siblings(table: Table) -> list[Table]:
    """The table, followed by tables of the same model at other sizes."""
    sizes = [
        candidate
        for candidate in TABLES.values()
        if candidate.model == table.model
        and candidate.is_streamed == table.is_streamed
        and candidate != table
    ]
    return [table, *sizes]


def learned(costs: Costs, *, steps: int) -> dict[str, Table]:
    """Tables from an engine's learned costs: one for each size of its denoiser.

    Encoding and decoding have the costs of the median size.

    Args:
        steps: default steps, which an engine does not know.

    Raises:
        InvalidValue: nothing was learned about denoising.
    """
    sides: dict[str, dict[str, list[float]]] = {"encode": {}, "decode": {}}
    denoisers: dict[CallKind, Curve] = {}
    for kind, curve in costs:
        component, _, method = kind.name.partition(".")
        phase = phase_of(component, method)
        if phase == "denoise":
            denoisers[kind] = curve
        else:
            sides[phase].setdefault(kind.name, []).append(curve.seconds(1))
    if not denoisers:
        raise InvalidValue("the costs have no denoiser: let the server draw something first")
    encode_s, decode_s = (
        sum(map(statistics.median, sides[phase].values())) for phase in ("encode", "decode")
    )
    return {
        str(kind): Table(str(kind), steps, curve.measured, encode_s, decode_s)
        for kind, curve in denoisers.items()
    }


def knee(seconds: Mapping[int, float], min_gain: float) -> int:
    """The widest worthwhile forward. A width that is not worthwhile is skipped: a wider one may be.

    Args:
        seconds: seconds of a forward, by rows; at least one entry.
        min_gain: minimum relative gain in rows a second for each additional row.
    """
    widths = sorted(seconds)
    knee = widths[0]
    for width in widths[1:]:
        if width / seconds[width] * seconds[knee] / knee - 1 > min_gain * (width - knee):
            knee = width
    return knee


class _Tables(Struct):
    """The part of such a file that the simulator reads."""

    tables: list[Table]


def read_tables(data: Any) -> list[Table]:
    """Read the tables in a file of `carpool check --json` or `carpool plan --json`.

    Raises:
        InvalidValue: another file, or nothing could be measured.
    """
    try:
        entries = convert(data, _Tables, str_keys=True).tables
    except ValidationError as error:
        message = f"is not a file of `carpool check --json` or `carpool plan --json`: {error}"
        raise InvalidValue(message) from None
    if not entries or not all(entry.denoise_s.get(1) for entry in entries):
        raise InvalidValue("has no table of one request: not even one could be run")
    return entries
