"""Calls of one request that have not changed are described once; what changes is described anew."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from carpool.engine.describe import Describer
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call
from carpool.engine.probation.probation import Probation
from carpool.types import CheckedRequest
from support.engine_driver import Drive, driving
from support.tiny import ARGUMENTS

REQUEST = CheckedRequest("req", 0, {})


class Counting(Fuser):
    """Counts the calls that it describes."""

    count = 0

    def describe(self, call: Call) -> Any:
        self.count += 1
        return super().describe(call)


def denoiser_call(drive: Drive) -> Call:
    """The first call of the transformer of a request that runs."""
    drive.submit(**ARGUMENTS["flux"])
    while True:
        drive.turn()
        [state] = drive.engine.running.parked
        if state.call.target.component == "transformer":
            return state.call


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


def test_a_step_like_the_one_before_is_not_described_again() -> None:
    with driving("flux") as drive:
        call, fuser = denoiser_call(drive), Counting()
    describer = Describer(fuser, Probation(fuser, infers=False), is_grouped_by_lora=False)
    known: dict[int, Any] = {}
    first = describer.describe(call, REQUEST, known)
    latents = {"hidden_states": torch.zeros_like(call.kwargs["hidden_states"])}
    second = describer.describe(replace(call, kwargs={**call.kwargs, **latents}), REQUEST, known)

    assert first[1] is second[1]
    assert fuser.count == 1


@pytest.mark.parametrize(
    "change", ["shape", "dtype", "content", "content in place", "flag", "none"]
)
def test_what_the_key_depends_on_is_described_again(change: str) -> None:
    with driving("flux") as drive:
        call, fuser = denoiser_call(drive), Counting()
    describer = Describer(fuser, Probation(fuser, infers=False), is_grouped_by_lora=False)
    known: dict[int, Any] = {}
    _, before, _ = describer.describe(call, REQUEST, known)
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

    _, after, _ = describer.describe(replace(call, kwargs=kwargs), REQUEST, known)

    assert fuser.count == 2
    assert after != before
