"""A rewriter beside a pipeline: its prompts are those of plain transformers, in any company."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer

from carpool.config import EngineSettings
from carpool.engine.model.load import load
from carpool.errors import InvalidValue, LoadFailed, SettingRejected
from carpool.models.embedded import MODEL_DIR, REWRITER_DIR
from support.engine_driver import CLOSE, driving, fresh, gap, solo
from support.tiny import ARGUMENTS

WORDINGS = (
    "Draw a scarlet ball on a navy background, please",
    "something round and red, with sky behind it",
    "a lemon box to the left of a violet star",
)


@cache
def _rewriter() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(REWRITER_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(REWRITER_DIR)


@torch.no_grad()
def rewritten(text: str) -> str:
    """What plain transformers writes for a wording."""
    model, tokenizer = _rewriter()
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


@pytest.mark.parametrize("isolation", ["auto", "private"])
def test_pictures_are_those_of_the_rewritten_prompts(isolation: str) -> None:
    with driving(fresh("flux"), rewriter=str(REWRITER_DIR), isolation=isolation) as drive:
        heard = [
            drive.submit(text, **ARGUMENTS["flux"], seed=seed, enhance_prompt=True)
            for seed, text in enumerate(WORDINGS)
        ]
        left = drive.submit(WORDINGS[0], **ARGUMENTS["flux"], seed=7)
        drive.finish()
        tokens_together = max(drive.widths("prompt_rewriter", "generate"), default=1)

    for seed, (text, recorder) in enumerate(zip(WORDINGS, heard, strict=True)):
        assert recorder.error is None
        prompt = recorder.outcome.settings["revised_prompt"]
        assert prompt == rewritten(text)
        assert recorder.outcome.settings["enhance_prompt"] is True
        assert gap(recorder.image, solo("flux", prompt, seed=seed)) < CLOSE
    assert "revised_prompt" not in left.outcome.settings
    assert gap(left.image, solo("flux", WORDINGS[0], seed=7)) < CLOSE
    assert tokens_together == (1 if isolation == "private" else len(WORDINGS))


def test_a_prompt_that_is_too_long_fails_its_own_request_only() -> None:
    with driving(fresh("flux"), rewriter=str(REWRITER_DIR)) as drive:
        long = drive.submit("red " * 600, **ARGUMENTS["flux"], enhance_prompt=True)
        short = drive.submit(WORDINGS[0], **ARGUMENTS["flux"], enhance_prompt=True)
        drive.finish()

    assert isinstance(long.error, InvalidValue)
    assert "the rewriter reads at most" in str(long.error)
    assert short.error is None


def test_the_pipeline_is_as_it_was_after_the_engine() -> None:
    pipe = fresh("flux")
    before = set(vars(pipe))

    with driving(pipe, rewriter=str(REWRITER_DIR)):
        assert "prompt_rewriter" in vars(pipe)

    assert set(vars(pipe)) == before


@pytest.mark.parametrize(
    ("content", "rule"),
    [("{}", "causal language model of transformers"), (None, "causal language model")],
)
def test_what_is_no_language_model_is_refused_at_load(
    content: str | None, rule: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(LoadFailed, match=rule):
        load(fresh("flux"), EngineSettings(rewriter=str(tmp_path)))


def test_a_default_that_nothing_can_do_is_refused_at_load() -> None:
    with pytest.raises(SettingRejected, match="give --rewriter"):
        load(fresh("flux"), EngineSettings(enhance_prompt=True))


def test_the_embedded_model_has_a_rewriter_of_its_own() -> None:
    loaded = load(MODEL_DIR, EngineSettings())
    try:
        assert isinstance(loaded.pipe, FluxPipeline)
        assert loaded.card.enhancer == "prompt_rewriter"
    finally:
        loaded.undo()


class Rewriting(FluxPipeline):  # type: ignore[misc]
    """Writes prompts anew as FLUX.2 does, without a model for it."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 3,
        generator: Any = None,
        max_sequence_length: int = 512,
        output_type: str = "pil",
        caption_upsample_temperature: float | None = None,
    ) -> Any:
        if caption_upsample_temperature:
            prompt = self.upsample_prompt(prompt)[0]
        return super().__call__(
            prompt=prompt, height=height, width=width, num_inference_steps=num_inference_steps,
            generator=generator, max_sequence_length=max_sequence_length, output_type=output_type,
        )  # fmt: skip

    def upsample_prompt(self, prompt: str | None) -> list[str]:
        return [f"{prompt}, in oils"]


@pytest.mark.parametrize("isolation", ["shared", "private"])
def test_a_pipelines_own_way_draws_and_shows_its_prompt(isolation: str) -> None:
    pipe = Rewriting(**fresh("flux").components)
    with driving(pipe, isolation=isolation) as drive:
        assert drive.engine.loaded.card.enhancer == "caption_upsample_temperature"
        recorder = drive.submit("a cat", **ARGUMENTS["flux"], seed=3, enhance_prompt=True)
        plain = drive.submit("a cat", **ARGUMENTS["flux"], seed=3)
        drive.finish()

    assert recorder.outcome.settings["revised_prompt"] == "a cat, in oils"
    assert gap(recorder.image, solo("flux", "a cat, in oils", seed=3)) < CLOSE
    assert "revised_prompt" not in plain.outcome.settings
    assert gap(plain.image, solo("flux", "a cat", seed=3)) < CLOSE
    assert "upsample_prompt" not in vars(pipe)
