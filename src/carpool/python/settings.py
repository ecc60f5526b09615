"""Keyword arguments of `carpool.load` for type checkers: the settings of `carpool.config`.

A test keeps both equal. Only `carpool.config` describes the settings.
"""

from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from carpool.settings import engine

if TYPE_CHECKING:
    import torch


class LoadSettings(TypedDict, total=False):
    """Settings of an engine and of its jobs; all are optional."""

    device: "str | torch.device"
    dtype: "str | torch.dtype"
    revision: str | None
    variant: str | None
    model_config: str | PathLike[str] | None
    component: tuple[str, ...]
    quantize: str | None
    place: str | None
    context_parallel: int
    context_parallel_kind: engine.ContextParallelKind
    compile: bool
    attention_backend: str | None
    sparse_attention: float | None
    vae_tiling: bool
    warmup: str | None
    threads: int | None
    memory: str | None
    stream: str
    stream_dir: str | PathLike[str] | None
    batching_mode: engine.BatchingMode
    min_gain: float
    cost_table: str | PathLike[str] | None
    fair_share: tuple[str, ...]
    admit_late: bool
    batching_max_size: int
    batching_delay_ms: float
    batching_config: str | PathLike[str] | None
    enable_batching_metrics: bool
    batching_metrics_format: engine.MetricsFormat
    max_num_seqs: int
    request_batch_max_wait_ms: float
    default_sampling_params: str | None
    numerics: engine.Numerics
    isolation: engine.IsolationMode
    infer_specs: bool
    lora_dir: str | PathLike[str] | None
    embeddings: str | PathLike[str] | None
    rewriter: str | None
    language_url: str | None
    language_model: str | None
    language_timeout: float
    enhance_prompt: bool
    lora_batching: engine.LoraBatching
    max_batch_size: int
    max_decode_size: int
    max_decode_gib: float
    max_running: int
    max_queue: int
    max_wait: float
    max_pixels: int
    max_steps: int
    step_cache: float
    conditioning_cache: float | None
    conditioning_sharing: engine.ConditioningSharing
    workers: int | None
    devices: str | None
    worker_timeout: float
    state_dir: str | PathLike[str] | None
    job_ttl: float
    max_store_bytes: int
    metadata: bool
    metadata_prompt: bool
