"""LoRA by request: who rides with which adapter is nobody else's business, in one forward.

What plain diffusers gives is asked of a pipeline of its own, with `load_lora_weights` and
`set_adapters`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn

import carpool
from carpool.engine.adapters.hooks import Adapters, NotByRow, is_even, plan
from carpool.engine.adapters.parts import Part
from carpool.engine.execute import WidthLimits, execute
from carpool.engine.fuse import Fuser
from carpool.engine.observe.timeline import Forward
from carpool.engine.specs import SPECS, STACK, Spec
from carpool.request.lora import AdapterScales
from support.engine_driver import CLOSE, Recorder, driving, for_inference, fresh, gap, served
from support.fake_models import call_on
from support.lora_files import adapter, dora, kohya, weights, write
from support.tiny import ARGUMENTS, checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",  # diffusers' Euler with numpy 2
    "ignore:Already found a `peft_config`:UserWarning",  # PEFT, of the second adapter
)

FAMILIES = ("flux", "sdxl")
DENOISER = {"flux": "transformer", "sdxl": "unet"}
CLEAR = 100 * CLOSE  # the least that an adapter must change a pixel
A: AdapterScales = (("a", 1.0),)
B: AdapterScales = (("b", 2.0),)

PASSENGERS: dict[str, tuple[int, list[dict[str, Any]] | None, int]] = {  # turn, adapters, steps
    "plain": (0, None, 5),
    "one": (0, [{"id": "one"}], 6),
    "two": (0, [{"id": "two", "scale": 0.5}], 4),
    "both": (2, [{"id": "two", "scale": -0.7}, {"id": "one", "scale": 1.3}], 5),
    "faint": (4, [{"id": "one", "scale": 0.3}], 3),
    "silent": (4, [{"id": "two", "scale": 0}], 3),
    "none": (5, [], 2),
}


class Judge:
    """Plain diffusers with adapters."""

    def __init__(self, family: str, files: Mapping[str, Path]) -> None:
        self.family, self.pipe = family, fresh(family)
        for name, file in files.items():
            self.pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
        for_inference(self.pipe)

    def draw(self, lora: Sequence[Mapping[str, Any]] | None, seed: int, steps: int) -> Tensor:
        if lora:
            self.pipe.enable_lora()
            names, scales = [one["id"] for one in lora], [one.get("scale", 1.0) for one in lora]
            self.pipe.set_adapters(names, scales)
        else:
            self.pipe.disable_lora()
        arguments = {**ARGUMENTS[self.family], "num_inference_steps": steps}
        chance = torch.Generator().manual_seed(seed)
        image = self.pipe("a cat", **arguments, generator=chance).images
        assert isinstance(image, Tensor)
        return image


@dataclass(frozen=True)
class Ride:
    judge: Judge
    heard: Mapping[str, Recorder]
    forwards: list[Forward]


@pytest.fixture(scope="module", params=FAMILIES)
def ride(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ride:
    family = str(request.param)
    folder = tmp_path_factory.mktemp(family)
    files = {"one": adapter(folder, family, 1), "two": adapter(folder, family, 2)}
    if family == "sdxl":
        files["two"] = write(files["two"], kohya(weights(family, 2), alpha=2.0))
    with driving(family, max_batch_size=16) as drive:
        for name, file in files.items():
            drive.engine.add_lora(name, file)
        heard = {}
        for turn in range(6):
            for i, (name, (arrives_at, lora, steps)) in enumerate(PASSENGERS.items()):
                if arrives_at == turn:
                    arguments = {**ARGUMENTS[family], "num_inference_steps": steps}
                    heard[name] = drive.submit("a cat", seed=i, lora=lora, **arguments)
            drive.turn()
        drive.finish()
        return Ride(Judge(family, files), heard, drive.forwards)


@pytest.mark.parametrize("name", PASSENGERS)
def test_each_gets_what_it_gets_alone_with_its_own_adapters(ride: Ride, name: str) -> None:
    _, lora, steps = PASSENGERS[name]
    seed = list(PASSENGERS).index(name)

    alone = ride.judge.draw(lora, seed, steps)

    assert gap(ride.heard[name].image, alone) < CLOSE
    if any(one.get("scale", 1.0) for one in lora or []):
        assert gap(alone, ride.judge.draw(None, seed, steps)) > CLEAR
        swapped = [{**one, "id": {"one": "two", "two": "one"}[one["id"]]} for one in lora or []]
        assert gap(alone, ride.judge.draw(swapped, seed, steps)) > CLEAR


def test_different_adapters_and_none_ride_in_one_forward(ride: Ride) -> None:
    family = ride.judge.family
    denoising = [f for f in ride.forwards if f.component == DENOISER[family]]
    encoding = [f for f in ride.forwards if f.phase == "encode"]

    assert any(f.adapters == 2 and f.requests >= 4 for f in denoising)
    assert any(f.adapters == 2 and f.requests >= 3 for f in encoding)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_an_adapter_of_a_text_encoder_alone_is_heard(part: str, tmp_path: Path) -> None:
    state = {n: w for n, w in weights("sdxl", 3).items() if n.startswith(f"{part}.")}
    file = write(tmp_path / "text.safetensors", state)
    asked = [[{"id": "text", "scale": 0.8}], None]

    with driving("sdxl") as drive:
        drive.engine.add_lora("text", file)
        heard = [drive.submit("a cat", lora=lora, **ARGUMENTS["sdxl"]) for lora in asked]
        drive.finish()

    judge = Judge("sdxl", {"text": file})
    alone = [judge.draw(lora, 0, 3) for lora in asked]
    for one, image in zip(heard, alone, strict=True):
        assert gap(one.image, image) < CLOSE
    assert gap(*alone) > CLEAR


def test_grouped_keeps_adapters_apart(tmp_path: Path) -> None:
    asked = [None, [{"id": "one"}], [{"id": "two"}], [{"id": "one"}], None]

    with driving("flux", lora_batching="grouped") as drive:
        for seed, name in enumerate(("one", "two")):
            drive.engine.add_lora(name, adapter(tmp_path, "flux", seed))
        heard = [drive.submit("a cat", lora=lora, **ARGUMENTS["flux"]) for lora in asked]
        drive.finish()

    assert sorted(drive.widths("transformer")) == [1] * 3 + [2] * 6
    assert max(forward.adapters for forward in drive.forwards) == 1
    assert gap(heard[1].image, heard[3].image) < CLOSE


def test_one_that_comes_in_the_middle_disturbs_nobody_and_is_there_for_the_next(
    tmp_path: Path,
) -> None:
    files = {name: adapter(tmp_path, "flux", seed) for seed, name in enumerate(("one", "new"))}
    judge, longer = Judge("flux", files), {**ARGUMENTS["flux"], "num_inference_steps": 8}

    with driving("flux") as drive:
        drive.engine.add_lora("one", files["one"])
        before = [drive.submit("a cat", lora=lora, **longer) for lora in LORAS]
        drive.turn(3)
        drive.engine.add_lora("new", files["new"])
        drive.turn()
        after = drive.submit("a cat", lora=[{"id": "new"}], **ARGUMENTS["flux"])
        drive.finish()

    for one, lora in zip(before, LORAS, strict=True):
        assert gap(one.image, judge.draw(lora, 0, 8)) < CLOSE
    assert gap(after.image, judge.draw([{"id": "new"}], 0, 3)) < CLOSE
    assert max(forward.adapters for forward in drive.forwards) == 2


LORAS: list[list[dict[str, Any]] | None] = [None, [{"id": "one", "scale": 0.6}]]


def test_adding_waits_for_no_forward(tmp_path: Path) -> None:
    file = adapter(tmp_path, "flux", 1)
    ended: list[bool] = []

    with driving("flux", isolation="shared") as drive:

        def add_meanwhile(*_: object) -> None:  # in the middle of the transformer's first forward
            thread = Thread(target=drive.engine.add_lora, args=[f"n{len(ended)}", file])
            thread.start()
            thread.join(50)
            ended.append(not thread.is_alive())

        inner = served("flux").transformer.transformer_blocks[0]
        hook = inner.register_forward_hook(add_meanwhile)
        drive.submit("a cat", **ARGUMENTS["flux"] | {"num_inference_steps": 1})
        drive.finish()
        hook.remove()

        assert ended == [True]
        assert drive.engine.loaded.card.lora == ("n0",)


def test_modules_are_afterwards_as_they_were(tmp_path: Path) -> None:
    def hooks() -> int:
        return sum(len(m._forward_hooks) for m in served("flux").transformer.modules())

    with driving("flux") as drive:
        drive.engine.add_lora("one", adapter(tmp_path, "flux", 1))
        assert hooks() == 0  # until somebody rides with it
        drive.submit("a cat", lora=[{"id": "one"}], **ARGUMENTS["flux"])
        drive.finish()
        assert hooks() > 0

    assert hooks() == 0


def test_a_loaded_engine_takes_adapters_at_start_and_later(tmp_path: Path) -> None:
    files = {name: adapter(tmp_path, "flux", seed) for seed, name in enumerate(("one", "two"))}
    judge = Judge("flux", files)
    arguments = {**ARGUMENTS["flux"], "seed": 3}

    with carpool.load(checkpoint("flux"), lora={"one": files["one"]}) as engine:
        assert engine.card.lora == ("one",)
        [first] = engine.generate("a cat", lora=[{"id": "one"}], **arguments)
        engine.add_lora("two", files["two"])
        asked = [carpool.Request("a cat", lora=[{"id": name}], seed=3) for name in ("one", "two")]
        outputs = engine.generate(asked, **ARGUMENTS["flux"])

    for output, name in zip([first, *outputs], ("one", "one", "two"), strict=True):
        assert gap(output.images, judge.draw([{"id": name}], 3, 3)) < CLOSE


# The rows


names = st.sampled_from(["a", "b", "c"])
scales = st.sampled_from([-1.5, 0.5, 1.0, 2.0])
passengers = st.tuples(st.dictionaries(names, scales, max_size=3), st.integers(1, 3))


def part(seed: int, takes: int = 3, gives: int = 5) -> Part:
    chance = torch.Generator().manual_seed(seed)
    down, up = nn.Linear(takes, 2, bias=False), nn.Linear(2, gives, bias=False)
    for layer in (down, up):
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape, generator=chance), False)
    return Part(down, up, 0.5 + seed, torch.float32)


@given(st.lists(passengers, min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_what_is_added_lands_on_the_right_rows(
    riders: list[tuple[dict[str, float], int]], entries: int, is_deep: bool
) -> None:
    parts = {name: part(seed) for seed, name in enumerate("ab")}  # none for c in this layer
    applied = tuple(tuple(lora.items()) for lora, _ in riders)
    rows = tuple(n for _, n in riders)
    x = torch.randn(sum(rows) * entries, *([4] if is_deep else []), 3)
    output = torch.randn(*x.shape[:-1], 5)
    wanted = output.clone()
    owner = [i for i, n in enumerate(rows) for _ in range(n * entries)]
    for at, i in enumerate(owner):
        for name, scale in applied[i]:
            if name in parts:
                one = parts[name]
                wanted[at] += one.up(one.down(x[at])) * scale * one.scaling

    with torch.no_grad():
        if (found := plan(applied, rows)) is not None:
            found.add(parts, x, output, True)

    assert (found is None) == (not any(applied))
    assert (output - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("applied", "rows", "is_exact", "runs"),
    [
        (((), A, A + B, B), (1, 2, 1, 2), False, [("a", 1, 4), ("b", 3, 6)]),
        ((A + B, B + A), (1, 2), False, [("a", 0, 1), ("b", 0, 1), ("b", 1, 3), ("a", 1, 3)]),
        ((A, A, ()), (1, 2, 1), True, [("a", 0, 1), ("a", 1, 3)]),  # each call is a run of its own
    ],
)
def test_runs_are_neighbours_with_the_same_adapters_in_the_same_order(
    applied: tuple[AdapterScales, ...], rows: tuple[int, ...], is_exact: bool, runs: list[Any]
) -> None:
    found = plan(applied, rows, is_exact=is_exact)

    assert found is not None
    assert [(run.name, run.begin, run.end) for run in found.runs] == runs


def test_adapters_of_all_kinds_have_the_same_bits_alone_and_together(tmp_path: Path) -> None:
    lengths = dora(weights("flux", 2, std=0.1), "flux", "transformer")
    files = {"a": adapter(tmp_path, "flux", 1), "b": write(tmp_path / "b.safetensors", lengths)}
    chosen = ["a", "a", "", "b", "ab", "ba"]
    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 10}

    def images(together: bool) -> list[Tensor]:
        with driving("flux", numerics="exact", max_batch_size=16, lora=settings) as drive:
            heard = []
            for seed, names in enumerate(chosen):
                lora = [{"id": name} for name in names]
                heard.append(drive.submit("a cat", seed=seed, lora=lora, **arguments))
                if not together:
                    drive.finish()
            drive.finish()
            assert drive.widest("transformer") == (len(chosen) if together else 1)
            return [one.image for one in heard]

    settings = tuple(f"{name}={file}" for name, file in files.items())
    assert all(map(torch.equal, images(together=True), images(together=False)))


@pytest.mark.parametrize(("entries", "is_even_"), [(1, True), (5, True), (4, False)])
def test_an_input_that_cannot_be_told_apart_by_rows_is_refused(
    entries: int, is_even_: bool
) -> None:
    found = plan(((("a", 1.0),), ()), (1, 1))
    assert found is not None

    with pytest.raises(NotByRow, match="for 2 rows"):
        found.add({"a": part(0)}, torch.ones(entries, 3), torch.ones(entries, 5), is_even_)


class Summary(nn.Module):
    """Runs a layer once for the whole batch, on what all rows have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).requires_grad_(False)
        self.widths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.widths.append(len(x))
        said: Tensor = self.layer(torch.ones(1, 3))
        return x + said


