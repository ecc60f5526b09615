"""What a pipeline's own code takes is learned where forwards run ahead, without its waits."""

import pytest

from support.pretended.process import on_pretended_device


@pytest.mark.timeout(180)  # the first one waits for the process to start
@on_pretended_device
def test_the_time_of_pipelines_is_learned_without_that_of_waiting_for_the_forward() -> None:
    from typing import Any

    from support.engine_driver import VirtualClock, driving, fresh
    from support.tiny import ARGUMENTS

    clock, resumed = VirtualClock(), [0]

    def works(_: Any, step: int, *__: Any) -> dict[str, Any]:
        clock.pass_by(0.01)
        if resumed[0] % 3 == 0:  # the first of three: it reads from the device
            clock.pass_by(5.0)
        resumed[0] += 1
        return {}

    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 4, "callback_on_step_end": works}
    settings: dict[str, Any] = {"isolation": "shared", "device": "pretended"}
    with driving(fresh("flux").to("pretended"), clock=clock, **settings) as drive:
        for _ in range(3):
            drive.submit(**arguments)
        drive.finish()
        scheduler = drive.engine.scheduler
        scheduler.learning.learn()
        [kind] = [kind for kind, _ in scheduler.costs if kind.name == "transformer.forward"]

        assert scheduler.costs.runs_ahead
        beside_s = scheduler.costs.overhead_s(kind, 3)  # at the usual speed of the machine
        assert abs(beside_s - 0.03) < 0.003, beside_s
