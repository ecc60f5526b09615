"""Streams and events of an accelerator, if its kind supports them.

Work in one stream runs in order; a second stream runs in parallel, and can wait for events of the
first. A kind of device with one stream only runs everything in order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def why_no_events(device: torch.device) -> str:
    """The reason why a device has no timed events; empty: it has."""
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
    """A new stream of a device; None on a CPU, and if the device has only one."""
    if device.type == "cpu":
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run a side thread's work in its own stream, and wait for that stream only."""
    stream = stream_of(device)
    if stream is None:
        yield
        return
    with stream:
        yield
    stream.synchronize()
