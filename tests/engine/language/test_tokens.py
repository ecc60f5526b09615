"""Texts that pipelines write: each token is a call, and each text is what it is alone."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from carpool.errors import Cancelled, DeadlineExceeded, PipelineFailed
from support.engine_driver import CLOSE, Recorder, VirtualClock, driving, gap
from support.language import MODELS, OTHERS, Author, Exactly, alone, author
from support.watchdog import watching

# linear attention or state spaces; decoders that read an encoder, or pictures
ALONE = {"qwen3.5", "t5", "bamba", "jamba", "bart", "mllama"}
SEEDS = (11, 12, 13, 14, 15, 16)


def check(name: str, number: int, recorder: Recorder, seed: int) -> None:
    expected = alone(name, number, seed)
    assert recorder.error is None
    assert recorder.outcome.warnings == ()  # it did not ride privately
    assert recorder.outcome.fields["text"].tolist() == expected["text"].tolist()
    assert gap(recorder.image, expected["images"]) <= CLOSE


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_texts_in_company_are_those_written_alone(name: str) -> None:
    pipe = author(name)
    pipe.texts.append({"input_ids": torch.zeros(1, 0, dtype=torch.long)})
    with watching(), driving(pipe) as drive:
        heard = {number: drive.submit(str(number), seed=SEEDS[number]) for number in (0, 1, 2, 3)}
        given_up = drive.submit("5", seed=90, request_id="given up")
        broken = [drive.submit(prompt, seed=91) for prompt in ("99", "6")]  # no text; an empty one
        drive.turn(6)
        heard |= {number: drive.submit(str(number), seed=SEEDS[number]) for number in (4, 5)}
        drive.turn(6)
        drive.engine.cancel("given up")
        drive.finish()

    assert isinstance(given_up.error, Cancelled)
    assert all(isinstance(recorder.error, PipelineFailed) for recorder in broken)
    assert max(drive.widths("text_encoder", "generate")) == (1 if name in ALONE else 5)
    for number, recorder in heard.items():
        check(name, number, recorder, SEEDS[number])


def test_a_text_in_a_private_ride_is_that_written_alone() -> None:
    with driving(author("glm"), isolation="private") as drive:
        heard = [drive.submit(str(number), seed=SEEDS[number]) for number in (0, 1)]
        drive.finish()

    for number, recorder in enumerate(heard):
        expected = alone("glm", number, SEEDS[number])
        assert recorder.outcome.fields["text"].tolist() == expected["text"].tolist()


def test_a_running_request_waits_for_two_forwards_at_most_while_others_write() -> None:
    with driving(author("glm"), clock=VirtualClock(0.001), mode="continuous") as drive:
        drive.submit("", seed=1, num_inference_steps=60)
        drive.turn(10)
        for number in range(6):
            drive.submit(str(number), seed=SEEDS[number])
        drive.finish()

    phases = [forward.phase for forward in drive.forwards[10:]]
    drawn = [place for place, phase in enumerate(phases) if phase == "denoise"][:50]
    gaps = [after - before - 1 for before, after in pairwise(drawn)]
    assert max(gaps) <= 2
    assert sum(gaps) >= 20  # and texts were written all the while


def test_a_text_goes_on_beside_full_forwards_of_requests_that_draw() -> None:
    with driving(
        author("glm"), clock=VirtualClock(0.001), mode="continuous", max_batch_size=2
    ) as drive:
        for seed in range(6):
            drive.submit("", seed=seed, num_inference_steps=300)
        drive.turn(40)
        writing = drive.submit("0", seed=SEEDS[0], request_id="writing")
        drive.turn_until(lambda: "generate" in {forward.method for forward in drive.forwards})
        begun = len(drive.forwards)
        drive.turn(80)
        drive.engine.cancel("writing")
        methods = [forward.method for forward in drive.forwards[begun:]]
        drive.turn()

    assert isinstance(writing.error, Cancelled)
    assert methods[:40].count("generate") == 20  # a token after each step, to its end


def test_a_report_tells_how_long_texts_are_and_what_is_left_of_those_in_progress() -> None:
    with driving(author("llama", 4), clock=(clock := VirtualClock(0.001))) as drive:
        drive.submit("3", seed=1, num_inference_steps=5)
        drive.finish()
        clock.pass_by(2.0)  # until the next report
        drive.submit("3", seed=1, num_inference_steps=5, request_id="writing")
        drive.turn(8)
        report = drive.engine.load_report()
        written = drive.engine.running.states[0].timeline.tokens
        drive.turn(4)
        later = drive.engine.load_report().steps_left["writing"]

    [(tokens, seconds)] = report.text_costs.values()
    assert (list(report.text_costs), tokens) == (["text-to-image"], 18)
    assert seconds[0] < seconds[3] < 4 * seconds[0]
    [step_s] = [seconds[0] for seconds in report.step_costs.values()]
    left = report.steps_left["writing"]
    assert left == pytest.approx(5 + (18 - written) * seconds[0] / step_s, rel=0.1)
    assert left > later


@pytest.mark.parametrize("error", [Cancelled, DeadlineExceeded])
def test_a_request_that_is_cancelled_or_too_late_in_a_text_writes_no_more(error: type) -> None:
    clock = VirtualClock()
    with driving(author("llama"), clock=clock) as drive:
        recorder = drive.submit("3", seed=1, request_id="late", timeout_s=1.0)
        drive.turn(4)
        clock.pass_by(2.0) if error is DeadlineExceeded else drive.engine.cancel("late")
        drive.finish()
        told = drive.engine.timeline("late")
        counted = drive.engine.statistics()["tokens"]

    assert isinstance(recorder.error, error)
    assert told is not None
    assert told["tokens"] == counted == len(drive.forwards) == 4


class Keeping(Author):
    """Reads what its model has kept, from where its caller may read it, after the text."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = super().__call__(*args, **kwargs)
        return {**answer, "kept": self.text_encoder.model.rope_deltas.tolist()}