def test_calls_that_cannot_be_told_apart_run_apart_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pipe:
        model = Summary()

    monkeypatch.setitem(SPECS, ("Summary", "forward"), Spec(rows="x", rules={"x": STACK}))
    adapters, fuser, model = Adapters(Pipe(), torch.device("cpu")), Fuser(), Pipe.model
    mine = part(1, gives=3)
    adapters._arrived.append(("a", {("model", "layer"): mine}))
    applied: list[AdapterScales] = [(), (), (("a", 1.0),), (("a", 2.0),)]
    calls = [replace(call_on(model, torch.zeros(1, 3)), lora=lora) for lora in applied]

    def run(ready: Sequence[Any]) -> list[Any]:
        some, rows = [one.call for one in ready], [one.rows for one in ready]
        with adapters.applied(some, rows):
            return fuser.run(some, rows)

    with torch.no_grad():
        answers = execute(
            [SimpleNamespace(call=c, key="key", rows=1) for c in calls],
            run,
            WidthLimits(),
            lambda: None,
        )
        base = model.layer(torch.ones(1, 3))
        delta = mine.up(mine.down(torch.ones(1, 3))) * mine.scaling

    for answer, factor in zip(answers, (0, 0, 1, 2), strict=True):
        assert (answer - base - factor * delta).abs().max() < 1e-5
    assert model.widths == [4, 2, 2, 1, 1]
    adapters.remove()


