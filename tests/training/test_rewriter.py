"""The rewriter of the embedded model: what it is trained on, and what the packaged one does."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from carpool.models.embedded import REWRITER_DIR
from training.shapes import rewriter
from training.shapes.draw import parse
from training.shapes.rewriter import held_out, rewritten
from training.shapes.wordings import wording


def test_captions_of_wordings_are_canonical_and_say_what_the_wording_says() -> None:
    rng = random.Random(5)
    for _ in range(300):
        drawn = wording(rng)
        scene = parse(drawn.caption)
        assert len(scene.items) == 1 + (" left of " in drawn.caption)


def test_a_tenth_of_the_wordings_is_held_out() -> None:
    rng = random.Random(6)
    share = sum(wording(rng).is_held_out for _ in range(4000)) / 4000
    assert 0.08 < share < 0.12


def test_the_packaged_rewriter_knows_wordings_that_it_was_not_trained_on() -> None:
    model = LlamaForCausalLM.from_pretrained(REWRITER_DIR, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(REWRITER_DIR)
    size = sum(file.stat().st_size for file in REWRITER_DIR.iterdir())

    right = [rewritten(model, tokenizer, each.text) == each.caption for each in held_out(60, 3)]

    assert sum(right) >= 54  # 95 % of 500 in docs/rewriter-training.log
    assert size < 5e6


@pytest.mark.slow
def test_a_rewriter_is_trained_exported_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriter, "BUILD", tmp_path / "build")
    monkeypatch.setattr(rewriter, "REWRITER_DIR", tmp_path / "model")
    monkeypatch.setattr(rewriter, "ROUNDS", ((2, 1e-3), (1, 1e-4)))
    monkeypatch.setattr(rewriter, "HELD_OUT", 2)
    (tmp_path / "build").mkdir()
    lines: list[str] = []

    rewriter.export(*rewriter.train(lines.append))
    share = rewriter.evaluate(lines.append)

    assert 0 <= share <= 1
    assert "held-out wordings right" in lines[-1]
    assert (tmp_path / "model/chat_template.jinja").exists()
