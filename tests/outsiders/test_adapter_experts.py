"""Adapters of models with two experts (Wan 2.2): each goes to its own, as it is said or named."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import carpool
from carpool.errors import InvalidValue, LoraRejected
from carpool.request.adapter_names import AdapterInfo, expert_of, split_target
from carpool.request.lora import check_lora
from carpool.worker import protocol
from support.app import CARD, Grey, open_app
from support.endpoints import ENDPOINT
from support.engine_driver import CLOSE, called, driving, for_inference, fresh, gap
from support.lora_files import adapter, comfy, weights, write
from support.prepared import drawn
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
FAMILY = "wan22_t2v_a14b"
MORE = {**ARGUMENTS[FAMILY], "num_inference_steps": 8}  # so that both experts have steps
CLEAR = 100 * CLOSE


def state(seed: int) -> dict[str, Tensor]:
    return comfy(weights(FAMILY, seed, std=0.15))


def by_diffusers(adapters: Sequence[tuple[dict[str, Tensor], float, bool]]) -> Tensor:
    """What plain diffusers draws with adapters: weights, scale, whether for `transformer_2`."""
    pipe: Any = fresh(FAMILY)
    names: dict[bool, dict[str, float]] = {False: {}, True: {}}
    for i, (tensors, scale, is_second) in enumerate(adapters):
        more = {"load_into_transformer_2": True} if is_second else {}
        pipe.load_lora_weights(dict(tensors), adapter_name=f"x{i}", **more)
        names[is_second][f"x{i}"] = scale
    for model, own in zip((pipe.transformer, pipe.transformer_2), names.values(), strict=True):
        if own:
            model.set_adapters(list(own), list(own.values()))
    return drawn(vars(called(for_inference(pipe), 0, "a cat", **MORE)))


STANDARD = "pytorch_lora_weights.safetensors"
HIGH, LOW = "style_high_noise.safetensors", "style_low_noise.safetensors"


@pytest.mark.parametrize(
    ("high", "low", "lora"),
    [
        (HIGH, LOW, (f"h={HIGH}", f"l={LOW}")),
        ("a.safetensors", "b.safetensors", ("h=a.safetensors", "l=b.safetensors@transformer_2")),
        (LOW, HIGH, (f"h={LOW}@transformer", f"l={HIGH}@transformer_2")),
        ("a.safetensors", "b.safetensors", ("h=a.safetensors", "low=b.safetensors")),
        (f"high/{STANDARD}", f"low/{STANDARD}", ("h=high", "l=low")),
    ],
    ids=["the files' names", "as it is said", "against the files' names", "own name", "folders"],
)
def test_a_pair_goes_to_both_experts(
    high: str, low: str, lora: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path / high, state(1))
    write(tmp_path / low, state(2))
    entries = tuple(entry.replace("=", f"={tmp_path}/") for entry in lora)

    with driving(FAMILY, lora=entries) as drive:
        targets = {one.id: one.target for one in drive.engine.loaded.card.adapters}
        first, second_id = targets
        pair = [{"id": first, "scale": 0.8}, {"id": second_id, "scale": -0.5}]
        requests = [drive.submit("a cat", lora=lora, **MORE) for lora in (pair, pair[1:], None)]
        drive.finish()
        both, second, none = (drawn(request.outcome.fields) for request in requests)

    assert list(targets.values()) == ["transformer", "transformer_2"]
    assert gap(both, by_diffusers([(state(1), 0.8, False), (state(2), -0.5, True)])) < CLOSE
    assert gap(second, by_diffusers([(state(2), -0.5, True)])) < CLOSE
    assert gap(none, by_diffusers([])) < CLOSE
    assert gap(both, second) > CLEAR


def test_a_request_says_where_an_adapter_goes(tmp_path: Path) -> None:
    write(tmp_path / "style.safetensors", state(1))
    entries: list[list[dict[str, Any]]] = [
        [{"id": "style"}],
        [{"id": "style", "target": "transformer_2"}],
        [{"id": "style@transformer_2"}],
        [{"id": "style"}, {"id": "style", "target": "transformer_2", "scale": 0.5}],
    ]

    with driving(FAMILY, lora_dir=str(tmp_path)) as drive:
        requests = [drive.submit("a cat", lora=lora, **MORE) for lora in entries]
        drive.finish()
        first, second, same, both = (drawn(request.outcome.fields) for request in requests)

    assert gap(first, by_diffusers([(state(1), 1.0, False)])) < CLOSE
    assert gap(second, by_diffusers([(state(1), 1.0, True)])) < CLOSE
    assert gap(same, second) < CLOSE
    assert gap(both, by_diffusers([(state(1), 1.0, False), (state(1), 0.5, True)])) < CLOSE


def test_a_file_that_names_both_experts_goes_to_both(tmp_path: Path) -> None:
    halves = {"transformer": 1, "transformer_2": 2}
    whole = {
        name.replace("transformer", place, 1): weight
        for place, seed in halves.items()
        for name, weight in weights(FAMILY, seed, std=0.15).items()
    }
    file = write(tmp_path / "both.safetensors", whole)

    with carpool.load(checkpoint(FAMILY)) as engine:
        engine.add_lora("both", file)
        engine.add_lora("second", file, target="transformer_2")
        outputs = [
            engine.generate("a cat", seed=0, lora=[lora], **MORE)[0]
            for lora in ({"id": "both"}, {"id": "second"}, {"id": "both@transformer"})
        ]
        with pytest.raises(LoraRejected, match="no 'transformer_3': adapters go to transf"):
            engine.add_lora("third", file, target="transformer_3")

    both, second, first = (torch.as_tensor(output.frames).float() for output in outputs)
    assert gap(both, by_diffusers([(state(1), 1.0, False), (state(2), 1.0, True)])) < CLOSE
    assert gap(second, by_diffusers([(state(2), 1.0, True)])) < CLOSE
    assert gap(first, by_diffusers([(state(1), 1.0, False)])) < CLOSE


def test_a_module_with_a_scale_of_its_own_does_not_get_that_of_the_whole() -> None:
    whole = AdapterInfo("a", ("A b",), targets=("text_encoder", "unet"))
    both = AdapterInfo("b", targets=("transformer", "transformer_2"))
    ids, known = ("a", "b"), (whole, both)
    asked: Callable[..., Any] = lambda *entries: dict(  # noqa: E731
        check_lora(list(entries), ids, known)
    )

    text = {"id": "a", "target": "text_encoder", "scale": 0.5}
    for entries in ([{"id": "A b"}, text], [text, {"id": "a"}]):
        assert asked(*entries) == {"a@unet": 1.0, "a@text_encoder": 0.5}
    assert asked({"id": "a"}, {**text, "scale": 0}) == {"a@unet": 1.0}
    assert asked({"id": "a"}, text, {"id": "a@unet", "scale": 2}) == {
        "a@text_encoder": 0.5, "a@unet": 2.0,
    }  # fmt: skip
    assert asked({"id": "b"}, {"id": "b@transformer_2", "scale": 3}) == {
        "b@transformer": 1.0, "b@transformer_2": 3.0,
    }  # fmt: skip
    assert asked({"id": "a", "scale": 0.3}) == {"a": 0.3}


def test_a_target_that_is_no_expert_is_refused(tmp_path: Path) -> None:
    pair = (AdapterInfo("a", targets=("transformer", "transformer_2"), target="transformer_2"),)
    asked: Callable[[Any], Any] = lambda target: check_lora(  # noqa: E731
        [{"id": "a", "target": target}], ("a",), pair
    )

    assert asked(None) == asked("all") == asked("transformer_2") == (("a", 1.0),)
    assert asked("transformer") == (("a@transformer", 1.0),)
    for odd in ("vae", "", 2, ["transformer"], {"a": 1}):
        with pytest.raises(InvalidValue, match="must be one of all, transformer, transf"):
            asked(odd)
    with pytest.raises(InvalidValue, match="'a' twice"):
        check_lora([{"id": "a"}, {"id": "a", "target": "transformer_2"}], ("a",), pair)
    with driving("flux", lora=(f"x={adapter(tmp_path, 'flux', 1)}",)) as drive:
        with pytest.raises(InvalidValue, match="must be one of all, transformer"):
            drive.submit("a cat", lora=[{"id": "x", "target": "transformer_2"}])
        with pytest.raises(LoraRejected, match=r"has no 'transformer_2': adapters go to transf"):
            drive.engine.add_lora("y", f"{adapter(tmp_path, 'flux', 1)}@transformer_2")


async def test_a_target_is_said_over_http() -> None:
    experts = ("transformer", "transformer_2")
    infos = (
        AdapterInfo("h", ("My Style HIGH",), "transformer", experts, ("a part is left out",)),
        AdapterInfo("l", ("My Style LOW",), "transformer_2", experts),
        AdapterInfo("torn", ("My torn style",), problem="is not a readable file"),
    )
    worker = Grey()
    card = replace(CARD, lora=("h", "l"), adapters=infos)
    worker.ready = protocol.WorkerReady(card, {}, 0.0)
    names = ["My Style HIGH", "l"]
    pair = {"lora_nickname": names, "strength": [1, 0.5], "target": ["transformer", "all"]}
    key = {"authorization": "Bearer a-key"}

    async with open_app(worker, api_key=("a-key",)) as opened:

        async def ask(path: str, **sent: Any) -> Any:
            answer = await opened.http.post(path, json=sent, headers=key)
            return answer.status_code, answer.json()

        answers = [await ask("/v1/set_lora", **pair), await ask(ENDPOINT, prompt="a")]
        listed = (await opened.http.get("/v1/list_loras", headers=key)).json()
        others = ({"id": "l", "target": "transformer"}, {"id": "my_style_low"})
        answers += [await ask(ENDPOINT, prompt="a", lora=[lora]) for lora in others]
        wrong = await ask("/v1/set_lora", lora_nickname="h", target="vae")
        torn = await ask(ENDPOINT, prompt="a", lora=[{"id": "My torn style"}])

    assert [status for status, _ in answers] == [200] * 4
    assert [job.lora for job in worker.jobs] == [
        (("h", 1.0), ("l", 0.5)), (("l@transformer", 1.0),), (("l", 1.0),),
    ]  # fmt: skip
    loaded = [(one["nickname"], one["names"], one["target"]) for one in listed["loaded_adapters"]]
    assert loaded == [
        ("h", ["My Style HIGH"], "transformer"),
        ("l", ["My Style LOW"], "transformer_2"),
    ]
    assert listed["loaded_adapters"][0]["warnings"] == ["a part is left out"]
    [refused] = listed["refused_adapters"]
    assert (refused["nickname"], refused["problem"]) == ("torn", "is not a readable file")
    assert (wrong[0], wrong[1]["error"]["param"]) == (400, "target")
    assert torn[0] == 400
    assert "cannot be used: is not a readable file" in torn[1]["error"]["message"]


NAMED: dict[str, int | None] = {
    "wan2.2_lightning_high_noise_model": 0, "Wan2.2-I2V-A14B-4steps-lora-LowNoise": 1,
    "wan22-style-HIGH": 0, "WAN2.2_t2v_LOW_v1.1": 1, "LOW-style": 1, "instagirl_v2.3_low": 1,
    "detailz high v2": 0, "smooth_HN": 0, "Wan22_LN_000002000": 1, "low_poly_v2": None,
    "HighContrast": None, "slow": None, "FLOW": None, "yellow": None, "style": None,
    "high_low_mix": None, "high_noise_low_noise": None,
}  # fmt: skip


def test_files_of_wan_say_their_expert_in_their_names() -> None:
    assert {name: expert_of(name) for name in NAMED} == NAMED


def test_a_path_with_an_at_sign_is_a_path_where_it_is_one(tmp_path: Path) -> None:
    file = tmp_path / "me@home"
    file.write_text("x")

    assert split_target(str(file)) == (str(file), "")
    assert split_target(f"{file}@transformer_2") == (str(file), "transformer_2")
    assert split_target("a@b.safetensors") == ("a@b.safetensors", "")
    assert split_target("a.safetensors@transformer_2") == ("a.safetensors", "transformer_2")
