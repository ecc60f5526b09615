"""Serve models of published size on a CPU, with a budget of a quarter of their weights.

usage: make real-size   (or: python -m proof.real_size [--model flux,wan] [--memory 8GiB] [--write]
                         [--folder FOLDER] [--runs together,plan,exact,bus,int8,gguf] [--tiny])

FLUX.1-schnell and Wan 2.2 A14B with random weights are written to a folder, served by `carpool
serve`, and removed; models in an explicit FOLDER stay and are reused. It needs 24 GB of memory,
60 GB of disk (int8 of Wan: 70 GB), and up to an hour. Each row is stored as soon as it is measured.
Memory is the worker's, as reported by Linux and sampled from outside. `--write` puts the tables
into docs/streaming.md.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import torch

from proof import real_size_bus, real_size_plan
from proof.house import House
from proof.page import machine, table, with_section
from proof.real_size_model import write, write_gguf, write_lora

PAGE = Path(__file__).parents[1] / "docs" / "streaming.md"
GIB = 2**30
START_LIMIT_S, ANSWER_LIMIT_S, LOOK_S = 3600.0, 3600.0, 1.0
REQUESTS: dict[str, list[dict[str, Any]]] = {  # four of three sizes; one clip is guided
    "flux": [
        {"size": size, "num_inference_steps": steps, "max_sequence_length": 16}
        for size, steps in (("32x32", 4), ("48x32", 3), ("48x48", 2), ("32x32", 2))
    ],
    "wan": [
        {"size": size, "num_frames": frames, "guidance_scale": guidance, "num_inference_steps": 2,
         "max_sequence_length": 8}
        for size, frames, guidance in (
            ("32x32", 1, 4.0), ("48x32", 1, 1.0), ("32x32", 5, 1.0), ("32x32", 1, 1.0)
        )
    ],
}  # fmt: skip
TYPES = {"flux": "bfloat16", "wan": "bfloat16,vae=float32"}  # as the hub has Wan's VAE
DENOISERS = ("transformer", "transformer_2")


@dataclass(slots=True)
class Served:
    """A server of a model, with samples of its worker's memory."""

    house: House
    http: httpx2.Client
    ready_s: float = 0.0
    samples: list[tuple[int, int]] = field(default_factory=list)  # resident and peak bytes

    def draw(self, bodies: Sequence[dict[str, Any]]) -> list[tuple[bytes, float]]:
        """Send requests at once; returns the file and the seconds of each."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self._draw, bodies))

    def _draw(self, body: dict[str, Any]) -> tuple[bytes, float]:
        began_s = time.monotonic()
        if "num_frames" not in body:
            answer = self._post("/v1/images/generations", {**body, "response_format": "b64_json"})
            return answer["data"][0]["b64_json"].encode(), time.monotonic() - began_s
        video = self._post("/v1/videos", body)
        while video["status"] not in ("completed", "failed"):
            time.sleep(LOOK_S)
            video = self.http.get(f"/v1/videos/{video['id']}").json()
        if video["status"] == "failed":
            raise RuntimeError(f"a clip failed: {video['error']}")
        file = self.http.get(f"/v1/videos/{video['id']}/content")
        return file.content, time.monotonic() - began_s

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.http.post(path, json=body)
        if answer.status_code >= 300:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def statistics(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.http.get("/stats").json()
        return dict(stats.get("engine", stats))

    def memory(self) -> tuple[str, str]:
        """Resident memory of the worker since the last call: median and peak, GiB."""
        self.look()
        samples, self.samples = self.samples or [(0, 0)], []
        for pid in self.house.workers():
            with suppress(OSError):  # it has exited
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # begin a new peak
        resident, peaks = zip(*samples, strict=True)
        return f"{median(resident) / GIB:.1f}", f"{max(peaks) / GIB:.1f}"

    def look(self) -> None:
        """Sample the worker's memory."""
        self.samples += [bytes_of(pid) for pid in self.house.workers()]


@contextmanager
def serving(folder: Path, model: Path, flags: Sequence[str]) -> Iterator[Served]:
    """Run a server; yields it when healthy, and stops it at the end."""
    flags = "--dtype", TYPES[model.name], "--threads", str(len(os.sched_getaffinity(0))), *flags
    house = House(folder, (*flags, "--max-wait", "36000"), str(model))
    http = httpx2.Client(base_url=house.url, timeout=ANSWER_LIMIT_S)
    served, is_over = Served(house, http), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            served.look()

    began_s = time.monotonic()
    house.start()
    threading.Thread(target=look, daemon=True).start()
    try:
        asyncio.run(ready(house))
        served.ready_s = time.monotonic() - began_s
        yield served
    finally:
        is_over.set()
        http.close()
        house.kill_all()


async def ready(house: House) -> None:
    async with httpx2.AsyncClient(trust_env=False) as http:
        await house.ready(http, within_s=START_LIMIT_S)


