"""Train the prompt rewriter of the embedded model: free wordings in, captions out.

    python -m training.shapes.rewriter

A Llama with a million weights reads a wording and a separator, and writes the caption. Its
tokenizer is byte pair encoding over bytes, so it reads any text. The exported folder is a normal
causal model of transformers, with a chat template for one turn.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from carpool.models.embedded import REWRITER_DIR
from training.shapes.fit import AdamW, Log, Loss, fit
from training.shapes.run import DOCS, TrainingLog
from training.shapes.wordings import Wording, wording

BUILD = Path("build/rewriter")
PAD, BEGIN, CAPTION, END = "<pad>", "<wording>", "<caption>", "<end>"
TEMPLATE = (
    "{{ '<wording>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ message['content'] }}{% endif %}{% endfor %}{{ '<caption>' }}"
)
VOCABULARY, ROWS = 1024, 64
ROUNDS = ((2500, 3e-3), (2500, 2e-3))  # steps, peak learning rate
HELD_OUT = 500
MAX_NEW_TOKENS = 24  # the longest caption has 16


def tokenizer_of(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte pair encoding over bytes on lower-case wordings and captions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BEGIN, CAPTION, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pool = [wording(rng) for _ in range(20_000)]
    texts = [text for each in pool if not each.is_held_out for text in (each.text, each.caption)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BEGIN, eos_token=END,
        additional_special_tokens=[CAPTION], model_max_length=192, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def model_of(tokenizer: Any) -> LlamaForCausalLM:
    """An untrained model."""
    ids = tokenizer.convert_tokens_to_ids
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=ids(PAD),
            bos_token_id=ids(BEGIN),
            eos_token_id=ids(END),
        )
    )


def ids_of(tokenizer: Any, wordings: Sequence[Wording]) -> tuple[Tensor, Tensor]:
    """Token ids of wordings and captions, and labels of the captions only: (rows, tokens) each."""
    special = [tokenizer.convert_tokens_to_ids(name) for name in (BEGIN, CAPTION, END, PAD)]
    begin, caption, end, pad = special
    read = tokenizer([each.text for each in wordings], add_special_tokens=False).input_ids
    write = tokenizer([each.caption for each in wordings], add_special_tokens=False).input_ids
    rows = [[begin, *a, caption, *b, end] for a, b in zip(read, write, strict=True)]
    labels = [[-100] * (len(a) + 2) + [*b, end] for a, b in zip(read, write, strict=True)]
    width = max(map(len, rows))
    return (
        torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    )


def train(log: Log) -> tuple[LlamaForCausalLM, Any]:
    """Train on wordings that are not held out, each used once."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = tokenizer_of(random.Random(1))
    model = model_of(tokenizer).train()
    log(f"{sum(weight.numel() for weight in model.parameters())} weights")

    def draw_wording() -> Wording:
        while (each := wording(rng)).is_held_out:
            pass
        return each

    def batch_loss(step: int) -> Loss:
        ids, labels = ids_of(tokenizer, [draw_wording() for _ in range(ROWS)])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        targets = labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def report() -> str:
            right = (logits.argmax(-1) == targets) | (targets == -100)
            return f"captions right {right.all(1).float().mean():.3f}"

        return loss, report

    for steps, rate in ROUNDS:
        optimizer = AdamW(list(model.parameters()), rate, (steps, 0.05), weight_decay=0.01)
        fit("rewriter", steps, batch_loss, optimizer, log)
    return model.eval().requires_grad_(False), tokenizer


def export(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Save the model in half precision as a transformers folder."""
    fresh = BUILD / "export"
    shutil.rmtree(fresh, ignore_errors=True)
    model.generation_config.max_new_tokens = MAX_NEW_TOKENS
    model.half().save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    serving = {"id": "shapes-rewriter"}
    (fresh / "carpool.json").write_text(json.dumps(serving, indent=2) + "\n")
    (fresh / "model.safetensors").chmod(0o644)
    shutil.rmtree(REWRITER_DIR, ignore_errors=True)
    shutil.move(fresh, REWRITER_DIR)


def held_out(count: int, seed: int = 2) -> list[Wording]:
    """Wordings of held-out combinations."""
    rng, chosen = random.Random(seed), list[Wording]()
    while len(chosen) < count:
        if (each := wording(rng)).is_held_out:
            chosen.append(each)
    return chosen


@torch.no_grad()
def rewritten(model: Any, tokenizer: Any, text: str) -> str:
    """The model's caption for a wording, by greedy decoding."""
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def evaluate(log: Log) -> float:
    """Rewrite held-out wordings with the packaged model; returns the share of right captions."""
    model = LlamaForCausalLM.from_pretrained(REWRITER_DIR, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(REWRITER_DIR)
    right = 0
    for each in held_out(HELD_OUT):
        caption = rewritten(model, tokenizer, each.text)
        right += caption == each.caption
        if caption != each.caption:
            log(f"  wrong: {each.text!r}: {caption!r}, not {each.caption!r}")
    log(f"{right} of {HELD_OUT} held-out wordings right")
    return right / HELD_OUT


def main() -> None:
    """Train, export and judge; `--evaluate` only judges the packaged model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluate", action="store_true", help="only judge the packaged model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    BUILD.mkdir(parents=True, exist_ok=True)
    log = TrainingLog(BUILD / "training.log")
    if not options.evaluate:
        export(*train(log))
    evaluate(log)
    shutil.copy(BUILD / "training.log", DOCS / "rewriter-training.log")


if __name__ == "__main__":
    main()
