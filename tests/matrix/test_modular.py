"""Modular pipelines: put together from blocks, by diffusers and by their users."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ComponentsManager, FluxModularPipeline, SequentialPipelineBlocks
from diffusers.guiders import ClassifierFreeGuidance, SkipLayerGuidance
from diffusers.modular_pipelines import InputParam, ModularPipelineBlocks, PipelineState

import carpool
from carpool.engine.journal import Answered, Journal
from carpool.errors import LoadFailed, Rejected
from carpool.request.parameters import check
from carpool.types import Request
from support import torchvision_cpu
from support.engine_driver import CLOSE, Drive, Recorder, driving, gap
from support.isolation import differences, state_of
from support.matrix.case import IMAGE, VIDEO
from support.modular import CLASSES, arguments, asked, modular, plain
from support.newcomers import MASK, PICTURE
from support.tiny.newest import NEEDS_TORCHVISION

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning"),
    pytest.mark.timeout(300),  # some of the slow ones
]

FAST = {"FluxModularPipeline", "Flux2KleinBaseModularPipeline"}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a cat", "num_inference_steps": 5},
    {"prompt": "a dog", "num_inference_steps": 7},
    {"prompt": "a red cat by the sea", "num_inference_steps": 6},
    {"prompt": "the sea", "num_inference_steps": 4},
)
ONE_SEQUENCE = ("Cosmos3OmniModular", "MiniMaxH3Modular", "Cosmos3DistilledModular")
WITHOUT = set() if torchvision_cpu.IS_THERE else NEEDS_TORCHVISION
NAMES = [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
    for name, (family, _) in CLASSES.items()
    if family not in WITHOUT
]


def result(recorder: Recorder) -> torch.Tensor:
    if recorder.error is not None:
        raise recorder.error
    fields = recorder.outcome.fields
    value = next(fields[name] for name in ("images", "frames", "audios") if name in fields)
    return torch.as_tensor(value[0] if isinstance(value, list) else value)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("name", NAMES)
def test_mixed_requests_get_what_each_gets_alone_and_the_pipeline_comes_back(
    name: str, numerics: str
) -> None:
    pipe, before = modular(name), state_of(modular(name))
    base, requests = arguments(pipe), asked(pipe, REQUESTS)

    with driving(pipe, numerics=numerics) as drive:
        cancelled = drive.submit(**requests[1], seed=90, request_id="cancelled")
        heard = [drive.submit(**one, seed=at) for at, one in enumerate(requests)]
        failing = None
        if "latents" in pipe.blocks.input_names:
            failing = drive.submit("x", **{**base, "latents": torch.ones(1, 1)}, seed=91)
        is_counted = hasattr(pipe, "scheduler")  # else its steps are not
        drive.turn_until(
            lambda: cancelled.step >= 1 or (not is_counted and len(drive.forwards) > 9)
        )
        drive.engine.cancel("cancelled")
        drive.finish()
        denoisers = [name for name in ("transformer", "unet") if hasattr(pipe, name)]
        width = max(drive.widest(name) for name in denoisers)
        is_apart = numerics == "exact"  # its first forwards
        assert width > 1 or is_apart or name.removesuffix("Pipeline") in ONE_SEQUENCE

    assert cancelled.error is not None
    assert failing is None or failing.error is not None or "Helios" in name  # which makes its own
    for at, (one, recorder) in enumerate(zip(requests, heard, strict=True)):
        fields = recorder.outcome.fields
        # a fresh one each: Helios' scheduler keeps what makes its next call fail
        off = gap(result(recorder), plain(modular(name), seed=at, **one))
        assert off <= (0.0 if numerics == "exact" else VIDEO if "frames" in fields else IMAGE)
    assert differences(before, state_of(pipe)) == []


def test_each_workflow_is_a_task_and_all_of_them_share_forwards() -> None:
    pipe, judge = modular("FluxModularPipeline"), modular("FluxModularPipeline")
    base = {**arguments(pipe), "num_inference_steps": 8}
    changed = {**base, "image": PICTURE, "strength": 0.8}

    with driving(pipe, numerics="exact") as drive:
        tasks = [task.name for task in drive.engine.loaded.card.tasks]
        drawn, edited = drive.submit("a cat", **base), drive.submit("a dog", **changed, seed=1)
        drive.finish()
        assert drive.widest("transformer") == 2

    assert tasks == ["text-to-image", "image-to-image"]
    assert gap(result(drawn), plain(judge, seed=0, prompt="a cat", **base)) == 0
    assert gap(result(edited), plain(judge, seed=1, prompt="a dog", **changed)) == 0


@pytest.mark.slow
def test_pictures_and_masks_choose_the_workflow() -> None:
    name = "StableDiffusionXLModularPipeline"
    pipe, judge = modular(name), modular(name)
    base = {**arguments(pipe), "num_inference_steps": 4, "prompt": "a cat"}
    filled = {**base, "image": PICTURE, "mask_image": MASK, "strength": 0.9}

    with driving(pipe, numerics="exact") as drive:
        tasks = [task.name for task in drive.engine.loaded.card.tasks]
        one, other = drive.submit(**base), drive.submit(**filled, seed=1)
        drive.finish()

    assert tasks == ["text-to-image", "image-to-image", "inpaint"]
    assert gap(result(one), plain(judge, seed=0, **base)) == 0
    assert gap(result(other), plain(judge, seed=1, **filled)) == 0


def test_guidance_that_no_block_takes_is_set_on_the_guider_of_that_request_only() -> None:
    name = "Flux2KleinBaseModularPipeline"
    pipe = modular(name)
    base = {**arguments(pipe), "num_inference_steps": 3, "prompt": "a cat"}

    with driving(pipe, numerics="exact") as drive:
        heard = {scale: drive.submit(**base, guidance_scale=scale) for scale in (1.0, 2.0, 6.5)}
        usual, unsaid = drive.submit(**base), drive.submit(**base, guidance_scale=None)
        drive.finish()

    assert gap(result(unsaid), result(usual)) == 0
    for scale, recorder in heard.items():
        judge = modular(name, guider=ClassifierFreeGuidance(guidance_scale=scale))
        assert recorder.outcome.warnings == ()
        assert gap(result(recorder), plain(judge, seed=0, **base)) == 0
    assert gap(result(usual), plain(modular(name), seed=0, **base)) == 0
    assert pipe.guider.guidance_scale == 4.0


def test_a_guider_that_hooks_the_denoiser_runs_alone_and_leaves_nothing_behind() -> None:
    name = "StableDiffusionXLModularPipeline"

    def hooked() -> Any:
        guider = SkipLayerGuidance(
            skip_layer_config=[
                {"indices": [0], "fqn": "mid_block.attentions.0.transformer_blocks"}
            ],
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        )
        return modular(name, guider=guider)

    pipe, judge = hooked(), hooked()
    base = {**arguments(pipe), "prompt": "a cat"}
    base.pop("num_inference_steps", None)
    steps = (3, 4, 2)

    with driving(pipe, numerics="exact") as drive:
        heard = [drive.submit(**base, num_inference_steps=n, seed=at) for at, n in enumerate(steps)]
        drive.finish()

    for at, (n, recorder) in enumerate(zip(steps, heard, strict=True)):
        alone = plain(judge, seed=at, **base, num_inference_steps=n)
        assert gap(result(recorder), alone) == 0
    usual = modular(name)
    plainly = {**base, "num_inference_steps": 3}
    left = modular(name)
    left.update_components(unet=pipe.unet)
    assert gap(plain(left, seed=0, **plainly), plain(usual, seed=0, **plainly)) == 0


def test_blocks_that_a_user_put_together_run_and_give_what_the_last_one_makes() -> None:
    pipe, judge = modular("FluxModularPipeline"), modular("FluxModularPipeline")
    for one in (pipe, judge):
        drawing = one.blocks.get_workflow("text2image").sub_blocks
        kept = {name: block for name, block in drawing.items() if "decode" not in name}
        one._blocks = SequentialPipelineBlocks.from_blocks_dict(kept)
    base = {n: v for n, v in arguments(judge).items() if n in judge.blocks.input_names}
    base.pop("num_inference_steps", None)

    with driving(pipe, numerics="exact") as drive:
        heard = [drive.submit("a cat", **base, num_inference_steps=n, seed=n) for n in (2, 3)]
        named = drive.submit("a cat", **base, num_inference_steps=2, seed=2, output="latents")
        drive.finish()

    for n, recorder in zip((2, 3), heard, strict=True):
        generator = torch.Generator().manual_seed(n)
        given = {**base, "num_inference_steps": n, "prompt": "a cat", "generator": generator}
        assert gap(recorder.outcome.fields["latents"], judge(**given, output="latents")) == 0
    assert gap(named.outcome.fields["latents"], heard[0].outcome.fields["latents"]) == 0


def test_a_journal_takes_a_request_to_another_engine_unless_its_blocks_are_others() -> None:
    name, kept, done = "Flux2KleinBaseModularPipeline", list[Answered](), []
    request = Request("a cat", **{**arguments(modular(name)), "num_inference_steps": 4}, seed=1)

    def play(drive: Drive, journal: Journal, until: int = 4) -> Recorder:
        recorder = Recorder()
        drive.engine.submit(check(drive.engine.loaded.card, request), recorder, 0.0, journal)
        drive.turn_until(lambda: recorder.is_done or recorder.step >= until)
        return recorder

    with driving(modular(name), numerics="exact") as drive:
        play(drive, Journal([], kept.append), until=2)
        entries = [one.entry() for one in kept]
        drive.finish()
        whole = len(drive.forwards)
    for is_other in (False, True):
        pipe = modular(name)
        if is_other:
            pipe._blocks = SequentialPipelineBlocks.from_blocks_dict(dict(pipe._blocks.sub_blocks))
        with driving(pipe, numerics="exact") as drive:
            done.append(play(drive, Journal(entries, None)))
            drive.finish()
            assert (len(drive.forwards) == whole) is is_other
    assert gap(result(done[0]), plain(modular(name), seed=1, **{
        "prompt": "a cat", **arguments(modular(name)), "num_inference_steps": 4})) == 0  # fmt: skip


class Hat(ModularPipelineBlocks):  # type: ignore[misc]
    """A user's own: it writes on the denoiser that all requests share."""

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name="hat", default=0.0)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        if state.get("hat"):
            components.transformer.proj_out.weight.data.mul_(1.0 + state.get("hat"))
        return components, state


