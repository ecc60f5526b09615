"""A journal: another engine goes on where the first one was, and gives the same bits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import BaseModelOutputWithPooling

from carpool.config import EngineSettings
from carpool.engine import journal as journals
from carpool.engine.intercept import Call, Target
from carpool.engine.journal import Answered, Identity, Journal
from carpool.engine.language import parts
from carpool.engine.model.device import Device
from carpool.engine.model.load import load
from carpool.engine.observe.timeline import Timeline
from carpool.engine.probation.snapshot import difference
from carpool.engine.serialization import copied, pack, size, unpack
from carpool.errors import Released
from carpool.request.parameters import check
from carpool.types import CheckedRequest, JournalEntry, Request
from support.engine_driver import Drive, Recorder, driving, fresh
from support.language import author
from support.lora_files import adapter
from support.tiny import ARGUMENTS, checkpoint

STEPS = 6


def put(
    drive: Drive,
    request: Request,
    past: list[JournalEntry],
    kept: list[Answered] | None = None,
    **changes: Any,
) -> Recorder:
    recorder = Recorder()
    sink = None if kept is None else kept.append
    checked = replace(check(drive.engine.loaded.card, request), **changes)
    drive.engine.submit(checked, recorder, 0.0, Journal(past, sink))
    return recorder


def test_the_end_of_a_replay_is_told_before_the_next_forward() -> None:
    told = list[tuple[str, int, int]]()
    request, entries, _ = written_down()
    with driving("flux", numerics="exact") as drive:

        def note(request_id: str, number: int) -> None:
            told.append((request_id, number, len(drive.forwards)))

        checked = check(drive.engine.loaded.card, request)
        drive.engine.submit(checked, Recorder(), 0.0, Journal(entries, None, None, note))
        drive.finish()

    assert told == [(checked.request_id, entries[-1].number, 0)]


def replayed(drive: Drive, request: Request) -> int:
    timeline = drive.engine.timeline(request.request_id)
    assert timeline is not None
    return int(timeline["replayed_calls"])


def asked(family: str, **parameters: Any) -> Request:
    given = {**ARGUMENTS[family], "num_inference_steps": STEPS, **parameters}
    return Request("a photo of a cat", **{"seed": 7, **given})


def tensor_of(recorder: Recorder) -> torch.Tensor:
    if recorder.error is not None:
        raise recorder.error
    fields = recorder.outcome.fields
    value = fields["images"] if "images" in fields else fields["frames"]
    return torch.as_tensor(value)


def interrupted(
    family: str, request: Request, steps: int, **changes: Any
) -> tuple[list[JournalEntry], torch.Tensor, int]:
    """What was written down until so many steps; the whole picture; forwards that were left."""
    kept: list[Answered] = []
    with driving(family, numerics="exact") as drive:
        ran = put(drive, request, [], kept, **changes)
        drive.turn_until(lambda: any(event.step >= steps for event in ran.events))
        entries, made = [one.entry() for one in kept], len(drive.forwards)
        drive.finish()
        return entries, tensor_of(ran), len(drive.forwards) - made


@cache
def written_down() -> tuple[Request, list[JournalEntry], torch.Tensor]:
    """A request of flux, what was written down until its third step, and its whole picture."""
    request = asked("flux", request_id="one")
    entries, whole, _ = interrupted("flux", request, 3)
    return request, entries, whole


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("flux", {}),
        ("sdxl", {"guidance_scale": 5.0, "eta": 1.0}),  # draws noise in each step
        ("qwen_image", {"true_cfg_scale": 4.0, "negative_prompt": "dark"}),
        ("wan21_t2v", {"guidance_scale": 5.0}),
        ("flux", {"step_cache": 0.9}),
    ],
)
def test_another_engine_runs_only_what_was_not_written_down_and_gives_the_same_bits(
    family: str, parameters: dict[str, Any]
) -> None:
    request = asked(family, **parameters)
    entries, whole, left = interrupted(family, request, 3)
    with driving(fresh(family), numerics="exact") as other:
        again = put(other, request, entries)
        other.finish()

        assert torch.equal(tensor_of(again), whole)
        assert len(other.forwards) == left
        assert again.step == STEPS
        steps = [event.step for event in again.events if event.kind == "step"]
        assert steps[0] >= 3 or "step_cache" in parameters  # steps skipped since are skipped again
        assert steps == sorted(set(steps))
        assert replayed(other, request) == len(entries)


@pytest.mark.parametrize("family", ["flux", "sd15"])
def test_a_request_that_is_given_up_goes_on_elsewhere_and_no_step_is_made_again(
    family: str,
) -> None:
    request, kept = asked(family), list[Answered]()
    with driving(family, numerics="exact") as drive:
        alone = put(drive, request, [])
        drive.finish()
        whole, made = tensor_of(alone), len(drive.forwards)
    with driving(fresh(family), numerics="exact") as drive:
        ran = put(drive, request, [], kept)
        drive.turn_until(lambda: any(event.step >= 3 for event in ran.events))
        drive.engine.release(request.request_id)
        drive.finish()
        assert isinstance(ran.error, Released)
        before = len(drive.forwards)
    with driving(fresh(family), numerics="exact") as other:
        again = put(other, request, [one.entry() for one in kept])
        other.finish()
        assert torch.equal(tensor_of(again), whole)
        assert before + len(other.forwards) == made


def test_a_request_stays_whose_journal_lacks_a_call_and_one_that_waits_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journals, "MOST_BYTES", 100)
    request, other = asked("flux"), asked("flux", seed=8)
    with driving("flux", max_running=1) as drive:
        ran = put(drive, request, [], [])
        drive.turn_until(lambda: any(event.step >= 2 for event in ran.events))
        waits = put(drive, other, [], [])
        for name in (request.request_id, other.request_id, "unknown"):
            drive.engine.release(name)
        drive.finish()
        assert isinstance(waits.error, Released)
        assert tensor_of(ran) is not None


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", ["glm", "gemma3", "qwen2.5-vl", "large head"])
def test_a_text_goes_on_at_its_next_token(
    name: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, request, kept = int(name == "large head"), Request("3", seed=7), list[Answered]()
    monkeypatch.setattr(parts, "LARGE_HEAD", 1 if heads else 2**30)
    pipes = [author("qwen3" if heads else name) for _ in range(2)]
    with driving(pipes[0], numerics=numerics) as drive:
        drive.submit("1", seed=1)
        ran = put(drive, request, [], kept)
        drive.turn_until(lambda: len(kept) >= 9)
        entries, made = [one.entry() for one in kept], len(drive.forwards)
        drive.finish()
        lines = [[line.request_id for line in f.timelines] for f in drive.forwards[made:]]
        left = sum(request.request_id in ids for ids in lines)
    with driving(pipes[1], numerics=numerics) as other:
        again = put(other, request, entries)
        other.finish()

        assert again.outcome.fields["text"].tolist() == ran.outcome.fields["text"].tolist()
        assert torch.equal(tensor_of(again), tensor_of(ran))
        assert replayed(other, request) == len(entries) == 9
        assert len(other.forwards) == left + 1 + heads * 9  # the prompt; and logits


def test_an_adapter_of_another_file_by_the_same_name_is_no_match(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (adapter(tmp_path / name, "flux", seed) for seed, name in enumerate(("a", "b")))
    request, kept = asked("flux", lora=[{"id": "style"}]), list[Answered]()
    with driving(fresh("flux"), numerics="exact", lora=(f"style={one}",)) as drive:
        ran = put(drive, request, [], kept)
        drive.finish()
        whole, made = tensor_of(ran), len(drive.forwards)
        again = put(drive, request, [entry.entry() for entry in kept])
        drive.finish()
        assert torch.equal(tensor_of(again), whole)
        assert len(drive.forwards) == made + 1  # only the end of the autoencoder
    with driving(fresh("flux"), numerics="exact", lora=(f"style={two}",)) as drive:
        other = put(drive, request, [entry.entry() for entry in kept])
        drive.finish()
        assert len(drive.forwards) == made
        assert not torch.equal(tensor_of(other), whole)
    assert "starts over" in caplog.text


Change = Callable[[list[JournalEntry]], list[JournalEntry]]


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: [replace(one, mark=b"other") for one in entries],
        lambda entries: [*entries[:2], replace(entries[2], answer=b"torn")],
        lambda entries: [*entries[:3], replace(entries[3], answer=entries[3].answer[:-9])],
        lambda entries: [entries[0], replace(entries[1], number=1), *entries[2:]],
        lambda entries: entries[::-1],
        lambda entries: [*entries, replace(entries[-1], number=4000)],
        lambda entries: [one for one in entries if one.number != 3],
        lambda entries: entries[4:],
        lambda entries: [],
    ],
    ids=["foreign", "torn", "short", "twice", "backwards", "late", "gap", "headless", "none"],
)
def test_whatever_a_journal_holds_the_picture_is_right(change: Change) -> None:
    request, entries, whole = written_down()
    with driving(fresh("flux"), numerics="exact") as other:
        kept: list[Answered] = []
        again = put(other, request, change(entries), kept)
        beside = put(other, asked("flux", seed=8), [])
        other.finish()

        assert torch.equal(tensor_of(again), whole)
        assert beside.error is None
        assert again.kinds.count("started") == again.kinds.count("finished") == 1


@pytest.mark.parametrize("change", [{"seed": 8}, {"guidance_scale": 9.0}, {"prompt": "a dog"}])
def test_a_journal_of_another_request_is_dropped(change: dict[str, Any]) -> None:
    known, entries, _ = written_down()
    given = {"prompt": known.prompt, "seed": 7, "request_id": "one", **known.parameters}
    request = Request(**{**given, **change})
    with driving(fresh("flux"), numerics="exact") as other:
        again, alone = put(other, request, entries), put(other, request, [], request_id="alone")
        other.finish()
        assert torch.equal(tensor_of(again), tensor_of(alone))
        assert replayed(other, request) == 0


def test_a_call_is_told_from_one_whose_argument_was_changed_in_place() -> None:
    # its form is kept from the call before, as long as it is the same tensor and nobody wrote on it
    module = torch.nn.Identity()
    target = Target("transformer", module, "forward", module.forward, ("time",), "denoise", None)
    kept: list[Answered] = []
    journal = Journal((), kept.append)
    device = Device(EngineSettings(device="cpu"))
    model: Any = SimpleNamespace(device=device, of=lambda request: b"one")
    journal.begin(model, CheckedRequest("one", 7, {}), Timeline("one", 0.0))
    time = torch.tensor([999])
    for change in (0, 0, -100):
        time += change
        call = Call(target, (time,), {})
        assert journal.answer(call) is None
        journal.ran(call, torch.zeros(1))

    first, second, changed = (one.mark for one in kept)
    assert first == second
    assert changed != first


@pytest.mark.filterwarnings(
    "ignore:.*Quant:FutureWarning",  # quanto goes with diffusers 1.0
    "ignore::UserWarning:torchao",
)
@pytest.mark.parametrize(
    "prepared",
    [
        {}, {"quantize": "transformer=fp8"}, {"quantize": "transformer=int8"},
        {"quantize": "transformer=quanto-int4"}, {"stream": "transformer"},
        {"quantize": "transformer=int8", "stream": "transformer"},
    ],
    ids=str,
)  # fmt: skip
def test_other_weights_under_the_same_name_are_told_apart_however_they_are_kept(
    prepared: dict[str, Any], tmp_path: Path
) -> None:
    """As after a LoRA was merged: matrices in the blocks are others, and nothing else is."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("flux"), folder)

    def identity() -> bytes:
        loaded = load(folder, EngineSettings(device="cpu", **prepared))
        try:
            return Identity(loaded, lambda name: b"").of(CheckedRequest("a cat", 7, {}))
        finally:
            loaded.undo()

    old = identity()
    assert identity() == old
    [file] = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    changed = [name for name in weights if "blocks.0.attn.to_q.weight" in name]
    assert changed
    save_file(weights | {name: weights[name] * 1.5 for name in changed}, file)
    assert identity() != old


