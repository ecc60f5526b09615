"""Samplers by the names that people use."""

import pytest

from carpool.errors import InvalidValue
from carpool.request.samplers import SAMPLERS, check_scheduler

OFFERED = [name for name in SAMPLERS if not name.startswith(("lcm", "tcd"))]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("DPM++ 2M Karras", "dpmpp_2m_karras"),
        ("dpmpp_2m_sde_gpu", "dpmpp_2m_sde"),
        ("DPM++ 2M SDE Exponential", "dpmpp_2m_sde_exponential"),
        ("DPM++ SDE Karras", "dpmpp_sde_karras"),
        ("Euler a", "euler_a"),
        ("euler_ancestral", "euler_a"),
        ("k_euler_ancestral", "euler_a"),
        ("k_lms", "lms"),
        ("LMS Karras", "lms_karras"),
        ("dpm_2_ancestral", "dpm_2_a"),
        ("DPM2 a Karras", "dpm_2_a_karras"),
        ("sample_dpmpp_2m", "dpmpp_2m"),
        ("UniPC", "uni_pc"),
        ("uni_pc_bh2", "uni_pc"),
        ("Euler SGM Uniform", "euler_sgm_uniform"),
        ("Euler Automatic", "euler"),
        ("eulerdiscretescheduler", "EulerDiscreteScheduler"),
        ("PNDMScheduler", None),  # the model's own
        ("pndm-scheduler", None),
        ("automatic", None),
        ("", None),
    ],
)
def test_a_sampler_is_known_by_the_names_of_other_programs(name: str, ours: str | None) -> None:
    assert check_scheduler(name, OFFERED, "PNDMScheduler") == ours


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("dpmpp_2m_karas", "there is no such sampler; did you mean 'dpmpp_2m_karras'"),
        ("LCM", "PNDMScheduler is not compatible with it"),
        ("DPM adaptive", "there is no such sampler"),
        (7, "must be the name of a sampler"),
    ],
)
def test_what_is_no_sampler_of_the_model_is_refused_by_name(name: object, rule: str) -> None:
    with pytest.raises(InvalidValue, match="scheduler") as refusal:
        check_scheduler(name, OFFERED, "PNDMScheduler")
    assert rule in str(refusal.value)


def test_a_model_whose_scheduler_cannot_be_exchanged_says_so() -> None:
    with pytest.raises(InvalidValue, match="DMDScheduler, cannot be replaced"):
        check_scheduler("euler", (), "DMDScheduler")
