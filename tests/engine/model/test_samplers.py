"""A request's own sampler: the picture of plain diffusers with that scheduler, in any company."""

from typing import Any

import diffusers
import pytest
import torch

from carpool.engine.model.samplers import exchanged, offered
from carpool.errors import InvalidValue
from carpool.request.samplers import SAMPLERS
from support.engine_driver import CLOSE, Recorder, driving, fresh, gap, plain
from support.tiny import ARGUMENTS

MULTI = "DPMSolverMultistepScheduler"
EXCHANGES: list[tuple[str, str, dict[str, Any]]] = [  # our name, the class, its options
    ("dpmpp_2m_karras", MULTI, {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}),
    ("DPM++ 2M SDE", MULTI, {"algorithm_type": "sde-dpmsolver++"}),
    ("euler_ancestral", "EulerAncestralDiscreteScheduler", {}),
    ("DPM2 a Karras", "KDPM2AncestralDiscreteScheduler", {"use_karras_sigmas": True}),
    ("Heun", "HeunDiscreteScheduler", {}),
    ("ddim", "DDIMScheduler", {}),
    ("uni_pc", "UniPCMultistepScheduler", {}),
    ("UniPCMultistepScheduler", "UniPCMultistepScheduler", {}),
    ("PLMS", "PNDMScheduler", {"skip_prk_steps": True}),
    ("deis sgm_uniform", "DEISMultistepScheduler", {"timestep_spacing": "trailing"}),
    ("k_euler", "EulerDiscreteScheduler", {}),
    ("euler exponential", "EulerDiscreteScheduler",
     {"use_exponential_sigmas": True, "timestep_spacing": "linspace"}),
]  # fmt: skip


def picture(recorder: Recorder) -> Any:
    if recorder.error is not None:
        raise recorder.error
    return recorder.outcome.fields["images"]


def by_diffusers(family: str, cls: str, options: dict[str, Any], **call: Any) -> Any:
    pipe = plain(family)
    own = pipe.scheduler
    try:
        pipe.scheduler = getattr(diffusers, cls).from_config(own.config, **options)
        seed = call.pop("seed")
        return pipe(**call, generator=torch.Generator().manual_seed(seed)).images
    finally:
        pipe.scheduler = own


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_requests_with_samplers_of_their_own_share_forwards_and_get_what_diffusers_gives(
    family: str,
) -> None:
    calls = [
        {**ARGUMENTS[family], "prompt": f"a {i}", "num_inference_steps": 3 + i % 3, "seed": i,
         "output_type": "pt"}
        for i, _ in enumerate(EXCHANGES)
    ]  # fmt: skip
    with driving(fresh(family), numerics="exact") as drive:
        recorders = [
            drive.submit(**call, scheduler=name)
            for call, (name, _, _) in zip(calls, EXCHANGES, strict=True)
        ]
        own = drive.submit(**calls[0])
        drive.finish()

    for recorder, call, (name, cls, options) in zip(recorders, calls, EXCHANGES, strict=True):
        assert gap(picture(recorder), by_diffusers(family, cls, options, **call)) <= CLOSE, name
        assert recorder.outcome.settings["engine"]["scheduler"] == cls
        assert recorder.outcome.settings["scheduler"] in SAMPLERS
    mine = type(plain(family).scheduler).__name__
    assert gap(picture(own), by_diffusers(family, mine, {}, **calls[0])) <= CLOSE
    assert own.outcome.settings["engine"]["scheduler"] == mine


def test_flow_models_offer_what_solves_flows_alone() -> None:
    names = offered(fresh("flux"))

    assert {"euler_karras", "FlowMatchEulerDiscreteScheduler"} <= set(names)
    assert not any(name.startswith(("dpm", "ddim", "uni")) for name in names)
    wan = fresh("wan21_t2v").scheduler
    if wan.config.get("use_flow_sigmas"):
        assert exchanged(wan, "dpmpp_2m") is not None
        with pytest.raises(InvalidValue, match="not compatible"):
            exchanged(wan, "euler")


def test_what_is_offered_can_be_made_and_is_of_a_class_that_is_compatible() -> None:
    own = fresh("sd15").scheduler
    compatible = {cls.__name__ for cls in own.compatibles} | {type(own).__name__}

    names = offered(fresh("sd15"))

    assert len(names) > 40
    for name in names:
        assert type(exchanged(own, name)).__name__ in compatible
    assert "LCMScheduler" not in names
    assert set(names) < SAMPLERS.keys()