def test_a_block_of_the_users_own_that_writes_on_the_denoiser_does_so_for_its_request_only() -> (
    None
):
    def hatted() -> Any:
        pipe = modular("FluxModularPipeline")
        blocks = dict(pipe.blocks.get_workflow("text2image").sub_blocks)
        pipe._blocks = SequentialPipelineBlocks.from_blocks_dict({"hat": Hat(), **blocks})
        return pipe

    pipe = hatted()
    base = {**arguments(pipe), "prompt": "a cat"}
    with driving(pipe, numerics="exact") as drive:
        heard = [drive.submit(**{**base, "hat": hat}, seed=1) for hat in (0.0, 0.5, 0.0)]
        drive.finish()

    for hat, recorder in zip((0.0, 0.5, 0.0), heard, strict=True):
        assert gap(result(recorder), plain(hatted(), seed=1, **base, hat=hat)) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved") / "klein"
    modular("Flux2KleinBaseModularPipeline").save_pretrained(str(where))
    return where


def test_a_saved_one_is_loaded_by_its_folder_also_where_it_was_moved(
    folder: Path, tmp_path: Path
) -> None:
    moved = folder.rename(tmp_path / "moved")
    try:
        judge = modular("Flux2KleinBaseModularPipeline")
        base = {**arguments(judge), "num_inference_steps": 2, "prompt": "a cat"}
        with carpool.load(moved, device="cpu", numerics="exact") as engine:
            [output] = engine.generate([carpool.Request(**base, seed=5)])
            with pytest.raises(Rejected, match="has no parameter 'stepz'"):
                engine.generate("a cat", stepz=3)
    finally:
        moved.rename(folder)

    assert engine.card.id == "moved"
    assert gap(output.images, plain(judge, seed=5, **base)) <= CLOSE


