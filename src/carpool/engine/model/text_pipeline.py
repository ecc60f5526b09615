"""A language model as a diffusers pipeline: its `__call__` is transformers' own `generate`.

It continues a prompt, or answers a conversation by the tokenizer's chat template. So a text is a
request like any other: with a fiber, a seed, limits, and scheduled forwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from jinja2 import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from carpool.errors import InvalidValue

USUAL_TOKENS = 1024  # default limit of a text; half: cuts long answers off

OnText = Callable[[str, int, int], object]
"""Called with a new piece of text, the number of tokens so far, and their limit."""


@dataclass
class TextOutput(BaseOutput):  # type: ignore[misc]
    """A text, and the reason for its end."""

    text: str
    finish_reason: str  # "stop", or "length" if the token limit ended it
    prompt_tokens: int
    image_tokens: int  # of these, of pictures
    completion_tokens: int


class TextPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Generates texts with a language model.

    Args:
        processor: reads conversations with images; None: a text-only model.
    """

    task = "text-generation"
    _images: Sequence[Any] = ()

    def __init__(self, model: Any, tokenizer: Any, processor: Any = None) -> None:
        super().__init__()
        self.register_modules(model=model, tokenizer=tokenizer, processor=processor)
        self.on_text: OnText = lambda *_: None

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        messages: list | None = None,  # type: ignore[type-arg]
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: list[str] | None = None,
    ) -> TextOutput:
        choices = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        sampling = _sampling(do_sample, repetition_penalty, choices)
        return self._written(self._inputs(prompt, messages), max_new_tokens, stop or [], sampling)

    def _inputs(self, prompt: str | None, messages: Sequence[Any] | None) -> dict[str, Any]:
        """The input tokens and images of the model.

        Raises:
            InvalidValue: there is no chat template, or it refuses them; or there is no token.
        """
        reader = self.processor if getattr(self.processor, "chat_template", "") else self.tokenizer
        if messages is None:
            inputs = self.tokenizer(prompt, return_tensors="pt")
        elif reader.chat_template is None:
            inputs = self.tokenizer(self._only_text(messages), return_tensors="pt")
        else:
            filled = _with_pictures(messages, self._images, is_plain=reader is self.tokenizer)
            options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
            try:
                inputs = reader.apply_chat_template(filled, **options, return_tensors="pt")
            except TemplateError as error:
                text = f"the model's chat template refuses the messages: {error}"
                raise InvalidValue(text, param="messages") from error
        if inputs["input_ids"].shape[-1] == 0:
            name = "prompt" if messages is None else "messages"
            raise InvalidValue(f"{name} has no text: write at least a word", param=name)
        return {name: value.to(self._execution_device) for name, value in inputs.items()}

    def _only_text(self, messages: Sequence[Any]) -> str:
        if len(messages) > 1 or messages[0]["role"] != "user":
            raise InvalidValue(
                f"messages has {len(messages)} entries, and the model has no chat template: send "
                "one message of the user, which is continued",
                param="messages",
            )
        return _plain(messages[0])

    def _written(
        self,
        inputs: Mapping[str, Any],
        max_new_tokens: int | None,
        stops: Sequence[str],
        sampling: Mapping[str, Any],
    ) -> TextOutput:
        ids, image = inputs["input_ids"], getattr(self.model.config, "image_token_id", None) or -1
        start = ids.shape[1]
        limit = self._limit(start, max_new_tokens)
        text = WrittenText(self.tokenizer, stops, limit, self.on_text, start)
        config = self.model.generation_config
        ends = config.eos_token_id
        ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
        padding = ends[0] if config.pad_token_id is None else config.pad_token_id
        own = [StopStringCriteria(self.tokenizer, stop) for stop in config.stop_strings or ()]
        answer = self.model.generate(
            **inputs, **sampling, max_new_tokens=limit, pad_token_id=padding,
            stopping_criteria=StoppingCriteriaList([text, *own]), stop_strings=None,
        )  # fmt: skip
        written = getattr(answer, "sequences", answer)[0, start:].tolist()
        size = next((at for at, token in enumerate(written, 1) if token in ends), limit)
        whole = text.end(written[:size])
        has_ended = text.has_stopped or len(text.ids) < limit or written[-1] in ends
        reason = "stop" if has_ended else "length"
        return TextOutput(whole, reason, start, int(ids.eq(image).sum()), len(text.ids))

    def _limit(self, start: int, max_new_tokens: int | None) -> int:
        """The limit of new tokens after `start` input tokens.

        Raises:
            InvalidValue: the model's context is too short for them.
        """
        config = self.model.config.get_text_config()
        room: int = getattr(config, "max_position_embeddings", None) or -1
        if room < 0:  # XLNet: any length
            return max_new_tokens or USUAL_TOKENS
        if start >= room:
            rule = f"the model's context has {room}, of which at least one is to be written"
            raise InvalidValue(f"messages have {start} tokens: {rule}", param="messages")
        if max_new_tokens is None:
            return min(USUAL_TOKENS, room - start)
        if start + max_new_tokens > room:
            rule = f"must be at most {room - start}: the context has {room}, {start} are read"
            raise InvalidValue.of("max_new_tokens", max_new_tokens, rule)
        return max_new_tokens


