"""Traffic of a group of ranks per forward: bytes, and CPU seconds of the leader.

usage: make bench-group     (or: python -m benchmarks.group [--requests N])

First `shapes` on two ranks of the CPU, then the arguments of FLUX.1-dev at 1024x1024 pixels in
bfloat16: real sizes, packed as for a group, without a model.
"""

import argparse
import statistics
import time

import torch

from carpool.config import EngineSettings
from carpool.engine.group import messages, packing
from carpool.engine.group.load import load
from carpool.engine.loop import EngineCore
from carpool.engine.request import Outcome
from carpool.request.parameters import check
from carpool.types import Event, Request


class _Listener:
    def event(self, event: Event) -> None: ...

    def done(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            raise outcome.error


def served(requests: int) -> str:
    """Draw with `shapes` on two ranks; returns a report of the traffic."""
    settings = EngineSettings(device="cpu", context_parallel=2)
    engine = EngineCore(load("shapes", settings), settings, off_loop=lambda work: work())
    engine.enter()
    try:
        for seed in range(requests):
            request = Request("a red circle", seed=seed, num_inference_steps=20)
            engine.submit(check(engine.loaded.card, request), _Listener())
        while engine.step():
            pass
        stats = engine.statistics()["group"]
    finally:
        engine.leave()
    forwards = stats["forwards"]
    return (
        f"shapes, {requests} requests at once, {forwards} forwards of two ranks: "
        f"{stats['sent_bytes'] / forwards / 1000:.1f} kB and "
        f"{1000 * stats['send_s'] / forwards:.2f} ms of processor a forward; "
        f"{stats['known'] / stats['tensors']:.0%} of the tensors were there already"
    )


def packed(rows: int, steps: int = 10) -> str:
    """Pack the calls of a FLUX.1-dev drawing, 1024x1024, as the leader does."""
    device, half = torch.device("cpu"), torch.bfloat16
    packer = packing.Packer(device)
    constants = {
        "encoder_hidden_states": torch.zeros(rows, 512, 4096, dtype=half),
        "pooled_projections": torch.zeros(rows, 768, dtype=half),
        "img_ids": torch.zeros(4096, 3, dtype=half),
        "txt_ids": torch.zeros(512, 3, dtype=half),
        "guidance": torch.zeros(rows),
    }
    sizes, spent_s = [], []
    for _ in range(steps):
        changing = {
            "hidden_states": torch.zeros(rows, 4096, 64, dtype=half),
            "timestep": torch.zeros(rows, dtype=half),
        }
        began_s = time.thread_time()
        call, new = packer.pack(({}, {**constants, **changing}), "transformer.forward")
        entries = [packing.described(key, tensor, device) for key, tensor in new]
        body = messages.encode(
            messages.RunForward(1, "transformer", call, entries, packer.forgotten(), None, {})
        )
        buffer = packing.buffer_of([tensor for _, tensor in new], device)
        spent_s.append(time.thread_time() - began_s)
        sizes.append(len(body) + (0 if buffer is None else buffer.numel()))
    return (
        f"FLUX.1-dev, 1024x1024, {rows} rows: {sizes[0] / 1e6:.2f} MB with the first forward, "
        f"{statistics.median(sizes[1:]) / 1e6:.2f} MB and "
        f"{1000 * statistics.median(spent_s[1:]):.2f} ms of processor with every other"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    print(served(parser.parse_args().requests))
    for rows in (1, 4):
        print(packed(rows))


if __name__ == "__main__":
    main()
