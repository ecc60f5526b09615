"""Streams and events of an accelerator, as far as its kind has them.

Work in one stream runs in order; a stream of its own runs beside it, and an event of one can be
waited for by another. A kind of device that has one stream only runs everything in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def why_no_events(device: torch.device) -> str:
    """The reason why moments of a device's work cannot be marked and timed; empty: they can."""
    if device.type == "cpu":
        return "it is a CPU"
    try:
        start, ended = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        ended.record()
        ended.synchronize()
        start.elapsed_time(ended)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""


def stream_of(device: torch.device) -> torch.Stream | None:
    """A new queue of work of a device; None on a CPU, and where a device has only one."""
    if device.type == "cpu":
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run work of a side thread in a stream of its own, and wait for it, not for the engine's."""
    stream = stream_of(device)
    if stream is None:
        yield
        return
    with stream:
        yield
    stream.synchronize()
