"""The conditioning cache: answers of encoders are given again, and change no bit of a picture."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline
from peft import LoraConfig
from torch import Tensor

from carpool.engine import serialization
from carpool.engine.digests import Digests
from carpool.engine.request import RequestState
from carpool.types import Request
from support.engine_driver import (
    CLOSE,
    Drive,
    Recorder,
    VirtualClock,
    called,
    driving,
    fresh,
    gap,
    served,
    solo,
)
from support.lora_files import weights, write
from support.tiny import ARGUMENTS

MIB = 64.0


def encodings(drive: Drive) -> int:
    """Calls of encoders that ran, each counted once for each of its requests."""
    return sum(forward.requests for forward in drive.forwards if forward.phase == "encode")


def counts(drive: Drive) -> tuple[int, int]:
    statistics = drive.engine.statistics()["conditioning"]
    return statistics["hits"], statistics["misses"]


def draw(drive: Drive, family: str, prompt: str = "a cat", **parameters: Any) -> Recorder:
    recorder = drive.submit(prompt, **{**ARGUMENTS[family], **parameters})
    drive.finish()
    return recorder


@pytest.mark.parametrize("family", ["flux", "sdxl", "qwen_image"])
def test_a_repeated_prompt_is_encoded_once_and_draws_the_picture_of_plain_diffusers(
    family: str,
) -> None:
    with driving(family, conditioning_cache=MIB) as drive:
        draw(drive, family)
        before = encodings(drive)
        again = draw(drive, family, seed=3)

        assert before
        assert encodings(drive) == before
        assert counts(drive) == (before, before)
    assert torch.equal(again.image, solo(family, "a cat", seed=3))


def test_equal_calls_that_park_together_run_once() -> None:
    with driving("flux", conditioning_cache=MIB) as drive:
        heard = [
            drive.submit(prompt, **ARGUMENTS["flux"], seed=seed)
            for seed, prompt in enumerate(["a cat", "a dog", "a cat", "a cat", "a dog"])
        ]
        drive.finish()

        assert drive.widths("text_encoder") == drive.widths("text_encoder_2") == [2]
        assert counts(drive) == (6, 4)
    assert gap(heard[2].image, solo("flux", "a cat", seed=2)) < CLOSE
    assert gap(heard[4].image, solo("flux", "a dog", seed=4)) < CLOSE


def test_requests_whose_encodings_are_kept_draw_together_however_long_each_takes_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, resume, steps = VirtualClock(0.001), RequestState.resume, 3

    def resumed(state: RequestState, *args: Any, **kwargs: Any) -> Any:
        clock.pass_by(1.0 if state.parked is None else 0.0)
        return resume(state, *args, **kwargs)

    monkeypatch.setattr(RequestState, "resume", resumed)
    with driving("flux", conditioning_cache=MIB, clock=clock) as drive:
        draw(drive, "flux", num_inference_steps=steps)
        for seed in range(4):
            arguments = ARGUMENTS["flux"] | {"num_inference_steps": steps}
            drive.submit("a cat", **arguments, seed=seed)
        drive.finish()
        assert drive.widths("transformer") == [1] * steps + [4] * steps


def test_calls_that_a_forward_has_no_room_for_are_answered_after_it() -> None:
    with driving("flux", conditioning_cache=MIB, mode="off", max_running=4) as drive:
        heard = [drive.submit("a cat", **ARGUMENTS["flux"], seed=seed) for seed in range(4)]
        drive.finish()

        assert encodings(drive) == 2
    assert [one.error for one in heard] == [None] * 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    files = {name: folder / f"{name}.safetensors" for name in ("text", "again")}
    for seed, file in enumerate(files.values()):
        write(file, weights("sdxl", seed))
    return files


@pytest.mark.parametrize("chance", [Random(0), Random(1)])
def test_pictures_are_the_same_with_and_without_it(
    adapters: dict[str, Path], chance: Random
) -> None:
    """In mixed company of repeats, adapters and cancelled requests; all bits, in exact mode."""
    ride = [
        {
            "prompt": chance.choice(["a cat", "a cat", "a dog"]),
            "negative_prompt": chance.choice(["", "blurry"]),
            "num_inference_steps": chance.choice([1, 2]),
            "lora": chance.choice([None, None, [{"id": "text"}], [{"id": "again", "scale": 0.5}]]),
            "seed": seed,
            "request_id": f"r{seed}",
        }
        for seed in range(8)
    ]
    turns, cancelled = [chance.choice([0, 0, 1, 2, 5]) for _ in ride], chance.choice(range(8))
    pictures, encoded = [], []
    for mib in (0.0, MIB):
        with driving("sdxl", conditioning_cache=mib, numerics="exact") as drive:
            for name, file in adapters.items():
                drive.engine.add_lora(name, file)
            heard = []
            for place, request in enumerate(ride):
                heard.append(drive.submit(**{**ARGUMENTS["sdxl"], **request}))
                drive.turn(turns[place])
                if place == cancelled:
                    drive.engine.cancel(f"r{place}")
            drive.finish()
            encoded.append(encodings(drive))
            pictures.append([None if one.error else one.image for one in heard])

    assert encoded[1] < encoded[0]
    assert [one is None for one in pictures[0]] == [one is None for one in pictures[1]]
    for plain, cached in zip(*pictures, strict=True):
        assert plain is None or torch.equal(plain, cached)


def test_what_pipelines_change_in_place_is_not_given_changed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = fresh("flux")
    encode = type(pipe).encode_prompt

    def changing(self: Any, *args: Any, **kwargs: Any) -> Any:
        embeds, pooled, ids = encode(self, *args, **kwargs)
        return embeds.mul_(1.5), pooled.add_(1.0), ids

    monkeypatch.setattr(type(pipe), "encode_prompt", changing)
    monkeypatch.setattr(type(pipe), "_get_t5_prompt_embeds", _uncopied)
    with driving(pipe, conditioning_cache=MIB, isolation="shared") as drive:
        first, second = draw(drive, "flux"), draw(drive, "flux")
        assert counts(drive)[0] == 2

    assert torch.equal(first.image, second.image)


def _uncopied(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Tensor:
    """As diffusers', but for what it copies on the way."""
    ids = self.tokenizer_2(
        prompt, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    ).input_ids
    embeds: Tensor = self.text_encoder_2(ids)[0]
    return embeds


