"""The cost of journals: CPU seconds of a drawing with `--journal all` and `off`.

usage: make bench-journal     (or: python -m benchmarks.journal [--rounds N])

Two `carpool serve shapes` draw the same requests in turns. The measure is CPU time of each server's
processes, so other load on the machine hardly matters; ratios are of neighbouring turns.
"""

import argparse
import statistics
import tempfile

from benchmarks.viewers import Server, draw, used_s


def spent_s(server: Server) -> float:
    """CPU seconds of one turn's pictures, front and worker."""
    processes = server.worker, server.front.pid
    before_s = sum(map(used_s, processes))
    draw(server)
    return sum(map(used_s, processes)) - before_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory() as folder_off,
        tempfile.TemporaryDirectory() as folder_on,
        Server(folder_off, "--journal", "off") as off,
        Server(folder_on, "--journal", "all") as on,
    ):
        for server in (off, on):
            draw(server)  # warm-up: widths and kernels are chosen
        ratios = []
        for turn in range(rounds):  # ABBA order cancels drift
            first, second = (off, on) if turn % 2 else (on, off)
            seconds = {first: spent_s(first), second: spent_s(second)}
            ratios.append(seconds[on] / seconds[off])
    low, *_, high = sorted(ratios)
    print(
        f"--journal all takes {statistics.median(ratios):.3f} times the processor that off takes "
        f"(median of {rounds} turns, {low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
