"""Stages of a deploy file: find the diffusion stage; merge a file over its base.

Source: vLLM-Omni 0.30, deploy configuration and registry of pipelines.
"""

from collections.abc import Mapping
from typing import Any

DIFFUSION_IS_SECOND = {
    "auk", "bagel", "bagel_think", "glm_image", "hunyuan_image_3_moe", "mammoth_moda2",
    "minimax_h3_disaggregated", "ming_flash_omni_image", "ming_image",
}  # fmt: skip
"""Names of pipelines whose diffusion stage has number 1."""

OF_DIFFUSION = {  # keys that only diffusion stages have
    "step_execution", "request_batch_max_wait_ms", "cache_backend", "cache_config",
    "vae_use_slicing", "vae_use_tiling", "ulysses_degree", "ring_degree", "cfg_parallel_size",
    "use_hsdp", "diffusion_attention_backend", "diffusion_attention_config", "diffusion_kv_mode",
    "diffusion_compile_granularity", "enable_layerwise_offload", "flow_shift", "boundary_ratio",
}  # fmt: skip
OF_DIFFUSION_SAMPLING = {
    "num_inference_steps", "guidance_scale", "true_cfg_scale", "height", "width", "num_frames"
}  # fmt: skip


def is_of_type(stage: Mapping[str, Any]) -> bool | None:
    """Return whether a stage declares a diffusion stage; None: no declaration."""
    stage_type = stage.get("stage_type", stage.get("execution_type"))
    return None if stage_type is None else str(stage_type).lower() == "diffusion"


def diffusion_stages(stages: Mapping[str, dict[str, Any]], pipelines: list[str]) -> list[str]:
    """Find the stages that can be the diffusion stage; returns their places.

    It decides by the stage's type, otherwise by the known pipelines, otherwise by the model class,
    otherwise by keys and sampling parameters that only diffusion stages have.

    Args:
        stages: stages by place.
        pipelines: possible names of the pipeline.
    """
    typed = [place for place, stage in stages.items() if is_of_type(stage)]
    if typed:
        return typed
    stages = {place: stage for place, stage in stages.items() if is_of_type(stage) is None}
    if len(stages) == 1:
        return list(stages)
    number = 1 if DIFFUSION_IS_SECOND.intersection(pipelines) else None
    for belongs in (
        lambda stage: number is not None and stage.get("stage_id") == number,
        lambda stage: str(stage.get("model_class_name", "")).endswith("Pipeline"),
        _draws,
    ):
        places = [place for place, stage in stages.items() if belongs(stage)]
        if places:
            return places
    return list(stages)


def _draws(stage: Mapping[str, Any]) -> bool:
    parts = [stage, *(stage.get(key) for key in ("engine_args", "engine_extras"))]
    sampling = stage.get("default_sampling_params")
    return any(isinstance(part, Mapping) and OF_DIFFUSION & part.keys() for part in parts) or (
        isinstance(sampling, Mapping) and bool(OF_DIFFUSION_SAMPLING & sampling.keys())
    )


def overlaid(base: Any, over: Any) -> Any:
    """Merge a file over its base: stages by `stage_id`, mappings by key; the file wins."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    merged = dict(base)
    for key, value in over.items():
        if key == "stages" and isinstance(base.get(key), list) and isinstance(value, list):
            merged[key] = _stages_overlaid(base[key], value)
        else:
            merged[key] = overlaid(base.get(key), value)
    return merged


def _stages_overlaid(base: list[Any], over: list[Any]) -> list[Any]:
    merged = list(base)
    numbers = [stage.get("stage_id") if isinstance(stage, Mapping) else None for stage in base]
    for stage in over:
        number = stage.get("stage_id") if isinstance(stage, Mapping) else None
        if number is not None and number in numbers:
            place = numbers.index(number)
            merged[place] = overlaid(merged[place], stage)
        else:
            merged.append(stage)
    return merged