def test_another_configuration_of_a_module_is_another_model() -> None:
    request = CheckedRequest("a cat", 7, {})

    def identity(pipe: Any) -> bytes:
        loaded = load(pipe, EngineSettings(device="cpu"))
        return Identity(loaded, lambda name: b"").of(request)

    old, other = fresh("flux"), fresh("flux")
    other.vae.register_to_config(scaling_factor=2 * old.vae.config.scaling_factor)
    assert identity(other) != identity(old) == identity(fresh("flux"))


def test_answers_that_are_dear_to_copy_are_not_kept_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journals, "MOST_BYTES", 10)
    monkeypatch.setattr(journals, "_logged", set())
    entries, _, _ = interrupted("flux", asked("flux"), 3)

    assert entries == []
    assert caplog.text.count("answers of transformer.forward are not recorded") == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4), torch.tensor(2.5), torch.empty(0, 3), torch.randn(3, 4).t(),
        torch.randn(3, 4)[1:2], torch.randn(3).bfloat16(), torch.nn.Parameter(torch.randn(3)),
        torch.randn(3, 4).to(torch.complex64).conj().imag, torch.tensor([True, False]),
    ],
    ids=lambda one: f"{one.dtype}{list(one.stride())}",
)  # fmt: skip
def test_a_tensor_is_the_same_once_packed_wherever_its_values_lie(tensor: torch.Tensor) -> None:
    got = unpack(pack((tensor,)), torch.device("cpu"))[0]

    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.stride() == tensor.stride() or not tensor.numel()
    assert torch.equal(got, tensor.detach())


def test_an_answer_is_the_same_once_packed() -> None:
    answer = BaseModelOutputWithPooling(
        last_hidden_state=torch.randn(2, 3, 4).transpose(1, 2),
        pooler_output=torch.randn(2, 4, dtype=torch.bfloat16),
        hidden_states=(torch.arange(3), torch.zeros(0, 2), torch.tensor(1.5, dtype=torch.float16)),
    )
    for one in (answer, (answer, None, True), [torch.randn(4, 2, 8, 8)[:, 1]], {"sample": None}):
        got = unpack(pack(copied(one)), torch.device("cpu"))
        assert difference([got], [one]) is None
    strided = answer.last_hidden_state
    assert unpack(pack(strided), torch.device("cpu")).stride() == strided.stride()
    assert size(answer) == 2 * 3 * 4 * 4 + 2 * 4 * 2 + 3 * 8 + 2


@pytest.mark.parametrize("cls", ["os:system", "builtins:dict", "sys:exit", "nowhere:Thing"])
def test_no_code_is_run_by_an_answer(cls: str) -> None:
    with pytest.raises(ValueError, match=r"damaged answer|no class of outputs"):
        unpack(msgspec.msgpack.encode(["m", cls, {}]), torch.device("cpu"))
