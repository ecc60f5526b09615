"""Weighted prompts as embeddings, by the library compel, from the model's own text encoders.

They are computed in the request's fiber: the encoders' calls park and share forwards.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from diffusers.loaders import TextualInversionLoaderMixin
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from carpool.engine.fiber import current_context
from carpool.request.card import Task
from carpool.request.prompt_weights import PROMPTS, WeightsReader, fragments

_ENCODERS = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}


def weights_reader(pipe: Any, tasks: tuple[Task, ...]) -> WeightsReader:
    """The reader of weights for a pipeline; imports compel, which takes seconds."""
    encoders = {name: part for name, part in pipe.components.items() if name.startswith("text_enc")}
    is_read = (
        isinstance(pipe, TextualInversionLoaderMixin)
        and isinstance(encoders.get("text_encoder"), CLIPTextModel)
        and all(isinstance(part, _ENCODERS.get(name, ())) for name, part in encoders.items())
        and all(task.takes("prompt_embeds") and task.takes("negative_prompt") for task in tasks)
    )
    if is_read and importlib.util.find_spec("compel") is not None:
        importlib.import_module("compel")
        return "compel"
    return "missing" if is_read else ""


def embedded(pipe: Any, task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the prompts in a call's arguments by weighted embeddings.

    A prompt may have any length: about 75 tokens are encoded at once. The pooled embedding of SDXL
    is that of the text without weights.

    Returns:
        Instead of prompts `prompt_embeds` (1, 77 k, width) and, with guidance,
        `negative_prompt_embeds` of the same shape; for SDXL also `pooled_prompt_embeds` (1, width).
    """
    from compel import CompelForSD, CompelForSDXL, ReturnedEmbeddingsType

    own = {parameter.name: parameter.default for parameter in task.parameters}
    is_guided = float(arguments.get("guidance_scale", own.get("guidance_scale")) or 0) > 1
    is_zeroed = pipe.config.get("force_zeros_for_empty_prompt", False)  # like diffusers
    texts = {name: arguments.get(name) for name in PROMPTS}
    if not is_guided or (is_zeroed and texts["negative_prompt"] is None):
        texts |= {"negative_prompt": None, "negative_prompt_2": None}
    else:
        texts["negative_prompt"] = texts["negative_prompt"] or ""
    result = {name: value for name, value in arguments.items() if name not in PROMPTS}
    if (note := getattr(current_context(), "note_texts", None)) is not None:
        note(list(texts.values()))  # whole texts: compel tokenizes them in pieces
    if "text_encoder_2" in pipe.components:
        compel: Any = CompelForSDXL(pipe)
        providers = [_reading(pipe, part) for part in (compel.compel_1, compel.compel_2)]
        pool = providers[1].get_pooled_embeddings
        providers[1].get_pooled_embeddings = lambda prompts, **options: pool(
            ["".join(text for text, _ in _parts(pipe, providers[1], p)) for p in prompts], **options
        )
        output = compel(*(text or None if "_2" in name else text for name, text in texts.items()))
    else:
        compel = CompelForSD(pipe)
        provider = _reading(pipe, compel.compel)
        if result.pop("clip_skip", None):
            layer = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NORMALIZED
            provider.returned_embeddings_type = layer
        output = compel(texts["prompt"], texts["negative_prompt"])
    embeds = {"prompt_embeds": output.embeds, "negative_prompt_embeds": output.negative_embeds}
    embeds["pooled_prompt_embeds"] = output.pooled_embeds
    embeds["negative_pooled_prompt_embeds"] = output.negative_pooled_embeds
    return result | {name: value for name, value in embeds.items() if value is not None}


def _reading(pipe: Any, compel: Any) -> Any:
    """Make a Compel parse this notation instead of its own; returns its provider."""
    from compel.prompt_parser import Conjunction, FlattenedPrompt

    provider = compel.conditioning_provider

    def parsed(prompt: str) -> Any:
        parts = [part for part in _parts(pipe, provider, prompt) if part[0].strip()]
        return Conjunction([FlattenedPrompt(parts or [("", 1.0)])])

    compel.parse_prompt_string = parsed
    return provider


def _parts(pipe: Any, provider: Any, prompt: str) -> list[tuple[str, float]]:
    """The fragments of a prompt, with embedding words expanded to all their vectors."""
    convert, tokenizer = pipe.maybe_convert_prompt, provider.tokenizer
    return [(convert(text, tokenizer), weight) for text, weight in fragments(prompt)]
