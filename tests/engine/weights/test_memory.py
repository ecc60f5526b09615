"""A model that is larger than the memory it may take runs, in a process that is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.streamed_memory import make

MIB = 1 << 20
NOISE_BYTES = 8 * MIB  # allocators and threads, from run to run
TESTS = Path(__file__).parents[2]


def measured(folder: Path, *engines: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "support.streamed_memory", str(folder), *engines]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()[-len(engines) :]]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as Linux does")
@pytest.mark.timeout(300)
def test_a_model_larger_than_its_budget_takes_no_more_and_gives_the_same_bits(
    tmp_path: Path,
) -> None:
    model, budget = tmp_path / "model", 40 * MIB
    make(model)

    resident, *ways = measured(
        model,
        "numerics=exact",
        f"numerics=exact,memory={budget},stream_dir={tmp_path / 'weights'}",
        f"numerics=exact,memory={budget}",  # from the model's own files
    )

    activations = resident["peak"] - resident["weights"]
    for streamed in ways:
        assert streamed["weights"] == resident["weights"] > 2 * budget
        assert streamed["peak"] <= budget + activations + NOISE_BYTES
        assert streamed["pictures"] == resident["pictures"]
