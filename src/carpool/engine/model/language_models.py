"""Find language models: a model of transformers, or components of a pipeline."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from carpool.config import EngineSettings
from carpool.engine.model.tasks import tasks_of
from carpool.engine.model.text_pipeline import SeeingTextPipeline, TextPipeline
from carpool.errors import LoadFailed, SettingRejected
from carpool.request.card import TEXT, Task


def read_language_model(source: str, revision: str | None, dtype: torch.dtype) -> TextPipeline:
    """Read a plain transformers model; no code of the checkpoint is run.

    Raises:
        LoadFailed: weights are missing, or it has an encoder of texts.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source, **options)
    if config.is_encoder_decoder:
        raise LoadFailed(f"{source} is a {config.model_type} of encoder and decoder, not causal")
    has_eyes = getattr(config, "vision_config", None) is not None
    cls: Any = AutoModelForImageTextToText if has_eyes else AutoModelForCausalLM
    model, report = cls.from_pretrained(
        source, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    if missing := sorted(report["missing_keys"]):
        raise LoadFailed(f"{source} lacks {missing[0]}, and {len(missing) - 1} weights more")
    for part in model.eval().modules():
        if hasattr(part, "_rescale_layers"):  # RWKV's first forward scales its weights in place
            part._rescale_layers()
    if not has_eyes:
        return TextPipeline(model, AutoTokenizer.from_pretrained(source, **options))
    processor = AutoProcessor.from_pretrained(source, **options)
    return SeeingTextPipeline(model, processor.tokenizer, processor)


def refuse_parts(settings: EngineSettings) -> None:
    """Refuse settings for the components of a diffusers pipeline.

    Raises:
        SettingRejected: such a setting is used; the text names it.
    """
    parts = "rewriter", "language_url", "component", "model_config", "variant", "embeddings"
    for name in parts:
        if getattr(settings, name):
            rule = "MODEL is a language model, which draws nothing and has no components"
            raise SettingRejected(f"{name}: {rule}")


def text_tasks_of(pipe: Any) -> dict[str, tuple[Task, TextPipeline]]:
    """The text-generating components of a pipeline: tasks, and pipelines over the modules."""
    if isinstance(pipe, TextPipeline):
        return {}
    tasks = {}
    for name, writer in _writers(pipe):
        [(task, _)] = tasks_of(writer).values()
        task = replace(task, name=f"{TEXT}:{name}")
        tasks[task.name] = task, writer
    return tasks


def _writers(pipe: Any) -> Iterator[tuple[str, TextPipeline]]:
    """The text-generating components, by name.

    Left out are components without their own tokenizer, and those whose tokens are not text, such
    as GLM-Image's planner of images.
    """
    for name, module in pipe.components.items():
        can_generate = getattr(module, "can_generate", None)
        if not isinstance(module, nn.Module) or can_generate is None or not can_generate():
            continue
        reader = reader_beside(pipe.components, name, module)
        has_eyes = getattr(module.config, "vision_config", None) is not None
        if has_eyes and getattr(reader, "image_processor", None) is not None:
            yield name, SeeingTextPipeline(module, reader.tokenizer, reader)
        elif reader is not None:
            yield name, TextPipeline(module, getattr(reader, "tokenizer", reader))


def reader_beside(components: Any, name: str, module: Any) -> Any:
    """The processor or tokenizer of a language model, by diffusers' naming habits."""
    find = getattr(module, "get_output_embeddings", None)
    output = None if find is None else find()
    if output is None:
        return None
    names = [f"{name}_tokenizer", "tokenizer"]
    if "text_encoder" in name:
        names = [name.replace("text_encoder", "tokenizer")]
    names = [f"{name}_processor", "processor", "text_processor", *names]
    for reader in (components.get(name) for name in names):
        tokenizer = getattr(reader, "tokenizer", reader)
        if isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) <= len(output.weight):
            return reader
    return None
