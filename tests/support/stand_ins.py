"""Parts in place of those that diffusers' own tests fetch from the hub, made here.

A part is chosen by what its name on the hub contains; `install` lasts for the life of the process.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import sentencepiece
import transformers
from diffusers.pipelines.kolors import ChatGLMTokenizer
from transformers import image_processing_base, processing_utils
from transformers.feature_extraction_utils import FeatureExtractionMixin

from support.tiny import parts, recipes
from support.tiny.builders import qwen_vl


def _letters() -> Any:
    """A tokenizer for BERT, whose words are letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*special, *letters, *(f"##{one}" for one in letters)]
        Path(folder, "vocab.txt").write_text("\n".join(words))
        return transformers.BertTokenizer.from_pretrained(folder)


def _pieces() -> Any:
    """A tokenizer for ChatGLM, of a few pieces of text."""
    file = Path(tempfile.mkdtemp(), "tokenizer.model")
    texts = ["a painting of a squirrel eating a burger by the sea with a hat"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=(model := file.open("wb")), vocab_size=32,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    model.close()
    return ChatGLMTokenizer(str(file))


_TOKENIZERS: dict[str, Callable[[], Any]] = {  # the first that fits
    "chatglm": _pieces,
    "glm": parts.llama_tokenizer,
    "t5": parts.t5_tokenizer,
    "kandinsky": parts.clip_tokenizer,
    "mclip": parts.t5_tokenizer,
    "clip": parts.clip_tokenizer,
    "roberta": parts.clip_tokenizer,
    "bert": _letters,
    "gpt": parts.clip_tokenizer,
    "qwen": parts.qwen2_tokenizer,
    "smollm": parts.qwen2_tokenizer,
    "gemma": parts.gemma_tokenizer,
    "llama": parts.llama_tokenizer,
    "hunyaun": parts.llama_tokenizer,
    "mistral": parts.llama_tokenizer,
}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"vocab_size": 1200, "d_model": 32, "d_kv": 8, "d_ff": 37}
_VISION = {**_SMALL, "intermediate_size": 37}
_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "umt5": (transformers.UMT5Config, _T5), "t5": (transformers.T5Config, _T5),
    "bert": (transformers.BertConfig, {**_SMALL, "intermediate_size": 37}),
    "llama": (transformers.LlamaConfig, {**_SMALL, "hidden_size": 16, "intermediate_size": 37}),
    "siglip": (transformers.SiglipVisionConfig, {**_VISION, "image_size": 30, "patch_size": 2}),
    "gemma": (
        transformers.Gemma2Config,
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 37},
    ),
    "chatglm": (
        diffusers.pipelines.kolors.text_encoder.ChatGLMConfig,
        {
            "padded_vocab_size": 64, "hidden_size": 8, "ffn_hidden_size": 16, "num_layers": 3,
            "num_attention_heads": 2, "kv_channels": 4, "seq_length": 77, "original_rope": True,
        },
    ),
}  # fmt: skip
_WIDE_GEMMA = {
    name: {**recipes.PARTS["gemma3"][1][name], "hidden_size": 32}
    for name in ("text_config", "vision_config")
}
_DRAWN: dict[str, Callable[[], Any]] = {  # by class
    "Gemma3ForConditionalGeneration": lambda: parts.part(["gemma3", _WIDE_GEMMA]),
    "Qwen2_5_VLForConditionalGeneration": qwen_vl,
    "Qwen2VLForConditionalGeneration": lambda: _qwen("Qwen2VL", hidden=16),
    "Qwen3VLForConditionalGeneration": lambda: _qwen("Qwen3VL", hidden=16),
}


def _qwen(name: str, hidden: int) -> Any:
    """Another generation of Qwen that reads pictures."""
    tokenizer = parts.qwen2_tokenizer()
    text = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": hidden,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": hidden // 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, hidden // 4 - 2],
        },
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": hidden, "embed_dim": hidden, "num_heads": 2,
    }  # fmt: skip
    vision |= {"intermediate_size": hidden, "out_hidden_size": hidden, "mlp_ratio": 1}
    vision |= {"deepstack_visual_indexes": [0]}
    tokens = {
        f"{known}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for known, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    if name == "Qwen2VL":  # its vision ends in the width of the text
        vision |= {"embed_dim": 16, "hidden_size": hidden}
    return model(config(text_config=text, vision_config=vision, **tokens))


def _processor(cls: Any, name: str) -> Any:
    """What reads texts and pictures for a Qwen, of the class asked for."""
    is_third = "3" in cls.__name__
    tokenizer = parts.qwen2_tokenizer()
    reader = transformers.Qwen2VLImageProcessor(
        min_pixels=28 * 28, max_pixels=56 * 56, patch_size=16 if is_third else 14
    )
    cls = transformers.Qwen3VLProcessor if is_third else transformers.Qwen2VLProcessor
    video = transformers.Qwen3VLVideoProcessor if is_third else transformers.Qwen2VLVideoProcessor
    return cls(
        image_processor=reader,
        tokenizer=tokenizer,
        video_processor=video(),
        chat_template=tokenizer.chat_template,
    )


def _read(cls: Any, name: str) -> Any:
    """What reads pictures; a language model's sees few pixels."""
    if "dpt" in name:
        return cls(size={"height": 32, "width": 32})
    return cls(min_pixels=28 * 28, max_pixels=56 * 56) if "qwen" in name else cls()


def install() -> None:
    """Tokenizers, processors, configs and models by name come from here, not from the hub."""
    for owner in (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer):
        _replace(owner, lambda cls, name: _fitting(_TOKENIZERS, name)())
    for owner in (processing_utils.ProcessorMixin, transformers.AutoProcessor):
        _replace(owner, _processor)
    for owner in (image_processing_base.ImageProcessingMixin, FeatureExtractionMixin):
        _replace(owner, _read)
    _replace(transformers.PreTrainedModel, _model)
    _replace(transformers.AutoConfig, lambda cls, name: _config(name))
    clap: Any = transformers.ClapConfig  # as it was before transformers 5
    clap.from_text_audio_configs = classmethod(
        lambda cls, text_config, audio_config, **more: cls(
            text_config=text_config.to_dict(), audio_config=audio_config.to_dict(), **more
        )
    )


def _replace(owner: Any, make: Any) -> None:
    plain = owner.from_pretrained

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(name).exists():
            return getattr(plain, "__func__", lambda _, *a, **k: plain(*a, **k))(
                cls, name, *args, **kwargs
            )
        made = make(cls, str(name).lower())
        sizes = {name: kwargs[name] for name in ("size", "crop_size") if name in kwargs}
        for name, value in sizes.items():
            setattr(made, name, value)
        return made

    owner.from_pretrained = classmethod(from_pretrained)


def _model(cls: Any, name: str) -> Any:
    if cls.__name__ in _DRAWN:
        return _DRAWN[cls.__name__]()
    return cls(_config(name))


def _fitting(known: dict[str, Any], name: str) -> Any:
    for part, one in known.items():
        if part in name:
            return one
    raise OSError(f"there is no stand-in for {name}")


def _config(name: str) -> Any:
    cls, given = _fitting(_MODELS, name)
    return cls(**given)
