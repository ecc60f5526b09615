"""Texts that pipelines write before drawing: gain of shared tokens, and delays.

usage: make bench-texts     (or: python -m benchmarks.texts [--turns N])

The language model is a Qwen 3 with 8 layers of width 512 and random weights; texts differ in
length, temperature, `top_k` and seed. *Plain* is the pipeline without an engine, in sequence. A
chat of greedy texts runs by transformers' `generate_batch` as well, on the same model. The measure
is CPU time of the process, of all threads; tokens are compared.

Then six requests come to a tiny GLM-Image, which writes 261 tokens before it draws, beside a longer
drawing. Waits are CPU time of the engine's thread from one step, of any request, to the next, and
from the drawing's own steps to its next: the policy may draw shorter requests first.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from carpool.config import EngineSettings
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import load
from carpool.engine.observe.timeline import Forward
from carpool.request.parameters import check
from carpool.types import Request
from carpool_lab.check.lockstep import OutcomeListener

TEXTS, WRITERS = 16, 6
SETTINGS = EngineSettings(device="cpu", max_running=32, max_batch_size=32)
LENGTHS = (20, 33, 48, 48, 40, 25, 48, 37)
PLANNED = {"height": 512, "width": 512, "max_sequence_length": 64, "output_type": "latent"}
CHAT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32, "pad_token_id": 0}


def ids_of(number: int) -> list[int]:
    return [5 + (7 * number + 3 * j) % 200 for j in range(10 + 3 * number)]


class Author(DiffusionPipeline):  # type: ignore[misc]
    """Writes text number `prompt`."""

    def __init__(self, text_encoder: nn.Module) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder)

    def __call__(self, prompt: str = "", is_chat: bool = False) -> dict[str, Any]:
        number, options = int(prompt), dict(CHAT)
        if not is_chat:
            options |= {"temperature": 0.5 + 0.05 * number, "top_k": 5 + number}
            options |= {"do_sample": True, "max_new_tokens": LENGTHS[number % 8]}
        ids = torch.tensor([ids_of(number)])
        text = self.text_encoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return {"images": torch.zeros(1), "text": text}


def built() -> Author:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Author(Qwen3ForCausalLM(config).eval().requires_grad_(False))


def plainly(pipe: Author, **arguments: Any) -> tuple[float, list[Tensor]]:
    """CPU seconds of all texts in sequence, and the texts."""
    began_s, texts = time.process_time(), []
    with torch.no_grad():
        for number in range(TEXTS):
            torch.manual_seed(number)
            texts.append(pipe(str(number), **arguments)["text"])
    return time.process_time() - began_s, texts


def submit(engine: EngineCore, prompt: str, seed: int, **arguments: Any) -> OutcomeListener:
    answer = OutcomeListener()
    engine.submit(check(engine.card, Request(prompt, seed=seed, **arguments)), answer)
    return answer


def until(engine: EngineCore, answers: list[OutcomeListener]) -> None:
    while any(answer.outcome is None for answer in answers):
        engine.step()


def by_engine(engine: EngineCore, expected: list[Tensor], **arguments: Any) -> float:
    """CPU seconds of all texts at once; the texts are compared."""
    began_s = time.process_time()
    answers = [submit(engine, str(number), number, **arguments) for number in range(TEXTS)]
    until(engine, answers)
    seconds = time.process_time() - began_s
    for answer, text in zip(answers, expected, strict=True):
        assert answer.outcome is not None
        assert torch.equal(answer.outcome.fields["text"], text)
    return seconds


def by_generate_batch(pipe: Author, expected: list[Tensor]) -> float:
    """CPU seconds of a chat by transformers' continuous batching; the texts are compared."""
    cache = ContinuousBatchingConfig(num_blocks=64, page_size=32, max_batch_tokens=512)
    prompts, began_s = [ids_of(number) for number in range(TEXTS)], time.process_time()
    answers = pipe.text_encoder.generate_batch(prompts, GenerationConfig(**CHAT), cache)
    seconds = time.process_time() - began_s
    written = sorted(answer.prompt_ids + answer.generated_tokens for answer in answers.values())
    assert written == sorted(text[0].tolist() for text in expected)
    return seconds


def waits(pipe: DiffusionPipeline) -> tuple[float, float, float, float]:
    """CPU seconds of a step, the median and longest wait for one, the drawing's longest wait."""
    forwards: list[Forward] = []
    loaded, clock = load(pipe, SETTINGS), time.thread_time
    engine = EngineCore(loaded, SETTINGS, clock=clock, observers=[forwards.append])
    gc.freeze()  # as a server's worker does
    engine.enter()
    drawing = submit(engine, "a cat", 0, num_inference_steps=1000, **PLANNED)
    while sum(forward.phase == "denoise" for forward in forwards) < 50:
        engine.step()
    step_s = statistics.median(f.duration_s for f in forwards if f.phase == "denoise")
    del forwards[:-1]
    [timeline] = forwards[0].timelines
    plans = [f"dog {number}" for number in range(WRITERS)]
    until(engine, [submit(engine, p, 1, num_inference_steps=2, **PLANNED) for p in plans])
    assert drawing.outcome is None  # still drawing
    engine.leave()
    steps = [f for f in forwards if f.phase == "denoise"]
    own = [f for f in steps if timeline in f.timelines]
    waits_s, own_s = (
        [b.began_s - a.began_s - a.duration_s for a, b in pairwise(fs)] for fs in (steps, own)
    )
    return step_s, statistics.median(waits_s), max(waits_s), max(own_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    turns, pipe = parser.parse_args().turns, built()
    with tempfile.TemporaryDirectory() as path:
        subprocess.run([sys.executable, "-m", "support.tiny.wider", "glm", "{}", path], check=True)
        planner = DiffusionPipeline.from_pretrained(path)
    seconds, chats, widths, beside = [], [], [], []
    for _ in range(turns):
        plain_s, texts = plainly(pipe)
        forwards: list[Forward] = []
        engine = EngineCore(load(pipe, SETTINGS), SETTINGS, observers=[forwards.append])
        engine.enter()
        seconds.append((plain_s, by_engine(engine, texts)))
        widths.append(statistics.mean(forward.requests for forward in forwards))
        chat_s, texts = plainly(pipe, is_chat=True)
        engine_s = by_engine(engine, texts, is_chat=True)
        engine.leave()
        chats.append((chat_s, engine_s, by_generate_batch(pipe, texts)))
        beside.append(waits(planner))
    ratios = [plain_s / engine_s for plain_s, engine_s in seconds]
    plain_s, engine_s = map(statistics.median, zip(*seconds, strict=True))
    print(f"{TEXTS} texts: plain {plain_s:.2f} s, engine {engine_s:.2f} s, "
          f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}), "
          f"{statistics.median(widths):.1f} texts a forward; all tokens equal")  # fmt: skip
    chat_s, engine_s, batch_s = map(statistics.median, zip(*chats, strict=True))
    print(f"a chat of {TEXTS}: plain {chat_s:.2f} s, engine {engine_s:.2f} s, generate_batch "
          f"{batch_s:.2f} s; all tokens equal")  # fmt: skip
    for step_s, *waits_s in beside:
        waits_ms = ", ".join(f"{1e3 * wait_s:.0f}" for wait_s in waits_s)
        print(f"a step of {1e3 * step_s:.0f} ms waits (median, longest, the drawing's): {waits_ms}")


if __name__ == "__main__":
    main()