def test_a_request_without_company_gets_the_bits_of_a_call_alone() -> None:
    with driving("flux", conditioning_cache=MIB) as drive:
        for prompt in ("a cat", "a dog"):
            drive.submit(prompt, **ARGUMENTS["flux"])
        drive.finish()
        assert drive.widths("text_encoder_2") == [2]
        alone = draw(drive, "flux")
        assert drive.widths("text_encoder_2") == [2, 1]
        draw(drive, "flux", "a dog")
        draw(drive, "flux")

        assert drive.widths("text_encoder_2") == [2, 1, 1]
    assert torch.equal(alone.image, solo("flux", "a cat"))


def test_a_reference_is_encoded_once_and_each_seed_draws_its_own_sample_of_it() -> None:
    pipe = StableDiffusionImg2ImgPipeline(**served("sd15").components)
    pipe.set_progress_bar_config(disable=True)
    arguments: dict[str, Any] = {
        "prompt": "a cat", "image": torch.rand(1, 3, 64, 64, generator=torch.Generator()),
        "num_inference_steps": 4, "strength": 0.5, "output_type": "pt",
    }  # fmt: skip
    pictures: list[Tensor] = []
    for mib in (0.0, MIB):
        with driving(copy.copy(pipe), conditioning_cache=mib) as drive:
            heard = [drive.put(Request(**arguments, seed=seed)) for seed in (0, 1)]
            drive.finish()
            heard.append(drive.put(Request(**arguments, seed=2)))
            drive.finish()
            pictures += [one.image for one in heard]
            encoded = sum(drive.widths("vae", "encode"))
        assert encoded == (1 if mib else 3)
    for plain, cached in zip(pictures[:3], pictures[3:], strict=True):
        assert float((plain - cached).abs().max()) < 2e-5
    assert not torch.equal(pictures[3], pictures[4])


