"""What a pipeline copies to the device is what it was told to copy, and nothing waits for it."""

import pytest

from support.pretended.process import on_pretended_device


@on_pretended_device
def test_copies_in_a_fiber_are_those_of_torch_and_wait_for_nothing() -> None:
    import threading
    from types import SimpleNamespace
    from typing import Any

    import numpy as np
    import torch

    from carpool.engine import pinned_copies
    from carpool.engine.fiber import Fiber, Raised
    from support.pretended.device import NAME
    from support.pretended.report import REPORT

    context: Any = SimpleNamespace(enter=pinned_copies.watch, leave=pinned_copies.ignore)
    x = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) / 7
    there = torch.zeros(1, dtype=torch.bfloat16, device=NAME)
    image = torch.rand(2, 3, 4, 5)
    copies: dict[str, Any] = {
        "device": lambda: x.to(NAME), "type and device": lambda: x.to(NAME, torch.bfloat16),
        "names": lambda: x.to(dtype=torch.float16, device=torch.device(NAME)),
        "as another": lambda: x.to(there), "turned": lambda: x.permute(2, 0, 1).to(NAME),
        "expanded": lambda: x[:, :1].expand(2, 5, 4).to(NAME),
        "sliced": lambda: x[:, ::2, 1:3].to(NAME),
        "format": lambda: image.to(NAME, memory_format=torch.channels_last),
        "empty": lambda: x[:0].to(NAME), "one number": lambda: torch.tensor(3.5).to(NAME),
        "numbers": lambda: torch.tensor([1, 2.5], device=NAME),
        "integers": lambda: torch.tensor([[1], [2]], device=NAME),
        "typed": lambda: torch.tensor([1, 2], dtype=torch.bfloat16, device=NAME),
        "array": lambda: torch.as_tensor(np.arange(3.0), device=NAME),
        "again": lambda: x.to(NAME).to(NAME), "within the host": lambda: x.to(torch.float64),
    }  # fmt: skip
    plain = torch.tensor
    expected = {name: copy() for name, copy in copies.items()}
    found: dict[str, Any] = {}

    def body() -> None:
        REPORT.clear()
        for name, copy in copies.items():
            found[name] = copy()
            x_before = x.clone()
            assert not REPORT.syncs, (name, REPORT.syncs)
            assert torch.equal(x, x_before)

    pinned_copies.TO.add()
    try:
        came = Fiber(body, context).start()
        if isinstance(came, Raised):
            raise came.error
        assert "to" in vars(torch.Tensor)
        assert torch.tensor is plain  # forwards see torch's own
        outside = threading.Thread(target=lambda: found.update(outside=x.to(NAME)))
        REPORT.clear()
        outside.start()
        outside.join()
        assert [site.kind for site in REPORT.syncs] == ["copy to device"]  # as torch does it
    finally:
        pinned_copies.TO.drop()

    assert "to" not in vars(torch.Tensor)
    for name, one in expected.items():
        mine = found[name]
        for what in ("dtype", "device", "shape"):
            assert getattr(mine, what) == getattr(one, what), (name, what)
        assert mine.stride() == one.stride(), name
        assert torch.equal(mine.cpu(), one.cpu()), name


@on_pretended_device
def test_a_copied_tensor_is_compared_by_what_it_was_copied_from_until_it_changes() -> None:
    from types import SimpleNamespace
    from typing import Any

    import torch

    from carpool.engine import pinned_copies
    from carpool.engine.fiber import Fiber
    from carpool.engine.fuse import Fuser
    from support.pretended.device import NAME
    from support.pretended.report import REPORT

    context: Any = SimpleNamespace(enter=pinned_copies.watch, leave=pinned_copies.ignore)
    host = torch.arange(6.0)
    made: list[torch.Tensor] = []
    pinned_copies.TO.add()
    try:
        Fiber(lambda: made.extend(host.to(NAME, torch.bfloat16) for _ in range(3)), context).start()
    finally:
        pinned_copies.TO.drop()
    first, second, third = made
    host.add_(1)  # the copies are what they were
    fuser = Fuser()
    REPORT.clear()

    assert fuser.digests.of(first) == fuser.digests.of(second)
    assert not REPORT.syncs

    third.mul_(2)
    assert fuser.digests.of(third) != fuser.digests.of(first)
    assert sum(REPORT.syncs.values()) == 1  # it had to be read
    read = torch.arange(6.0).to(torch.bfloat16).to(NAME)
    assert fuser.digests.of(read) == fuser.digests.of(first)


@pytest.mark.parametrize("lacks", ["pinned memory", "nothing"])
@on_pretended_device
def test_a_device_without_pinned_memory_copies_as_torch_does(lacks: str) -> None:
    from typing import Any

    import torch

    from support.engine_driver import CLOSE, driving, fresh, gap, solo
    from support.pretended.report import REPORT
    from support.tiny import ARGUMENTS

    plain: Any = torch.empty_like

    def refuse(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if pin_memory and lacks != "nothing":
            raise RuntimeError("no pinned memory here")
        return plain(*args, **kwargs, pin_memory=pin_memory)

    pipe = fresh("flux").to("pretended")
    torch.empty_like = refuse  # type: ignore[assignment]
    try:
        with driving(pipe, device="pretended", dtype="float32") as drive:
            REPORT.clear()
            one = drive.submit("a cat", **ARGUMENTS["flux"], seed=1)
            drive.finish()
    finally:
        torch.empty_like = plain

    assert gap(one.image, solo("flux", "a cat", **ARGUMENTS["flux"], seed=1)) < CLOSE
    waits = sum(n for site, n in REPORT.syncs.items() if site.kind == "copy to device")
    assert (waits > 0) == (lacks != "nothing")