class SeeingTextPipeline(TextPipeline):
    """Generates texts with a language model that reads images."""

    @torch.no_grad()
    def __call__(self, *args: Any, image: Any = None, **options: Any) -> TextOutput:
        images = image if isinstance(image, (list, tuple)) else [image]
        self._images = [] if image is None else images
        return super().__call__(*args, **options)


class WrittenText(StoppingCriteria):  # type: ignore[misc]
    """A text during generation: reported piece by piece, and ended by stop texts."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], limit: int, tell: OnText, start: int = -1
    ) -> None:
        self._tokenizer, self._stops, self._limit, self._tell = tokenizer, stops, limit, tell
        self._start = start  # tokens of the prompt; -1: all but the last at the first call
        self.ids: list[int] = []
        self.has_stopped = False
        self._text, self._sent_chars = "", 0  # characters
        self._prefix = self._read = 0  # tokens: start of the last window, and its end

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if len(input_ids) == 1:  # of beams, only the end tells the best
            if self._start < 0:
                self._start = input_ids.shape[1] - 1
            self.ids += input_ids[0, self._start + len(self.ids) :].tolist()
            self._decode()
            self._look_for_stops()
            self._tell_until(len(self._text) - self._held())
        return torch.tensor([self.has_stopped], device=input_ids.device)

    def end(self, ids: Sequence[int] = ()) -> str:
        """Report the rest of the text, of which all tokens may be given; return the whole."""
        if not self.has_stopped:
            self.ids += ids[len(self.ids) :]
            self._decode(is_last=True)
            self._look_for_stops()
        self._tell_until(len(self._text))
        return self._text

    def _decode(self, *, is_last: bool = False) -> None:
        """Decode the new tokens together with earlier ones: a lone token would lack its space."""
        before = self._decoded(self.ids[self._prefix : self._read])
        now = self._decoded(self.ids[self._prefix :])
        if len(now) > len(before) and (is_last or not now.endswith("\ufffd")):  # half a character
            self._text += now[len(before) :]
            self._prefix, self._read = self._read, len(self.ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _look_for_stops(self) -> None:
        places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if places:
            self.has_stopped, self._text = True, self._text[: min(places)]

    def _held(self) -> int:
        """The number of final characters that may start a stop text."""
        if self.has_stopped:
            return 0
        parts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(part) for part in parts if self._text.endswith(part)), default=0)

    def _tell_until(self, place: int) -> None:
        if place > self._sent_chars:
            self._tell(self._text[self._sent_chars : place], len(self.ids), self._limit)
            self._sent_chars = place


def _sampling(do_sample: bool | None, penalty: float | None, choices: Any) -> dict[str, Any]:
    """Sampling arguments for `generate`; missing ones keep the model's defaults.

    Temperature 0 takes the likeliest token, which transformers calls `do_sample=False`; any other
    sampling parameter turns sampling on.
    """
    choices = {name: value for name, value in choices.items() if value is not None}
    options: dict[str, Any] = {}
    if choices.get("temperature") == 0 or do_sample is False:
        options = {"do_sample": False}
    elif choices or do_sample:
        options = {"do_sample": True, **choices}
    return options | ({} if penalty is None else {"repetition_penalty": penalty})


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message's content, which may also be a text, or missing."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in parts]


def _plain(message: Mapping[str, Any]) -> str:
    """Join the text parts of a message into one text."""
    return "\n".join([part["text"] for part in _parts(message)])


def _with_pictures(
    messages: Sequence[Any], images: Sequence[Any], *, is_plain: bool
) -> list[dict[str, Any]]:
    """Messages with their images in place; plain texts for text-only templates."""
    if is_plain:
        return [{**message, "content": _plain(message)} for message in messages]
    filled = [{**message, "content": _parts(message)} for message in messages]
    places = [part for message in filled for part in message["content"] if part["type"] == "image"]
    for part, image in zip(places, images, strict=True):
        part["image"] = image
    return filled
