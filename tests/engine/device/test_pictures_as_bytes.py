"""Pictures leave the device as bytes, the same that diffusers makes of their values."""

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from carpool.engine.model.view import PipelineOutput, finish
from support.pretended.process import on_pretended_device


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_diffusers_makes(channels: int, dtype: torch.dtype) -> None:
    values = (torch.arange(channels * 4096).reshape(1, channels, 64, 64) % 4093 / 4092).to(dtype)
    expected = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(values))

    fields = finish(
        PipelineOutput({"images": values}, "pil"), lambda value, convert: convert(value)
    )

    for mine, theirs in zip(fields["images"], expected, strict=True):
        assert mine.mode == theirs.mode
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.timeout(180)  # the first one waits for the process to start
@on_pretended_device
def test_a_picture_is_copied_to_the_host_as_bytes() -> None:
    from typing import Any

    from carpool.config import EngineSettings
    from carpool.engine.model.device import Device
    from support.pretended import device as pretended

    copied: list[tuple[torch.dtype, int]] = []
    plain: Any = pretended._note_copy

    def note(into: Any, source: Any, non_blocking: bool) -> None:
        if not pretended._is_remote(into):  # to the host
            copied.append((source.dtype, source.numel()))
        plain(into, source, non_blocking)

    device = Device(EngineSettings(device="pretended"))
    picture = torch.rand(1, 3, 8, 8).to("pretended")
    pretended._note_copy = note
    try:
        for kind in ("pil", "np", None):
            for mark in (device.mark(), None):
                to_host: Any = lambda value, convert, mark=mark: device.to_host(  # noqa: E731
                    value, convert, mark=mark
                )
                finish(PipelineOutput({"images": picture}, kind), to_host)
    finally:
        pretended._note_copy = plain

    assert copied == [(torch.uint8, 192)] * 2 + [(torch.float32, 192)] * 4


@on_pretended_device
def test_a_copy_to_the_host_begins_when_its_value_is_there() -> None:
    from typing import Any

    from carpool.config import EngineSettings
    from carpool.engine.model.device import Device
    from support.pretended import device as pretended
    from support.pretended.order import Stream

    done: list[str] = []
    plain_copy: Any = pretended._note_copy
    plain_wait: Any = Stream.synchronize

    def note(into: Any, source: Any, non_blocking: bool) -> None:
        done.append("copied")
        plain_copy(into, source, non_blocking)

    def wait(stream: Any) -> None:
        done.append("waited")
        plain_wait(stream)

    device = Device(EngineSettings(device="pretended"))
    picture = torch.rand(1, 3, 8, 8).to("pretended")
    mark = device.mark()
    pretended._note_copy, Stream.synchronize = note, wait  # type: ignore[assignment, method-assign]
    try:
        device.to_host(picture, mark=mark)
    finally:
        pretended._note_copy, Stream.synchronize = plain_copy, plain_wait  # type: ignore[method-assign]

    assert done[:2] == ["waited", "copied"]