def test_a_part_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "modular_model_index.json").read_text())
    for entry in index.values():
        if isinstance(entry, list):
            entry[2]["pretrained_model_name_or_path"] = str(tmp_path / "elsewhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "modular_model_index.json").write_text(json.dumps(index))

    with pytest.raises(LoadFailed, match="elsewhere"):
        carpool.load(broken, device="cpu")


def test_blocks_that_are_code_of_the_repository_are_not_run(folder: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    index = json.loads((folder / "modular_model_index.json").read_text())
    (code / "modular_model_index.json").write_text(json.dumps(index))
    config = {"_class_name": "Mine", "auto_map": {"ModularPipelineBlocks": "blocks.Mine"}}
    (code / "modular_config.json").write_text(json.dumps(config))
    (code / "blocks.py").write_text("raise SystemExit('run')\n")

    with pytest.raises(LoadFailed, match=r"--pipeline"):
        carpool.load(code, device="cpu")


def test_a_pipeline_whose_components_were_not_loaded_is_refused() -> None:
    with pytest.raises(LoadFailed, match=r"call its load_components\(\) first"):
        carpool.load(FluxModularPipeline(), device="cpu")


def test_offloading_behind_our_back_is_refused() -> None:
    pipe = modular("FluxModularPipeline")
    pipe._components_manager = ComponentsManager()
    pipe._components_manager._auto_offload_enabled = True

    with pytest.raises(LoadFailed, match="offload"):
        carpool.load(pipe)
