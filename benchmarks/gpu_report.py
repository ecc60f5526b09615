"""What `gpu.py` found: a record for each part. Written as lines of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

KNEE = 0.95  # of the most rows a second: a wider forward hardly gains any more


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the records after it were taken."""

    device: str
    versions: str
    tflops: float  # of one large matrix product, measured
    command: str


@dataclass(frozen=True, slots=True)
class Curve:
    """How long forwards of the denoiser take, by their rows."""

    model: str
    size: str
    tflop: float  # of one row
    seconds: dict[str, float]  # by rows; JSON has text for keys
    tflops: float  # of the machine
    peak_gib: float

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(int(rows), seconds) for rows, seconds in self.seconds.items()]

    @property
    def knee(self) -> int:
        """The narrowest forward that gives nearly as many rows a second as the best."""
        best = max(rows / seconds for rows, seconds in self.points)
        return min(rows for rows, seconds in self.points if rows / seconds >= KNEE * best)

    def ceiling(self, rows: int) -> float:
        """What a forward of so many rows reaches of the machine's matrix product."""
        return self.tflop * rows / self.seconds[str(rows)] / self.tflops

    @property
    def part(self) -> str:
        return f"curve {self.size}"


@dataclass(frozen=True, slots=True)
class Run:
    """Requests through the engine, all sent at once."""

    model: str
    size: str
    mode: str
    code: str  # "eager" or "compiled"
    steps: str
    warm_up_s: float
    requests: int
    per_s: float
    p50_s: float
    p99_s: float
    forwards: int
    rows: float  # of the denoiser's forwards, mean
    loop_us: float  # the engine's own, a forward
    fiber_us: float  # in the pipeline's code, a forward
    in_forwards: float  # share of the time
    late: float  # share of the forwards
    waited: float  # share of the time
    peak_gib: float

    @property
    def part(self) -> str:
        return f"{self.code} {self.size} {self.mode}"


@dataclass(frozen=True, slots=True)
class Kernels:
    """How much of a stretch the device was running kernels."""

    model: str
    size: str
    code: str
    share: float

    @property
    def part(self) -> str:
        return f"kernels {self.size} {self.code}"


@dataclass(frozen=True, slots=True)
class Likeness:
    """What fusing changes in the pictures."""

    model: str
    size: str
    requests: int
    worst_db: float
    median_db: float
    others_db: float  # between two of the requests: what unlike pictures have

    @property
    def part(self) -> str:
        return f"likeness {self.size}"


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that was not measured, and why."""

    model: str
    part: str  # as the record would say that is missing
    why: str


Record = Machine | Curve | Run | Kernels | Likeness | Missing
KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Machine, Curve, Run, Kernels, Likeness, Missing)
}


def written(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


def parsed(line: str) -> Record:
    fields = json.loads(line)
    record: Record = KINDS[fields.pop("kind")](**fields)
    return record
