"""Every stage of training runs, goes on where it was stopped, and exports what diffusers loads."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from carpool.models.embedded import MODEL_DIR, REWRITER_DIR, VIDEO_MODEL_DIR
from training.shapes import rewriter, run, train, train_lora
from training.shapes.draw import parse, prompts
from training.shapes.flow_matching import TrainingSchedule
from training.shapes.rewriter import held_out, rewritten
from training.shapes.run import Checkpoints, TrainingLog
from training.shapes.video import train as train_video
from training.shapes.video.draw import prompts as video_prompts
from training.shapes.wordings import wording

FEW = TrainingSchedule(steps=4, decay_from=4, warmup=1, rows=4)


@pytest.fixture(autouse=True)
def plain_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a minute and is no part of what is asked here."""
    monkeypatch.setattr(torch, "compile", lambda model: model)


def settings(monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.slow
def test_the_picture_model_is_trained_stage_by_stage_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = {"count": 8, "spread": 0.5, "alone": 0.5}
    settings(
        monkeypatch, train, BUILD=tmp_path / "build", MODEL_DIR=tmp_path / "model", SCHEDULE=FEW,
        TEXT_STEPS=2, VAE_STEPS=2, VARIED={**scenes, "seed": 0}, CALM={**scenes, "seed": 1},
        CALM_FROM=2, GUIDED_FROM=3, SAVE_EVERY=2,
    )  # fmt: skip
    log = TrainingLog(tmp_path / "training.log")

    train.train(log, True)
    again = TrainingLog(tmp_path / "training.log")
    train.train(again, False)

    lines = (tmp_path / "training.log").read_text()
    assert lines.count("text step 2 loss") == lines.count("vae step 2 loss") == 1
    assert "transformer goes on from step 4" in lines
    assert lines.count("exported step 4") == 2
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "model")
    assert type(pipe).__name__ == "FluxPipeline"
    assert (tmp_path / "model/carpool.json").exists()
    [image] = pipe(prompts(1)[0], height=64, width=64, num_inference_steps=1).images
    assert image.size == (64, 64)


@pytest.mark.slow
def test_the_video_model_is_trained_stage_by_stage_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(
        monkeypatch, train_video, BUILD=tmp_path / "build", VIDEO_MODEL_DIR=tmp_path / "model",
        SCHEDULE=FEW, TEXT_STEPS=2, STILL_STEPS=1, VAE_STEPS=2, POLISH_STEPS=1, VIDEOS=4,
        SAVE_EVERY=2,
    )  # fmt: skip

    train_video.train(TrainingLog(tmp_path / "training.log"), True)

    lines = (tmp_path / "training.log").read_text()
    for stage in ("text step 2", "vae step 2", "decoder step 1", "exported step 4"):
        assert stage in lines
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "model")
    prompt = video_prompts(1)[0]
    [video] = pipe(prompt, height=48, width=48, num_frames=9, num_inference_steps=1).frames
    assert len(video) == 9


@pytest.mark.slow
def test_the_adapter_is_trained_and_its_file_fits_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(
        monkeypatch, train_lora, BUILD=tmp_path, LORA_DIR=tmp_path, SCHEDULE=FEW, GUIDED_FROM=3,
        ENCODER_STEPS=1, SCENES=8, JUDGE_EVERY=4,
    )  # fmt: skip
    monkeypatch.setattr(train_lora, "prompts", lambda count: prompts(2))

    train_lora.main()

    pipe = DiffusionPipeline.from_pretrained(MODEL_DIR)
    pipe.load_lora_weights(tmp_path, weight_name="outlined.safetensors")
    assert "adapter step 4: " in (tmp_path / "lora.log").read_text()
    assert pipe.get_list_adapters() == {"transformer": ["default_0"]}


@pytest.mark.parametrize(
    ("folder", "serving"),
    [(MODEL_DIR, train.SERVING), (VIDEO_MODEL_DIR, train_video.SERVING)],
    ids=["shapes", "shapes-video"],
)
def test_the_packaged_model_is_served_as_its_training_says_with_adapters_that_exist(
    folder: Path, serving: dict[str, Any]
) -> None:
    written = json.loads((folder / "carpool.json").read_text())

    assert written == serving
    assert all((folder / path).exists() for path in written.get("lora", {}).values())


def test_the_learning_rate_rises_stays_and_falls_to_its_floor() -> None:
    schedule = TrainingSchedule(steps=100, decay_from=61, warmup=10, floor=0.1)

    shares = [schedule.share(step) for step in (1, 10, 60, 81, 99, 100)]

    assert shares == [0.1, 1.0, 1.0, 0.5, 0.1, 0.1]


def test_a_stage_that_left_a_checkpoint_is_not_run_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.load_or_make("stage.pt", lambda: 1)

    assert first == checkpoints.load_or_make("stage.pt", lambda: pytest.fail("run again")) == 1


def test_a_log_counts_on_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("[   7000 s] begun\n")

    TrainingLog(tmp_path / "log")("goes on")

    assert (tmp_path / "log").read_text().splitlines()[-1] == "[   7000 s] goes on"


@pytest.mark.parametrize(
    ("flags", "done"),
    [([], ["train True", "judge"]), (["--export"], ["train False"]), (["--evaluate"], ["judge"])],
)
def test_the_command_line_chooses_what_is_done(
    flags: list[str], done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def evaluate(log: TrainingLog) -> None:
        did.append("judge")
        log("judged")

    monkeypatch.setattr(run, "DOCS", tmp_path)
    monkeypatch.setattr("sys.argv", ["train", *flags])

    run.main(
        None, tmp_path / "build", "shapes", threads=torch.get_num_threads(),
        train=lambda log, to_the_end: did.append(f"train {to_the_end}"),
        evaluate=evaluate,
    )  # fmt: skip

    assert did == done
    assert (tmp_path / "shapes-training.log").exists() == ("judge" in done)


# The rewriter of the embedded model: what it is trained on, and what the packaged one does


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