def bytes_of(pid: int) -> tuple[int, int]:
    """Memory of a process with mapped files: resident, and the peak since it was cleared."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has exited
        return 0, 0
    entries = dict(re.findall(r"^(Vm(?:RSS|HWM)):\s+(\d+) kB", text, re.MULTILINE))
    return int(entries.get("VmRSS", 0)) * 1024, int(entries.get("VmHWM", 0)) * 1024


def bodies(name: str) -> list[dict[str, Any]]:
    return [
        {**request, "prompt": f"a white star and {number} red circles", "seed": number}
        for number, request in enumerate(REQUESTS[name])
    ]


class Proof:
    """The runs of one model; each adds rows."""

    def __init__(self, name: str, folder: Path, options: Any, keep: Callable[[Any], None]) -> None:
        self.name, self.folder, self.keep = name, folder, keep
        self.model, self.flags = folder / name, ("--memory", options.memory)
        self.bus: float = options.bus

    @property
    def denoisers(self) -> list[str]:
        return [name for name in DENOISERS if (self.model / name).exists()]

    def row(self, action: str, outcome: str, served: Served, seconds: float) -> None:
        resident, peak = served.memory()
        cells = [action, outcome, f"{seconds:.0f}", resident, peak]
        self.keep({"model": self.name, "table": "runs", "row": cells})

    def together(self) -> None:
        """Four requests, a kill and an adapter on one server."""
        adapter, requests = self.folder / "style.safetensors", bodies(self.name)
        write_lora(self.model, "transformer", adapter)
        with serving(self.folder, self.model, (*self.flags, "--lora", f"style={adapter}")) as here:
            self.row("start, until healthy", started(here.house), here, here.ready_s)
            began_s = time.monotonic()
            outputs = here.draw(requests)
            took_s, stats = time.monotonic() - began_s, here.statistics()
            streaming = stats["streaming"]
            steps = sum(body["num_inference_steps"] for body in requests)
            outcome = (
                f"{steps} steps in {forwards_of(stats)} forwards of denoisers; "
                f"{streaming['forwards']} forwards in {streaming['sweeps']} sweeps; "
                f"{streaming['moved_bytes'] / GIB:.0f} GiB moved"
            )
            self.row("four requests of three sizes, together", outcome, here, took_s)
            self.killed(here, requests[1:3], [file for file, _ in outputs[1:3]])
            began_s = time.monotonic()
            [(styled, _)] = here.draw([{**requests[1], "lora": [{"id": "style", "scale": 1.0}]}])
            outcome = "another picture" if styled != outputs[1][0] else "WRONG: the same picture"
            self.row("with an adapter of rank 16", outcome, here, time.monotonic() - began_s)

    def killed(self, here: Served, requests: list[dict[str, Any]], before: list[bytes]) -> None:
        """Kill the worker after about half of the steps."""
        [worker], began_s = here.house.workers()[-1:], time.monotonic()
        steps = sum(body["num_inference_steps"] for body in requests)
        half = here.statistics()["steps"] + steps // 2
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(here.draw, requests)
            while here.statistics()["steps"] < half and not answers.done():
                time.sleep(LOOK_S)
            os.kill(worker, signal.SIGKILL)
            files = [file for file, _ in answers.result()]
        again = forwards_of(here.statistics(), by_rows=True)
        match = "the same pictures" if files == before else "other last bits"
        outcome = f"{again} of {steps} request-steps ran again or anew in the next worker; {match}"
        self.row("worker killed half way", outcome, here, time.monotonic() - began_s)

    def exact(self) -> None:
        """Compare two requests alone and together, bit by bit."""
        first, second, *_ = ({**body, "num_inference_steps": 2} for body in bodies(self.name))
        with serving(self.folder, self.model, (*self.flags, "--numerics", "exact")) as here:
            began_s = time.monotonic()
            alone = [here.draw([body])[0][0] for body in (first, second)]
            company = [file for file, _ in here.draw([first, second])]
            outcome = "equal bits" if alone == company else "WRONG: other bits"
            self.row("exact: two alone, then together", outcome, here, time.monotonic() - began_s)

    def quantized(self, title: str, flags: Sequence[str]) -> None:
        body = {**bodies(self.name)[-1], "num_inference_steps": len(self.denoisers)}
        with serving(self.folder, self.model, (*self.flags, *flags)) as here:
            self.row(f"{title}: start", started(here.house), here, here.ready_s)
            before, [(_, took_s)], after = here.statistics(), here.draw([body]), here.statistics()
            self.row(f"{title}: a request", f"{forwards_of(after)} forwards", here, took_s)
            self.compare(before, after, body, f"{title} ")

    def slow_bus(self) -> None:
        three = bodies(self.name)[:3]
        for row in real_size_bus.measure(self.model, self.flags[1], three, self.bus):
            self.keep({"model": self.name, "table": "bus", "row": row})

    def plan(self) -> None:
        """Compare the planner's prediction for a second request with the measurement."""
        first, _, body, *_ = bodies(self.name)
        with serving(self.folder, self.model, self.flags) as here:
            here.draw([first])
            before = here.statistics()
            here.draw([{**body, "prompt": "a harbour"}])
            self.compare(before, here.statistics(), body)

    def compare(self, before: Any, after: Any, body: dict[str, Any], title: str = "") -> None:
        for name, *cells in real_size_plan.rows(self.model, before, after, body, title):
            self.keep({"model": self.name, "table": "plan", "row": [title + name, *cells]})


