"""Memory of the device: a model that does not fit is a load error; short memory costs no answer."""

from support.pretended.process import on_pretended_device


@on_pretended_device
def test_a_model_that_does_not_fit_is_a_load_error_that_says_what_helps() -> None:
    import gc

    import pytest

    from carpool.config import EngineSettings
    from carpool.engine.model.load import load
    from carpool.errors import LoadFailed
    from support.pretended.order import MEMORY
    from support.tiny import checkpoint

    gc.collect()  # what earlier tests left may not be freed meanwhile
    before, MEMORY.limit = MEMORY.taken, MEMORY.taken + 100_000

    with pytest.raises(LoadFailed, match=r"do not fit the memory .* smaller\s+dtype") as told:
        load(checkpoint("flux"), EngineSettings(device="pretended"))

    assert MEMORY.taken == before  # nothing is held by the error
    assert told.value.wants_memory


@on_pretended_device
def test_requests_that_do_not_fit_together_are_drawn_one_after_another() -> None:
    from support.engine_driver import CLOSE, driving, fresh, gap
    from support.pretended.order import MEMORY
    from support.tiny import ARGUMENTS

    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 3}
    pipe = fresh("flux").to("pretended")
    with driving(pipe, device="pretended", dtype="float32") as drive:
        MEMORY.reset()
        base = MEMORY.taken
        alone = drive.submit(**arguments)
        drive.finish()
        MEMORY.limit = base + 2 * (MEMORY.peak - base)
        heard = [drive.submit(**arguments) for _ in range(6)]
        drive.finish()

    assert all(gap(one.image, alone.image) < CLOSE for one in heard)
    assert drive.engine.scheduler.widths.are_limited
