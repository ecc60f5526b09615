"""Streamed weights on an accelerator: right, never read before they are there, never waited for."""

import pytest

from support.pretended.process import on_pretended_device

pytestmark = pytest.mark.timeout(180)  # the first one waits for the process to start


@pytest.mark.parametrize(
    ("lacks", "is_on_disk"),
    [([], False), ([], True), (["events"], False), (["events", "streams"], True)],
)
@on_pretended_device
def test_requests_of_other_sizes_share_sweeps_and_get_what_resident_weights_give(
    lacks: list[str], is_on_disk: bool
) -> None:
    import logging
    import tempfile
    from typing import Any

    from support.engine_driver import CLOSE, driving, fresh, gap, solo
    from support.pretended.order import LACKS
    from support.pretended.report import REPORT
    from support.streamed import on_a_slow_bus
    from support.tiny import ARGUMENTS

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("carpool").addHandler(handler)
    given: list[dict[str, Any]] = [
        {**ARGUMENTS["flux"], "width": side, "height": side, "num_inference_steps": steps}
        for side, steps in ((32, 3), (48, 2), (64, 3))
    ]
    LACKS.update(lacks)
    settings: dict[str, Any] = {"device": "pretended", "dtype": "float32", "stream": "transformer"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings |= {"stream_dir": folder} if is_on_disk else {}
            with driving(fresh("flux"), **settings) as drive:
                on_a_slow_bus(drive)
                bus = drive.engine.loaded.streamer.bus  # type: ignore[union-attr]
                assert bus.store.is_pinned == (not is_on_disk)
                REPORT.clear()
                heard = [drive.submit("a cat", **one, seed=i) for i, one in enumerate(given)]
                drive.finish()
                waits = [site for site in REPORT.syncs if site.where.startswith("carpool")]
                counts = drive.engine.statistics()["streaming"]
    finally:
        logging.getLogger("carpool").removeHandler(handler)

    for seed, (one, asked) in enumerate(zip(heard, given, strict=True)):
        assert one.error is None, one.error
        assert gap(one.image, solo("flux", "a cat", **asked, seed=seed)) < CLOSE
    assert counts["forwards"] > counts["sweeps"]
    assert any("copied between its computations" in line for line in said) == bool(lacks)
    if not lacks:  # the host waits for the finished pictures only
        assert {site.where for site in waits} == {"carpool/engine/model/device.py to_host"}


@pytest.mark.parametrize("forgotten", ["the copy", "the computation"])
@on_pretended_device
def test_the_pretended_device_sees_when_streams_do_not_wait_for_each_other(forgotten: str) -> None:
    from typing import Any

    import torch

    from carpool.engine.weights.backing_store import PinnedStore
    from carpool.engine.weights.bus import Bus
    from carpool.engine.weights.groups import blocks_of
    from carpool.engine.weights.streaming import Streamer
    from support.pretended.device import NAME
    from support.pretended.order import Order, Race
    from support.streamed import Tower

    class Forgets(Bus):
        def load(self, group: Any, slot: Any) -> Any:
            arrive = super().load(group, slot)
            return (lambda: None) if forgotten == "the copy" else arrive

        def vacated(self) -> Any:
            return None

    device = torch.device(NAME)
    torch.set_grad_enabled(False)
    for cls in (Bus, Forgets):
        model = Tower()
        streamer = Streamer(
            {"tower": model}, {"tower": list(blocks_of(model))}, device, cls(PinnedStore(), device)
        )
        for part in (model.before, model.after):
            part.to(device)
        if cls is Forgets:
            with pytest.raises(Race):
                model(torch.zeros(1, 64, device=device))
        else:
            answer = model(torch.ones(1, 64, device=device))
            assert torch.equal(answer.cpu(), Tower()(torch.ones(1, 64)))
        streamer.remove()
    Order.races.clear()


@on_pretended_device
def test_what_is_in_no_block_is_on_the_device_when_a_model_is_streamed() -> None:
    import torch

    from carpool.config import EngineSettings
    from carpool.engine.weights.placement import place
    from support.pretended.device import NAME
    from support.streamed import Tower

    model, resident = Tower(blocks=8), Tower(blocks=8)
    settings = EngineSettings(device=NAME, stream="transformer")

    streamer = place({"transformer": model}, torch.device(NAME), settings, None)

    assert streamer is not None
    assert {part.device.type for part in (*model.parameters(), *model.buffers())} == {NAME}
    with torch.no_grad():
        answer = model(torch.ones(2, 64, device=NAME))
        assert torch.equal(answer.cpu(), resident(torch.ones(2, 64)))
    streamer.remove()
