"""Calls of one request that have not changed are described once; what changes is described anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from carpool.engine.describe import Describer
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call
from carpool.engine.probation.probation import Probation
from carpool.types import CheckedRequest
from support.engine_driver import driving
from support.tiny import ARGUMENTS

REQUEST = CheckedRequest("req", 0, {})


class Counting(Fuser):
    """Counts the calls that it describes."""

    count = 0

    def describe(self, call: Call) -> Any:
        self.count += 1
        return super().describe(call)


def denoiser_call() -> tuple[Call, Counting, Callable[[Call], Any]]:
    """The first call of a request's transformer, and what gives its calls their keys."""
    fuser, known = Counting(), dict[int, Any]()
    describer = Describer(fuser, Probation(fuser, infers=False), is_grouped_by_lora=False)
    with driving("flux") as drive:
        drive.submit(**ARGUMENTS["flux"])
        while (
            not drive.engine.running.parked
            or (call := drive.engine.running.parked[0].call).target.component != "transformer"
        ):
            drive.turn()
    return call, fuser, lambda call: describer.describe(call, REQUEST, known)[1]


@pytest.mark.parametrize(  # all kinds of rules of the specs
    "family", ["flux", "sd3", "sdxl", "sd15", "zimage", "pixart", "qwen_image", "wan21_t2v", "ltx2"]
)
def test_a_description_that_is_used_again_is_what_the_fuser_would_say(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Describer.describe

    def checked(self: Describer, call: Call, *given: Any) -> Any:
        described, key, rows = plain(self, call, *given)
        again, rows_again = self._fuser.describe(described)
        assert rows == rows_again
        assert key == again or not isinstance(key, tuple)  # those that run alone equal no other
        return described, key, rows

    monkeypatch.setattr(Describer, "describe", checked)
    with driving(family) as drive:
        heard = [drive.submit(seed=n, **ARGUMENTS[family]) for n in range(2)]
        drive.finish()

    assert [one.error for one in heard] == [None, None]


def test_calls_like_those_of_the_step_before_are_not_described_again() -> None:
    call, fuser, key_of = denoiser_call()
    texts, keys = [torch.zeros(1, n, 32) for n in (5, 7)], list[Any]()  # guidance: two calls a step
    for text in texts * 2:
        fresh = {"hidden_states": call.kwargs["hidden_states"] + 1, "shapes": [[(1, 8, 8)]]}
        kwargs = {**call.kwargs, **fresh, "encoder_hidden_states": text}
        keys.append(key_of(replace(call, kwargs=kwargs)))

    assert (keys[0] is keys[2], keys[1] is keys[3], fuser.count) == (True, True, 2)


@pytest.mark.parametrize(
    "change", ["shape", "dtype", "content", "content in place", "flag", "none"]
)
def test_what_the_key_depends_on_is_described_again(change: str) -> None:
    call, fuser, key_of = denoiser_call()
    before = key_of(call)
    kwargs = dict(call.kwargs)
    match change:
        case "shape":
            kwargs["hidden_states"] = kwargs["hidden_states"][:, :-1]
        case "dtype":
            kwargs["encoder_hidden_states"] = kwargs["encoder_hidden_states"].double()
        case "content":
            kwargs["img_ids"] = kwargs["img_ids"] + 1
        case "content in place":
            kwargs["img_ids"] += 1
        case "flag":
            kwargs["return_dict"] = True
        case "none":
            kwargs["guidance"] = None

    after = key_of(replace(call, kwargs=kwargs))

    assert fuser.count == 2
    assert after != before
