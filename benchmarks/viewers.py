"""The cost of viewers of `GET /v1/events` on a busy server: CPU seconds of a drawing.

usage: make bench-viewers     (or: python -m benchmarks.viewers [--rounds N])

One `carpool serve shapes` draws the same requests repeatedly, in turns with no viewers and with
ten. The CPU time of its two processes is read before and after each turn, so other load on the
machine hardly matters; the medians of the turns are compared. Turns still differ by a few percent,
so the parts are timed too: the cost in the engine's process does not depend on the number of
viewers, because the front serves them. The last line is CPU seconds of both processes per second of
watching: a slow machine draws less in that time, and viewers cost as much.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from carpool.worker.startup import PROCESS_NAME

ENDPOINT = "/v1/images/generations"
VIEWERS = 10
BODY = {"prompt": "a red circle", "n": 8, "num_inference_steps": 28}
AT_ONCE, REQUESTS = 3, 6  # HTTP requests with eight pictures: 24 run concurrently


class Server:
    """A `carpool serve shapes` process; a context manager stops it."""

    def __init__(self, folder: str, *flags: str) -> None:
        self.front = subprocess.Popen(
            [sys.executable, "-m", "carpool", "serve", "shapes", "--port", "0", "--log-level",
             "warning", "--cost-table", f"{folder}/costs.json", *flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.front.stdout is not None
        lines = iter(self.front.stdout)
        self.url = next(m[0] for line in lines if (m := re.search(r"http://[0-9.]+:\d+", line)))
        [self.worker] = [pid for pid in descendants(self.front.pid) if name_of(pid) == PROCESS_NAME]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.front.terminate()
        self.front.wait(60)

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=300, trust_env=False)


def descendants(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def used_s(pid: int) -> float:
    """CPU seconds of a process's live threads so far, in nanosecond resolution.

    Threads of a server never end. `/proc/PID/stat` counts ticks of 10 ms.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def draw(server: Server) -> None:
    """Draw one turn's pictures."""
    seeds = list(range(REQUESTS))

    def work() -> None:
        with server.client() as client:
            while seeds:
                seed = seeds.pop()
                answer = client.post(ENDPOINT, json={**BODY, "seed": 100 * seed})
                assert answer.status_code == 200, answer.text

    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Viewers:
    """Reads ten streams of events on threads of this process."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._streams: list[Any] = []
        self.bytes = 0
        for _ in range(VIEWERS):
            opened = self._client.stream("GET", "/v1/events")
            stream = opened.__enter__()
            self._streams.append(opened)
            threading.Thread(target=self._read, args=[stream], daemon=True).start()

    def _read(self, stream: Any) -> None:
        try:
            for chunk in stream.iter_raw():
                self.bytes += len(chunk)
        except Exception:
            return  # closed

    def close(self) -> None:
        self._client.close()


def parts() -> float:
    """Measure the cost of watching in the engine's process, as a share of one processor.

    It has 32 running and 1,000 waiting requests, and a forward of 8 requests every 5 ms.
    """
    from carpool.engine.observe.activity import ActivityLog
    from carpool.engine.observe.timeline import Forward, Timeline
    from carpool.engine.prediction import snapshot
    from carpool.worker import protocol
    from carpool.worker.activity_sender import INTERVAL_S, ActivitySender

    timeline = Timeline("req-0123456789abcdef", 0.0, 7, phase="denoise", step=3, steps=28)
    state: Any = SimpleNamespace(
        number=7, timeline=timeline, parked=SimpleNamespace(left_s=1.0), submitted_s=0.0,
        request_id=timeline.request_id,
    )  # fmt: skip
    log = ActivityLog()
    messages: list[bytes] = []
    sender = ActivitySender(
        log,
        lambda: snapshot(1.0, [state] * 32, [state] * 1000, [1.0] * 1000, slowdown=1.0),
        lambda _: None,
    )
    log.is_on = True
    forward = Forward("transformer", "forward", "denoise", (timeline,) * 8, (1,) * 8, 0.0, 0.005)
    forwards = round(INTERVAL_S / 0.005)
    noting, reading = [], []
    for _ in range(200):
        began_s = time.thread_time()
        for _ in range(forwards):
            log.forward(forward)
        noted_s = time.thread_time()
        message = sender.read()
        assert message is not None
        messages.append(protocol.encode(message))
        noting.append(noted_s - began_s)
        reading.append(time.thread_time() - noted_s)
    note_s, read_s = statistics.median(noting), statistics.median(reading)
    print(f"the engine's thread: {1e6 * note_s / forwards:.1f} us a forward")
    print(f"another thread: {1e3 * read_s:.2f} ms every {INTERVAL_S:g} s, {len(messages[0])} bytes")
    return (note_s + read_s) / INTERVAL_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, Server(folder) as server:
        worker, front = server.worker, server.front.pid
        draw(server)  # warm-up: widths and kernels are chosen
        turns_s: dict[str, list[tuple[float, float]]] = {"nobody": [], "ten": []}
        took_s: list[float] = []  # seconds of turns with viewers
        n_bytes = 0
        for turn in range(2 * rounds):
            watched = ("nobody", "ten")[(turn + turn // 2) % 2]  # ABBA order cancels drift
            viewers = Viewers(server) if watched == "ten" else None
            before, began_s = (used_s(worker), used_s(front)), time.monotonic()
            draw(server)
            turns_s[watched].append((used_s(worker) - before[0], used_s(front) - before[1]))
            if viewers is not None:
                n_bytes = viewers.bytes
                viewers.close()
                took_s.append(time.monotonic() - began_s)
    pictures = REQUESTS * BODY["n"]  # type: ignore[operator]
    print(f"{pictures} pictures a turn, {rounds} turns each; CPU seconds, medians")
    print(f"{'watched by':12}{'worker':>10}{'front':>10}")
    middle = {}
    for name, turns in turns_s.items():
        middle[name] = [statistics.median(times[i] for times in turns) for i in (0, 1)]
        print(f"{name:12}{middle[name][0]:10.2f}{middle[name][1]:10.2f}")
    extra_s = [ten - alone for alone, ten in zip(middle["nobody"], middle["ten"], strict=True)]
    share = extra_s[0] / middle["nobody"][0]
    print(f"the worker, which limits throughput, uses {share:+.2%}; the front {extra_s[1]:+.2f} s")
    print(f"{n_bytes / VIEWERS / 1000:.0f} kB to each viewer in a turn")
    part = parts()
    sending = extra_s[1] / statistics.median(took_s)
    print(f"ten viewers take {part + sending:.2%} of one processor while they watch:")
    print(f"  {part:.2%} in the worker, which uses a whole one, and {sending:.2%} in the front")


if __name__ == "__main__":
    main()
