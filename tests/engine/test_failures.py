"""When something goes wrong, the request at fault hears it, and the others never notice."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from carpool.errors import InvalidValue, OutOfMemory, PipelineFailed
from support.engine_driver import CLOSE, Drive, Recorder, driving, fresh, gap, served, solo
from support.tiny import ARGUMENTS

FLUX = ARGUMENTS["flux"]
GUILTY = 13.0  # the guidance of the request that is to go wrong

Original = Callable[..., Any]
Change = Callable[[Original, dict[str, Any]], Any]
Misbehave = Callable[[Change], None]


@pytest.fixture
def misbehave(monkeypatch: pytest.MonkeyPatch) -> Misbehave:
    """Let flux' transformer do `change(original, arguments)` in each forward of this test."""
    transformer = served("flux").transformer

    def install(change: Change) -> None:
        original = transformer.forward

        @functools.wraps(original)
        def forward(**arguments: Any) -> Any:
            return change(original, arguments)

        monkeypatch.setitem(transformer.__dict__, "forward", forward)

    return install


def board(drive: Drive, *guidances: float) -> list[Recorder]:
    return [
        drive.submit("a cat", **FLUX, guidance_scale=guidance, seed=seed)
        for seed, guidance in enumerate(guidances)
    ]


def is_right(one: Recorder, seed: int, guidance: float) -> bool:
    return gap(one.image, solo("flux", "a cat", **FLUX, guidance_scale=guidance, seed=seed)) < CLOSE


def test_only_the_guilty_request_fails_and_bisection_finds_it(misbehave: Misbehave) -> None:
    tried: list[int] = []

    def raise_for_the_guilty(original: Original, arguments: dict[str, Any]) -> Any:
        tried.append(len(arguments["hidden_states"]))
        if (arguments["guidance"] == GUILTY).any():
            raise ZeroDivisionError("a bad row")
        return original(**arguments)

    misbehave(raise_for_the_guilty)
    guidances = [1.0, 2.0, 3.0, GUILTY, 5.0]

    with driving("flux", isolation="shared") as drive:
        heard = board(drive, *guidances)
        drive.finish()

    assert tried == [5, 2, 3, 1, 2, 1, 1, 4, 4]  # all, its halves, theirs; then without it
    for seed, (one, guidance) in enumerate(zip(heard, guidances, strict=True)):
        if guidance != GUILTY:
            assert is_right(one, seed, guidance)
    error = heard[3].error
    assert isinstance(error, PipelineFailed)
    assert str(error) == "the pipeline failed: ZeroDivisionError: a bad row"
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_two_guilty_requests_are_both_found(misbehave: Misbehave) -> None:
    def raise_for_the_guilty(original: Original, arguments: dict[str, Any]) -> Any:
        if (arguments["guidance"] == GUILTY).any():
            raise ZeroDivisionError("a bad row")
        return original(**arguments)

    misbehave(raise_for_the_guilty)

    with driving("flux", isolation="shared") as drive:
        heard = board(drive, GUILTY, 2.0, GUILTY)
        drive.finish()

    assert [type(one.error) for one in heard] == [PipelineFailed, type(None), PipelineFailed]
    assert is_right(heard[1], 1, 2.0)


