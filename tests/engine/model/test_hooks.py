"""Hooks that mix up requests are found wherever they sit, and refused by name."""

from collections.abc import Callable
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_first_block_cache, apply_layerwise_casting

from carpool.config import EngineSettings
from carpool.engine.model.hooks import refuse_what_breaks
from carpool.engine.model.load import load
from carpool.errors import LoadFailed
from support.engine_driver import fresh
from support.isolation import OneNet


def first_block_cache(module: Any) -> None:
    apply_first_block_cache(module, FirstBlockCacheConfig(threshold=0.2))


def taylor_seer(module: Any) -> None:
    module.enable_cache(TaylorSeerCacheConfig())


def cpu_offload(module: Any) -> None:
    accelerate.cpu_offload(module, "cpu")


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (first_block_cache, r"transformer\.\S+ has a FBC\w+, a step cache that mixes up requests"),
        (taylor_seer, r"transformer\.\S+ has a Taylor\w+, a step cache .* disable_cache\(\)"),
        (cpu_offload, r"transformer\S* is offloaded sequentially: use group offload"),
    ],
)
def test_a_hook_put_there_by_a_function_is_refused_by_name(
    apply: Callable[[Any], None], message: str
) -> None:
    pipe = fresh("flux")
    apply(pipe.transformer)

    with pytest.raises(LoadFailed, match=message):
        refuse_what_breaks(pipe)


def test_hooks_without_a_state_are_served() -> None:
    pipe = fresh("flux")
    apply_layerwise_casting(pipe.transformer, torch.float8_e4m3fn, torch.float32)
    cpu = torch.device("cpu")
    pipe.vae.enable_group_offload(cpu, cpu, offload_type="leaf_level")

    refuse_what_breaks(pipe)


def test_a_pipeline_that_cannot_be_called_is_refused_by_name() -> None:
    with pytest.raises(LoadFailed, match="OneNet has no __call__: load a pipeline of one task"):
        load(OneNet(fresh("sd15").unet), EngineSettings(device="cpu"))
