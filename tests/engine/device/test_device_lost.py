"""A device that fails for good: requests are answered as lost, and the process can end at once."""

import pytest

from support.pretended.process import on_pretended_device


@pytest.mark.parametrize("when", ["in a forward", "in a fiber", "in the delivery"])
@on_pretended_device
def test_everybody_is_answered_as_lost_when_the_device_fails(when: str) -> None:
    from diffusers import DiffusionPipeline

    from carpool.config import EngineSettings
    from carpool.engine.loop import EngineCore
    from carpool.engine.model.load import load
    from carpool.errors import WorkerLost
    from carpool.request.parameters import check
    from carpool.types import Request
    from support.engine_driver import InLine, Recorder, fresh
    from support.pretended.order import LACKS
    from support.tiny import ARGUMENTS

    pipe: DiffusionPipeline = fresh("flux").to("pretended")
    settings, ended = EngineSettings(dtype="float32"), []

    def fails(pipe: object, step: int, *_: object) -> dict[str, object]:
        if when == "in a fiber" and step == 1:
            LACKS.add("life")
        return {}

    def around(run):  # type: ignore[no-untyped-def]
        def forward(states):  # type: ignore[no-untyped-def]
            if when == "in a forward" and states[0].call.target.component == "transformer":
                LACKS.add("life")
            return run(states)

        return forward

    def off_loop(work):  # type: ignore[no-untyped-def]
        if when == "in the delivery":
            LACKS.add("life")
        work()

    loaded = load(pipe, settings)
    loaded.device.at_loss = lambda: ended.append(1)
    engine = EngineCore(
        loaded, settings, off_loop=off_loop, policy=InLine(4), around=around
    )  # fmt: skip
    heard = []
    for seed, steps in enumerate((2, 3, 4)):
        heard.append(Recorder())
        given = {**ARGUMENTS["flux"], "num_inference_steps": steps, "callback_on_step_end": fails}
        engine.submit(check(loaded.card, Request("a cat", seed=seed, **given)), heard[-1])
    engine.run()  # returns: the loop has ended

    assert ended == [1]
    assert [type(one.error) for one in heard] == [WorkerLost] * 3
    assert "pretended:0 has failed" in str(heard[0].error)
    LACKS.clear()


@on_pretended_device
def test_an_error_of_one_request_leaves_the_device_to_the_others() -> None:
    import torch

    from support.engine_driver import driving, fresh
    from support.tiny import ARGUMENTS

    def breaks(pipe: object, step: int, *_: object) -> dict[str, object]:
        raise torch.AcceleratorError("an invalid configuration")

    with driving(fresh("flux").to("pretended"), device="pretended", dtype="float32") as drive:
        broken = drive.submit(**ARGUMENTS["flux"], callback_on_step_end=breaks)
        other = drive.submit(**ARGUMENTS["flux"])
        drive.finish()

    assert "an invalid configuration" in str(broken.error)
    assert other.error is None
