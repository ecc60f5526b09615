"""The models of the benchmark of a GPU are the published ones."""

import pytest

from benchmarks.gpu_build import operations, weightless
from benchmarks.gpu_models import MODELS
from benchmarks.scheduler import OFTEN, calls_of_a_step

pytestmark = pytest.mark.filterwarnings(  # of libraries, at the tiny models' sizes
    "ignore::UserWarning", "ignore::RuntimeWarning", "ignore::DeprecationWarning"
)

TFLOP = {  # of one row; counted by others for the same configs
    ("flux", "512x512"): 21.50,
    ("flux", "1024x1024"): 74.38,
    ("qwen-image", "512x512"): 16.65,
    ("qwen-image", "1024x1024"): 70.58,
    ("z-image", "512x512"): 13.69,
    ("z-image", "1024x1024"): 56.58,
    ("sana", "512x512"): 0.84,
    ("sana", "1024x1024"): 2.97,
    ("sd35-medium", "512x512"): 2.44,
    ("sd35-medium", "1024x1024"): 11.25,
    ("sdxl", "512x512"): 1.59,
    ("sdxl", "1024x1024"): 6.76,
    ("wan", "832x480x81f"): 283.0,
}
VAE_MILLIONS = {"AutoencoderKL": 84, "AutoencoderKLQwenImage": 127, "AutoencoderDC": 312}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_the_published_one(name: str) -> None:
    model = MODELS[name]
    denoiser, vae = (
        sum(weight.numel() for weight in weightless(part).parameters())
        for part in (model.denoiser, model.vae)
    )

    assert round(denoiser / 1e9, 2) == model.billions
    assert round(vae / 1e6) == VAE_MILLIONS.get(model.vae[0], 127)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*one, marks=[] if one == ("z-image", "512x512") else pytest.mark.slow)
        for one in TFLOP
    ],
)
def test_a_forward_takes_the_operations_that_others_counted(name: str, size: str) -> None:
    sizes = {str(one): one for one in MODELS[name].sizes}

    assert operations(MODELS[name], sizes[size]) / 1e12 == pytest.approx(
        TFLOP[name, size], abs=0.005
    )


# What one more step of a lone request costs the engine, counted in calls of its own functions


CALLS, FILES = 102, 25


def test_one_more_step_of_a_lone_request_makes_few_calls_of_our_own_functions() -> None:
    calls = calls_of_a_step()

    assert sum(calls.values()) / 1000 <= CALLS, "\n".join(map(str, calls.most_common()))
    assert len({name.partition(":")[0] for name, n in calls.items() if n >= OFTEN}) <= FILES