def test_lists_and_tensors_of_unequal_entries_are_uneven() -> None:
    class Lists(nn.Module):
        def forward(self, x: list[Tensor], y: Tensor | None = None) -> None: ...

    def call(size: int, patches: int) -> Any:
        return call_on(Lists(), [torch.zeros(size)], y=torch.zeros(patches, 2))

    assert is_even([call(3, 4), call(3, 4)], [1, 1])
    assert is_even([call(3, 4), call(3, 8)], [1, 2])
    assert not is_even([call(3, 4), call(4, 4)], [1, 1])
    assert not is_even([call(3, 4), call(3, 5)], [1, 1])


def test_adapters_are_heard_by_compiled_blocks(tmp_path: Path) -> None:
    file = adapter(tmp_path, "flux", 1)
    pipe = fresh("flux")
    for block in pipe.transformer.transformer_blocks:
        block.compile(backend="eager")
    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 2}
    rides: list[dict[str, Any]] = [{}, {"lora": [{"id": "one"}]}, {}]
    images = []
    for one in (pipe, fresh("flux")):
        with driving(one, lora=(f"one={file}",)) as drive:
            heard = []
            for ride in rides:  # at one width, so that nothing is compiled anew
                heard.append(drive.submit(**arguments, **ride))
                drive.finish()
            images.append([recorder.image for recorder in heard])

    for compiled, plain in zip(*images, strict=True):
        assert gap(compiled, plain) < CLOSE
    assert gap(images[0][0], images[0][1]) > CLEAR