def run_out_of_memory_above(rows: int, tried: list[int]) -> Change:
    def change(original: Original, arguments: dict[str, Any]) -> Any:
        tried.append(len(arguments["hidden_states"]))
        if tried[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(**arguments)

    return change


@pytest.mark.parametrize("fitting_rows", [1, 2, 3])
def test_running_out_of_memory_costs_nobody_the_picture(
    misbehave: Misbehave, fitting_rows: int
) -> None:
    tried: list[int] = []
    misbehave(run_out_of_memory_above(fitting_rows, tried))

    with driving("flux", isolation="shared") as drive:
        heard = board(drive, 1.0, 2.0, 3.0, 4.0, 5.0)
        drive.turn_until(lambda: heard[0].step == 1)
        first_step = len(tried)
        drive.finish()

    for seed, one in enumerate(heard):
        assert is_right(one, seed, seed + 1.0)
    assert max(tried[first_step:]) <= fitting_rows  # the width is remembered
    assert fitting_rows != 2 or tried[-1] == 2  # and no narrower one


def test_a_width_that_always_raises_is_not_tried_at_every_step(misbehave: Misbehave) -> None:
    tried: list[int] = []

    def refuse_two(original: Original, arguments: dict[str, Any]) -> Any:
        tried.append(len(arguments["hidden_states"]))
        if tried[-1] > 1:
            raise RuntimeError("this back end takes no mask")
        return original(**arguments)

    misbehave(refuse_two)
    steps = 8
    with driving("flux", isolation="shared") as drive:
        heard = [
            drive.submit("a cat", **{**FLUX, "num_inference_steps": steps}, seed=seed)
            for seed in range(4)
        ]
        drive.finish()

    assert all(one.error is None for one in heard)
    wide = [rows for rows in tried if rows > 1]
    assert len(wide) <= 6  # 4 once or twice, then 2; not at each of 8 steps
    assert tried[-12:] == [1] * 12


def test_a_call_that_does_not_fit_alone_fails_and_says_what_would(misbehave: Misbehave) -> None:
    def run_out_for_the_guilty(original: Original, arguments: dict[str, Any]) -> Any:
        if (arguments["guidance"] == GUILTY).any():
            raise torch.OutOfMemoryError("Tried to allocate 80.00 GiB")
        return original(**arguments)

    misbehave(run_out_for_the_guilty)

    with driving("flux", isolation="shared") as drive:
        heard = board(drive, 1.0, GUILTY, 3.0)
        drive.finish()

    assert is_right(heard[0], 0, 1.0)
    assert is_right(heard[2], 2, 3.0)
    assert isinstance(heard[1].error, OutOfMemory)
    assert str(heard[1].error) == (
        "transformer.forward ran out of device memory with this request alone (1 rows): ask for "
        "fewer pixels or frames. The device says: Tried to allocate 80.00 GiB"
    )


def test_a_decode_that_does_not_fit_alone_is_tried_in_tiles_and_the_answer_says_so() -> None:
    tiled: Any = fresh("sd15")
    tiled.vae.tile_latent_min_size, tiled.vae.tile_sample_min_size = 4, 32
    pipe: Any = fresh("sd15")
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 4, 32
    plain = pipe.vae.decoder.forward

    def small_ones_only(latents: Tensor, *more: Any) -> Tensor:
        if latents.shape[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        answer: Tensor = plain(latents, *more)
        return answer

    pipe.vae.decoder.forward = small_ones_only
    tiled.vae.enable_tiling()
    arguments = {**ARGUMENTS["sd15"], "prompt": "a cat", "height": 64, "width": 64}
    expected = tiled(**arguments, generator=torch.Generator().manual_seed(0)).images

    with driving(pipe) as drive:
        one, other = drive.submit(**arguments), drive.submit(**arguments)
        drive.finish()

    assert gap(one.image, expected) < CLOSE
    assert gap(other.image, expected) < CLOSE
    assert "vae.decode did not fit the device's memory and ran in tiles" in one.outcome.warnings[0]
    assert pipe.vae.use_tiling is False


def test_nan_in_one_row_stays_in_that_row(misbehave: Misbehave) -> None:
    def poison(original: Original, arguments: dict[str, Any]) -> Any:
        (noise,) = original(**arguments)
        noise[arguments["guidance"] == GUILTY] = torch.nan
        return (noise,)

    misbehave(poison)

    with driving("flux", isolation="shared") as drive:
        heard = board(drive, 1.0, GUILTY, 3.0)
        drive.finish()

    assert drive.widths("transformer") == [3, 3, 3]
    assert is_right(heard[0], 0, 1.0)
    assert is_right(heard[2], 2, 3.0)
    assert heard[1].image.isnan().any()


def test_what_the_pipeline_refuses_at_once_is_the_requests_fault() -> None:
    with driving("flux", isolation="shared") as drive:
        refused = drive.submit("a cat", **FLUX | {"max_sequence_length": 600})
        drive.finish()

    assert isinstance(refused.error, InvalidValue)
    assert str(refused.error).startswith("the pipeline refuses the request: `max_sequence_length`")
    assert refused.error.status == 400
    assert refused.kinds == ["queued", "started", "finished"]
    assert not drive.forwards


def test_a_value_error_after_the_first_call_is_the_pipelines_fault() -> None:
    def refuse(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("too late")

    with driving("flux", isolation="shared") as drive:
        failed = drive.submit("a cat", **FLUX, callback_on_step_end=refuse)
        drive.finish()

    assert isinstance(failed.error, PipelineFailed)
    assert str(failed.error) == "the pipeline failed: ValueError: too late"
    assert isinstance(failed.error.__cause__, ValueError)
    assert failed.error.status == 500


def test_a_request_that_refuses_to_end_takes_nobody_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", "carpool")  # a traceback that is kept would keep the fiber

    def cling(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        for _ in range(150):  # longer than the engine's patience, but not for ever
            try:
                pipe.transformer.forward()
            except BaseException as error:
                tensors["caught"] = error
        return tensors

    with driving("flux", isolation="shared") as drive:
        clinging = drive.submit("a cat", **FLUX, callback_on_step_end=cling, request_id="clings")
        staying = drive.submit("a cat", **FLUX, guidance_scale=2.0, seed=1)
        drive.turn(4)
        drive.engine.cancel("clings")
        drive.finish()

    assert clinging.is_done
    assert is_right(staying, 1, 2.0)


def keep_in_a_local(latents: Tensor, refs: list[weakref.ref[Tensor]]) -> None:
    local = latents * 2
    refs.append(weakref.ref(local))
    raise ZeroDivisionError("deep inside")


@pytest.mark.parametrize("ends", ["well", "by an error", "by a chain of errors", "in a forward"])
def test_whoever_has_ended_leaves_no_latents_behind(misbehave: Misbehave, ends: str) -> None:
    refs: list[weakref.ref[Tensor]] = []

    def watch(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        refs.append(weakref.ref(tensors["latents"]))
        if ends == "by an error":
            keep_in_a_local(tensors["latents"], refs)
        if ends == "by a chain of errors":
            try:
                keep_in_a_local(tensors["latents"], refs)
            except ZeroDivisionError as error:
                raise ArithmeticError("further out") from error
        return tensors

    def raise_at_the_end(original: Original, arguments: dict[str, Any]) -> Any:
        if ends == "in a forward" and refs:
            keep_in_a_local(arguments["hidden_states"], refs)
        return original(**arguments)

    misbehave(raise_at_the_end)

    with driving("flux", isolation="shared") as drive:
        heard = drive.submit("a cat", **FLUX, callback_on_step_end=watch)
        drive.finish()
        gc.collect()

        assert refs
        assert not [ref for ref in refs if ref() is not None]
        assert (heard.error is None) == (ends == "well")  # a caller may hold on to the error