def test_what_a_model_keeps_is_its_own_request_s_during_a_text_and_after_it() -> None:
    pipe = author("glm", kind=Keeping)
    model: Any = pipe.text_encoder.model
    with driving(pipe) as drive:
        heard = [drive.submit(str(number), seed=number) for number in range(3)]
        drive.turn(5)
        assert model.rope_deltas is model._cached_decode_position_ids is None
        drive.finish()

    assert model.rope_deltas is model._cached_decode_position_ids is None
    for number, recorder in enumerate(heard):
        torch.manual_seed(number)
        assert recorder.outcome.fields["kept"] == author("glm", kind=Keeping)(str(number))["kept"]
        assert recorder.outcome.warnings == ()


class Unsplittable(Author):
    """Writes a text where no pause is possible."""

    def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
        linear = torch.nn.Linear(4, 4)
        for _step in range(50):
            linear(torch.ones(4))
        return {"images": torch.zeros(1)}


@pytest.mark.parametrize(("name", "is_split"), [("glm", True), ("bart", True), ("t5", False)])
def test_the_watchdog_finds_what_cannot_be_split(name: str, *, is_split: bool) -> None:
    pipe = author(name, kind=Author if is_split else Unsplittable)
    expected = nullcontext() if is_split else pytest.raises(AssertionError, match="a pause")
    with expected, watching(), driving(pipe) as drive:
        drive.submit("1", seed=1)
        drive.finish()


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_in_exact_numerics_logits_are_those_alone_to_the_bit(name: str) -> None:
    with driving(author(name, 4, Exactly), numerics="exact") as drive:
        for count in (2, 3, 4):  # as many as positions have axes, too
            heard = [drive.submit(str(number), seed=number) for number in range(count)]
            drive.finish()
    for number, recorder in enumerate(heard):
        torch.manual_seed(number)
        expected = author(name, 4, Exactly)(str(number))
        assert torch.equal(recorder.image, expected["images"])
        assert torch.equal(recorder.outcome.fields["text"], expected["text"])
    # GPT-2 folds rows in a product that is not taken apart; experts; angles by the longest row
    is_followed = name not in {*ALONE, "gpt2", "deepseek2", "deepseek3", "longrope"}
    assert (drive.widest("text_encoder", "generate") == 4) == is_followed
