"""What a journal costs: CPU time of the worker and of the front that keeps it, with and without.

usage: OMP_NUM_THREADS=1 python -m benchmarks.journal [--model shapes] [--rounds 10]

A worker on threads of this process draws eight requests at a time and sends their answers over a
socket, as it would to a front, which is this process's main thread. A round runs both ways one
after the other, so that ratios of a round hold when the machine's speed drifts; the median counts.
"""

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from carpool.config import EngineSettings
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.process import WorkerProcess

AT_ONCE, STEPS = 8, 20


def draw(connection: socket.socket, journals: Journals | None, arguments: Mapping[str, Any]) -> int:
    """Draw some requests; returns the bytes of their journals."""
    size = 0
    for number in range(AT_ONCE):
        job = CheckedRequest(f"req-{number}", number, arguments)
        if journals is not None:
            journals.open(job.request_id)
        message = protocol.Submit(job, is_journalled=journals is not None)
        connection.sendall(protocol.encode(message))
    left = AT_ONCE
    while left:
        body = protocol.read(connection.recv)
        assert body is not None, "the worker has died"
        match protocol.decode_to_front(body):
            case protocol.Answers(entries) if journals is not None:
                for request_id, entry in entries:
                    journals.add(request_id, entry)
                    size += len(entry.answer)
            case protocol.Done(request_id):
                left -= 1
                if journals is not None:
                    journals.close(request_id)
            case protocol.RequestFailed() | protocol.LoadFailure() as failed:
                raise RuntimeError(failed.message)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    arguments = {"prompt": "a red circle", "num_inference_steps": STEPS}
    ours, theirs = socket.socketpair()
    ratios, sizes = [], []
    with closing(ours), closing(theirs):
        threading.Thread(target=WorkerProcess(theirs).serve, daemon=True).start()
        settings = EngineSettings(device="cpu", max_running=AT_ONCE)
        ours.sendall(protocol.encode(protocol.LoadModel(chosen.model, settings)))
        for journals in (None, Journals()):  # first runs of every width
            draw(ours, journals, arguments)
        for number in range(chosen.rounds):
            took = {}
            for is_on in (number % 2 == 0, number % 2 == 1):
                began_s = time.process_time()
                sizes.append(draw(ours, Journals() if is_on else None, arguments))
                took[is_on] = time.process_time() - began_s
            ratios.append(took[True] / took[False])
        ours.shutdown(socket.SHUT_RDWR)
    steps = AT_ONCE * STEPS
    print(
        f"{chosen.model}: a journal costs {100 * (statistics.median(ratios) - 1):.1f} % of CPU "
        f"time "
        f"(median of {chosen.rounds} rounds, {100 * (min(ratios) - 1):.1f} to "
        f"{100 * (max(ratios) - 1):.1f} %), {max(sizes) / steps / 1024:.1f} KiB a step"
    )


if __name__ == "__main__":
    main()