def test_an_adapter_of_the_denoiser_shares_encodings_and_one_of_the_encoder_does_not(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    def encoded(family: str, file: Path) -> int:
        with driving(family, conditioning_cache=MIB) as drive:
            drive.engine.add_lora("one", file)
            draw(drive, family)
            before = encodings(drive)
            draw(drive, family, lora=[{"id": "one"}])
            draw(drive, family, lora=[{"id": "one"}])
            return encodings(drive) - before

    write(tmp_path / "flux.safetensors", weights("flux", 0))
    assert encoded("flux", tmp_path / "flux.safetensors") == 0
    assert encoded("sdxl", adapters["text"]) == 2


def test_tenants_share_answers_only_where_the_setting_says_so() -> None:
    def misses(**settings: Any) -> int:
        with driving("flux", conditioning_cache=MIB, **settings) as drive:
            for tenant in ("a", "b", "a"):
                drive.put(Request("a cat", seed=0, tenant=tenant, **ARGUMENTS["flux"]))
                drive.finish()
            together = [
                drive.put(Request("a dog", seed=0, tenant=tenant, **ARGUMENTS["flux"]))
                for tenant in ("a", "b")
            ]
            drive.finish()
            assert [one.error for one in together] == [None, None]
            return counts(drive)[1]

    assert misses() == 8
    assert misses(conditioning_sharing="shared") == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.train(),  # T5 drops out: random numbers
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: next(module.children()).register_forward_pre_hook(lambda *_: None),
    ],
)
def test_calls_that_do_more_than_answer_run_each_time(change: Callable[[Any], Any]) -> None:
    pipe: DiffusionPipeline = fresh("flux")
    with driving(pipe, conditioning_cache=MIB, isolation="shared") as drive:
        change(pipe.text_encoder_2)
        pictures = [draw(drive, "flux", seed=seed).image for seed in (0, 0)]
        together = [drive.submit("a cat", **ARGUMENTS["flux"], seed=seed) for seed in (0, 0)]
        drive.finish()

        assert sum(drive.widths("text_encoder_2")) == 4
        assert sum(drive.widths("text_encoder")) == 1
    assert torch.equal(pictures[0], pictures[1])
    assert float((together[1].image - pictures[0]).abs().max()) < 2e-5


def doubles(pipe: Any) -> None:
    with torch.no_grad():
        pipe.text_encoder_2.shared.weight.mul_(2.0)


def exchanges_a_layer(pipe: Any) -> None:
    layers = pipe.text_encoder.encoder.layers
    layers[1] = copy.deepcopy(layers[0])


def exchanges_values(pipe: Any) -> None:
    pipe.text_encoder_2.shared.weight.data = pipe.text_encoder_2.shared.weight.data * 2


def sets_an_attribute(pipe: Any) -> None:  # as an adapter's scale
    pipe.text_encoder.encoder.layers[0].self_attn.scale = 3.0


def writes_into_a_buffer(pipe: Any) -> None:
    places = pipe.text_encoder.embeddings.position_ids
    places.copy_(places.flip(-1))


def chooses_other_kernels(pipe: Any) -> None:
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU, too


@pytest.fixture
def usual_kernels() -> Iterator[None]:
    yield
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.usefixtures("usual_kernels")
@pytest.mark.parametrize(
    "change",
    [
        *(doubles, exchanges_a_layer, exchanges_values, sets_an_attribute, writes_into_a_buffer),
        chooses_other_kernels,
    ],
)
def test_a_module_that_changes_between_requests_drops_all_answers(
    change: Callable[[Any], None],
) -> None:
    pipe, judge = fresh("flux"), fresh("flux")
    with driving(pipe, conditioning_cache=MIB) as drive:
        first = draw(drive, "flux")
        assert counts(drive)[0] == 0
        change(pipe)
        second = draw(drive, "flux")

        assert counts(drive)[0] == 0
        draw(drive, "flux")
        assert counts(drive)[0] == 2
    change(judge)
    assert change is chooses_other_kernels or not torch.equal(first.image, second.image)
    assert torch.equal(second.image, plain(judge))


