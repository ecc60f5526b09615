"""A long forward, or the first of its kind, does not make a healthy worker look stuck."""

from support.pretended.process import on_pretended_device


@on_pretended_device
def test_the_loop_expects_what_is_queued_and_nothing_of_a_width_that_never_ran() -> None:
    from typing import Any

    from support.engine_driver import VirtualClock, driving, fresh
    from support.tiny import ARGUMENTS

    clock, seen = VirtualClock(), []
    pipe = fresh("flux").to("pretended")
    settings: dict[str, Any] = {"isolation": "shared", "device": "pretended", "dtype": "float32"}
    with driving(pipe, clock=clock, **settings) as drive:
        engine = drive.engine
        plain = engine.scheduler.learning.watch.read
        engine.scheduler.learning.watch.read = lambda: [(note, 40.0) for note, _ in plain()]  # type: ignore[method-assign]

        def look(_: Any, step: int, *__: Any) -> dict[str, Any]:
            seen.append(engine.heartbeat.read()[1])  # while the pipeline's own code runs
            return {}

        for _ in range(2):
            drive.submit(
                **{**ARGUMENTS["flux"], "num_inference_steps": 4}, callback_on_step_end=look
            )
            drive.finish()

    assert seen[0] is None  # the first forward of all: nothing is known of it
    assert all(expected is not None and expected > 39.9 for expected in seen[4:])
