"""A device without events, or with one stream only, gives the same pictures and says so."""

import pytest

from support.pretended.process import on_pretended_device


@pytest.mark.parametrize("lacks", [["events"], ["streams"], ["events", "streams"], []])
@on_pretended_device
def test_a_device_that_lacks_something_is_slower_and_as_right(lacks: list[str]) -> None:
    import logging

    from support.engine_driver import CLOSE, driving, fresh, gap, solo
    from support.pretended.order import LACKS
    from support.pretended.report import REPORT
    from support.tiny import ARGUMENTS

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("carpool").addHandler(handler)
    pipe = fresh("flux").to("pretended")
    LACKS.update(lacks)
    try:
        with driving(pipe, device="pretended", dtype="float32") as drive:
            heard = [drive.submit("a cat", **ARGUMENTS["flux"], seed=seed) for seed in range(2)]
            drive.finish()
            runs_ahead = drive.engine.loaded.device.runs_ahead
    finally:
        logging.getLogger("carpool").removeHandler(handler)

    for seed, one in enumerate(heard):
        assert gap(one.image, solo("flux", "a cat", **ARGUMENTS["flux"], seed=seed)) < CLOSE
    assert runs_ahead == ("events" not in lacks)
    assert any("pretended:0 has no events" in line for line in said) == ("events" in lacks)
    waits = sum(n for site, n in REPORT.syncs.items() if site.kind == "synchronize")
    assert (waits >= len(drive.forwards)) == ("events" in lacks)


@on_pretended_device
def test_the_device_of_a_setting_is_found_or_refused_with_what_there_is() -> None:
    import torch

    from carpool.config import EngineSettings
    from carpool.engine.model.device import Device
    from carpool.errors import SettingRejected

    assert Device(EngineSettings()).torch == torch.device("pretended")
    assert Device(EngineSettings(device="pretended:1")).torch == torch.device("pretended:1")
    assert Device(EngineSettings(device="cpu")).torch == torch.device("cpu")
    assert Device(EngineSettings()).dtype == torch.bfloat16
    assert Device(EngineSettings()).memory_gib == 80
    for name, rule in (
        ("pretended:2", "there are 2 such devices here, pretended:0 to pretended:1"),
        ("cuda", "finds no CUDA here; what it finds is pretended"),
    ):
        with pytest.raises(SettingRejected, match=rule):
            Device(EngineSettings(device=name))


@on_pretended_device
def test_a_pipeline_on_the_second_device_is_served_there() -> None:
    import torch

    from carpool.config import EngineSettings
    from carpool.engine.model.load import load
    from support.engine_driver import fresh

    loaded = load(fresh("flux").to("pretended:1"), EngineSettings())

    assert loaded.device.torch == torch.device("pretended:1")