def plain(pipe: Any, **parameters: Any) -> Tensor:
    """The picture of plain diffusers for "a cat"."""
    image: Tensor = called(pipe, 0, "a cat", **ARGUMENTS["flux"], **parameters).images
    return image


def test_a_scale_of_a_lora_that_was_added_between_requests_is_of_its_request_only() -> None:
    def add(pipe: Any) -> None:
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        pipe.text_encoder.add_adapter(config)

    pipe, judge = fresh("flux"), fresh("flux")
    add(judge)
    scale: dict[str, Any] = {"joint_attention_kwargs": {"scale": 0.3}}
    with driving(pipe, conditioning_cache=MIB) as drive:
        draw(drive, "flux")
        add(pipe)
        heard = [drive.submit("a cat", **ARGUMENTS["flux"], **more) for more in (scale, {}, scale)]
        drive.finish()
        again = draw(drive, "flux")

    scaled, usual = plain(judge, **scale), plain(judge)
    assert gap(scaled, usual) > 100 * CLOSE
    for recorder, picture in zip([*heard, again], [scaled, usual, scaled, usual], strict=True):
        assert gap(recorder.image, picture) < CLOSE


def test_memory_that_numpy_overwrites_is_read_again() -> None:
    memory = np.zeros(4, np.float32)
    digests, picture = Digests(), torch.from_numpy(memory)
    before = digests.of(picture)
    memory += 1

    assert digests.of(picture) != before


def test_the_oldest_answers_go_when_the_limit_is_reached_and_none_stays_above_it() -> None:
    with driving("flux", conditioning_cache=0.02) as drive:  # one T5 answer takes 16 KiB
        for prompt in ("a cat", "a dog", "a cat"):
            draw(drive, "flux", prompt)
        statistics = drive.engine.statistics()["conditioning"]

        assert statistics["bytes"] <= statistics["limit_bytes"] == int(0.02 * 2**20)
        assert 0 < statistics["entries"] < 4


def test_memory_that_is_short_drops_all_answers() -> None:
    with driving("flux", conditioning_cache=MIB) as drive:
        draw(drive, "flux")
        drive.engine.runner._free_memory()
        assert drive.engine.statistics()["conditioning"]["bytes"] == 0
        draw(drive, "flux")
        assert drive.widths("text_encoder") == [1, 1]


def test_a_failure_between_equal_calls_leaves_the_others_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, attempts = fresh("flux"), []
    forward = pipe.text_encoder_2.encoder.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("once")
        return forward(*args, **kwargs)

    failing.__module__ = "transformers.models.t5"
    monkeypatch.setattr(pipe.text_encoder_2.encoder, "forward", failing)
    with driving(pipe, conditioning_cache=MIB, isolation="shared") as drive:
        heard = [drive.submit("a cat", **ARGUMENTS["flux"], seed=seed) for seed in range(3)]
        drive.finish()

    assert [one.error for one in heard] == [None] * 3


def test_copies_keep_strides_and_which_fields_are_one_tensor() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    answer = (whole, whole, whole[:, :, 1:3].expand(2, 3, 2), torch.ones(1).expand(5))

    first, second, part, ones = serialization.copied(answer)

    assert first is second
    assert [t.stride() for t in (first, part, ones)] == [t.stride() for t in (whole, *answer[2:])]
    assert all(map(torch.equal, (first, part, ones), (whole, *answer[2:])))
    assert not {first.data_ptr(), part.data_ptr()} & {whole.data_ptr(), answer[2].data_ptr()}