def forwards_of(stats: dict[str, Any], *, by_rows: bool = False) -> int:
    """Forwards of denoisers, or requests in them."""
    forwards = [entry for entry in stats["forwards"] if entry["component"] in DENOISERS]
    return sum(entry["count"] * (entry["requests"] if by_rows else 1) for entry in forwards)


def started(house: House) -> str:
    """The times of the worker's start, from the log."""
    parts = re.findall(r"reading took [\d.]+ s, .*", house.log.read_text(errors="replace"))
    return f"{parts[-1] if parts else '?'}; the rest imports"


HEADS = {
    "runs": ["run", "result", "seconds", "resident GiB", "peak GiB"],
    "bus": ["way", "seconds", "sweeps", "GiB moved"],
    "plan": ["", "planned", "measured", "error"],
}
TITLES = {"flux": "FLUX.1-schnell", "wan": "Wan 2.2 T2V A14B"}


def page(rows: Sequence[dict[str, Any]]) -> str:
    tables: dict[tuple[str, str, str], list[list[str]]] = {}
    for row in rows:
        tables.setdefault((row["model"], row["table"], row["machine"]), []).append(row["row"])
    return "\n\n".join(
        f"**{TITLES[name]}**, {part}; {where}\n\n{table(HEADS[part], tables[name, part, where])}"
        for name, part, where in sorted(tables, key=lambda key: (key[0], list(HEADS).index(key[1])))
    )


def prove(name: str, folder: Path, options: Any, keep: Callable[[Any], None]) -> None:
    proof, began_s = Proof(name, folder, options, keep), time.monotonic()
    if not proof.model.exists():
        without = "transformer" if options.runs == "gguf" else ""  # its GGUF file is written later
        write(name, proof.model, without=without, is_tiny=options.tiny)
        files = {file.stat().st_ino: file.stat().st_size for file in proof.model.rglob("*.*")}
        size = f"{sum(files.values()) / 1e9:.1f} GB of files"
        cells = ["written", size, f"{time.monotonic() - began_s:.0f}", "", ""]
        keep({"model": name, "table": "runs", "row": cells})
    runs: dict[str, Callable[[], None]] = {
        "together": proof.together,
        "plan": proof.plan,
        "exact": proof.exact,
        "bus": proof.slow_bus,
        "int8": lambda: proof.quantized("int8", ("--quantize", "int8")),
        "gguf": lambda: proof.quantized("GGUF Q8", _as_gguf(proof)),
    }
    for run in options.runs.split(","):
        try:
            runs[run]()
        except Exception as error:  # other runs may succeed
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            keep({"model": name, "table": "runs", "row": [run, f"FAILED: {why}", "", "", ""]})


def _as_gguf(proof: Proof) -> list[str]:
    """Flags of a server whose denoisers are GGUF files; Wan's experts are one under two names."""
    first, *_ = files = [proof.folder / f"{proof.name}-{part}.gguf" for part in proof.denoisers]
    for file in files:
        if not first.exists():
            write_gguf(proof.name, proof.model / "transformer", first)
        elif not file.exists():
            file.hardlink_to(first)
    pairs = zip(proof.denoisers, files, strict=True)
    return [flag for part, file in pairs for flag in ("--component", f"{part}={file}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="flux,wan")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--folder", type=Path, help="folder of models to keep  [default: removed]")
    parser.add_argument("--runs", default="together,plan,exact,bus,int8,gguf")
    parser.add_argument("--bus", type=float, default=1e9, help="bytes a second of the slow bus")
    parser.add_argument("--rows", type=Path, default=Path("build/real-size.jsonl"))
    parser.add_argument("--tiny", action="store_true", help="small models: a dry run")
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    options = parser.parse_args()
    options.rows.parent.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # cores may be shared: do not spin

    def keep(row: Any) -> None:
        print(row["model"], *row["row"], sep=" | ", flush=True)
        where = f"{machine()}, {torch.backends.cpu.get_cpu_capability()}"
        with options.rows.open("a") as lines:
            lines.write(json.dumps({**row, "machine": where}) + "\n")

    for name in options.model.split(","):
        folder = options.folder or Path(tempfile.mkdtemp(prefix="carpool-real-size-"))
        folder.mkdir(exist_ok=True)
        try:
            prove(name, folder, options, keep)
        finally:
            if options.folder is None:
                shutil.rmtree(folder)
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    if options.write:
        PAGE.write_text(with_section(PAGE.read_text(), "real-size", page(rows)))
    sys.exit(any("FAILED" in str(row) or "WRONG" in str(row) for row in rows))


if __name__ == "__main__":
    main()
