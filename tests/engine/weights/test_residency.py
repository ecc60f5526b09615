"""Which blocks stay on the device under a budget: a plan from sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.weights.residency import Component, ResidencyPlan, plan
from carpool.errors import SettingRejected
from support.streamed_memory import make

DENOISER = Component("transformer", 10, (100,) * 10, is_denoiser=True)
ENCODER = Component("text_encoder", 50, (80,) * 5)
VAE = Component("vae", 30, ())
ALL = [ENCODER, DENOISER, VAE]


def test_what_fits_is_resident() -> None:
    assert plan(ALL, "auto", 1490) == ResidencyPlan({}, 1490)
    assert plan(ALL, "auto", None) == ResidencyPlan({}, 1490)


def test_blocks_of_the_denoiser_stay_before_those_of_an_encoder() -> None:
    found = plan(ALL, "auto", 1400)

    assert found.streamed.keys() == {"text_encoder"}
    assert found.device_bytes <= 1400


def test_the_denoiser_keeps_as_many_blocks_as_fit_evenly_spaced() -> None:
    found = plan(ALL, "auto", 90 + 200 + 300)

    assert len(found.streamed["transformer"]) == 7
    assert found.streamed["transformer"] == {0, 2, 3, 4, 6, 7, 9}
    assert found.streamed["text_encoder"] == {0, 1, 2, 3, 4}


def test_named_components_are_streamed_whole_and_nothing_else() -> None:
    assert plan(ALL, "transformer", None).streamed == {"transformer": frozenset(range(10))}


def test_a_budget_below_the_least_is_refused_with_the_least() -> None:
    with pytest.raises(SettingRejected, match="290B, which is the least"):
        plan(ALL, "auto", 289)
    assert plan(ALL, "auto", 290).device_bytes == 290


def test_a_choice_that_does_not_fit_is_refused_with_what_works() -> None:
    with pytest.raises(SettingRejected, match="stream=auto chooses what fits"):
        plan(ALL, "none", 1000)
    with pytest.raises(SettingRejected, match="stream=auto chooses what fits"):
        plan(ALL, "text_encoder", 1000)


def test_a_component_that_cannot_be_streamed_is_refused_with_those_that_can() -> None:
    with pytest.raises(SettingRejected, match="no such component; did you mean 'transformer'"):
        plan(ALL, "transfomer", None)
    with pytest.raises(SettingRejected, match=r"'all': .* it has text_encoder, transformer, vae"):
        plan(ALL, "all", None)
    with pytest.raises(SettingRejected, match="components that have: text_encoder, transformer"):
        plan(ALL, "vae", None)


sizes = st.lists(st.integers(1, 50), max_size=8).map(tuple)
components = st.lists(st.tuples(st.integers(0, 20), sizes, st.booleans()), min_size=1, max_size=5)


@given(components, st.integers(0, 600))
def test_a_plan_fits_its_budget_and_counts_every_byte(parts: list[Any], budget: int) -> None:
    made = [Component(f"c{i}", *part) for i, part in enumerate(parts)]
    try:
        found = plan(made, "auto", budget)
    except SettingRejected:
        least = plan(made, ",".join(one.name for one in made if one.blocks_bytes) or "none", None)
        assert budget < least.device_bytes
        return

    moved = [one.blocks_bytes[i] for one in made for i in found.streamed.get(one.name, ())]
    assert found.device_bytes <= budget
    assert found.streamed_bytes == sum(moved)
    resident = sum(one.n_bytes for one in made) - sum(moved)
    assert found.device_bytes == resident + 2 * max(moved, default=0)


# A model that is larger than the memory it may take runs, in a process that is measured


MIB = 1 << 20
NOISE_BYTES = 4 * MIB  # threads, from run to run
TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as Linux does")
@pytest.mark.timeout(300)
def test_a_model_larger_than_its_budget_takes_no_more_and_gives_the_same_bits(
    tmp_path: Path,
) -> None:
    model, budget = tmp_path / "model", 40 * MIB
    make(model)

    engines = (
        "numerics=exact",
        f"numerics=exact,memory={budget},stream_dir={tmp_path / 'weights'}",
        f"numerics=exact,memory={budget}",  # from the model's own files
    )
    command = [sys.executable, "-m", "support.streamed_memory", str(model), *engines]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that what is freed goes back at once
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    resident, *ways = map(json.loads, ran.stdout.splitlines()[-len(engines) :])

    activations = resident["peak"] - resident["weights"]
    for streamed in ways:
        assert streamed["weights"] == resident["weights"] > 2 * budget
        assert streamed["loading"] <= resident["peak"]  # files are mapped, not copied
        assert streamed["peak"] <= budget + activations + NOISE_BYTES
        assert streamed["pictures"] == resident["pictures"]
