"""Record the batches of the peers' own schedulers, as data for tests without the peers.

    python -m proof.record_peers --sglang FOLDER --vllm-omni FOLDER

The folders hold the unpacked wheels, which are not installed: the schedulers' files are imported
unchanged, with stand-ins for all other imports. Clocks are virtual. A trace has the settings, the
requests with their arrivals, and the batches: time, requests, and the limit that closed each.
`tests/schedule/peers/test_recorded_traces.py` replays them through Carpool's policies.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import sys
import tempfile
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

TRACES = 200
FOLDER = Path("tests/schedule/peers/recorded")
REAL = {
    "sglang.multimodal_gen.configs.sample.sampling_params",
    "sglang.multimodal_gen.configs.task_type",
    "sglang.multimodal_gen.configs.pipeline_configs.base",
    "sglang.multimodal_gen.runtime.managers.dynamic_batch_admission",
    "sglang.multimodal_gen.runtime.managers.scheduler",
    "sglang.multimodal_gen.runtime.pipelines_core.schedule_batch",
    "vllm_omni.diffusion.diffusion_engine",
    "vllm_omni.diffusion.request",
    "vllm_omni.diffusion.sched.base_scheduler",
    "vllm_omni.diffusion.sched.interface",
    "vllm_omni.diffusion.sched.request_scheduler",
    "vllm_omni.inputs.data",
}
ABSENT = {"einops", "imageio", "sglang", "vllm", "vllm_omni", "zmq"}  # packages
OUTPUT_S = 0.25  # duration of a batch for each output


class StandIn(types.ModuleType):
    """A module where every name exists: capitalised names are classes, other names mocks."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fake: Any = MagicMock(name=name)
        if name[0].isupper():
            inherited = {
                "__class_getitem__": classmethod(lambda cls, _: cls),
                "__init_subclass__": classmethod(lambda cls, **_: None),
                "__init__": lambda self, *_, **__: None,
            }
            fake = type(name, (), inherited)
        setattr(self, name, fake)
        return fake


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the peers' scheduler files, and stand-ins for their other modules."""

    def __init__(
        self,
        folders: Sequence[Path],
        real: Collection[str] = REAL,
        absent: Collection[str] = ABSENT,
    ) -> None:
        self._folders, self._real, self._absent = folders, real, absent

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._absent:
            return None
        if name in self._real:
            file = f"{name.replace('.', '/')}.py"
            folder = next(folder / file for folder in self._folders if (folder / file).exists())
            return importlib.util.spec_from_file_location(name, folder)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class VirtualTime:
    """A manual clock that delivers the arrivals it passes."""

    def __init__(self, requests: Sequence[dict[str, Any]], arrive: Callable[[int], None]) -> None:
        self.now_s = 0.0
        self._arrive, self._due = arrive, deque(enumerate(request["at_s"] for request in requests))

    def move(self, to_s: float) -> None:
        self.now_s = max(self.now_s, to_s)
        while self._due and self._due[0][1] <= self.now_s + 1e-9:
            self._arrive(self._due.popleft()[0])

    @property
    def next_s(self) -> float | None:
        return self._due[0][1] if self._due else None


def arrivals(rng: random.Random, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests in bursts and single, on a grid of 10 ms."""
    at, entries = 0.0, []
    gap_s = rng.choice((0.02, 0.1, 0.5))
    for _ in range(rng.randint(4, 16)):
        if rng.random() < 0.5:
            at += round(rng.expovariate(1 / gap_s), 2)
        entries.append({"at_s": round(at, 2), **make()})
    return entries


# SGLang-Diffusion


def sglang_trace(rng: random.Random, scheduler: Any, folder: Path) -> dict[str, Any]:
    """One trace of `Scheduler.get_next_batch_to_run`, driven like its event loop."""
    sizes, steps = rng.sample([512, 768, 1024], rng.randint(1, 3)), rng.choice([(8,), (8, 20)])
    guidances, negatives = rng.choice([(3.5,), (3.5, 5.0)]), rng.choice([("",), ("", "bad")])
    outputs = rng.choice([(1,), (1, 1, 2), (1, 2, 3, 6)])

    def one() -> dict[str, Any]:
        arguments = {
            "width": rng.choice(sizes),
            "height": rng.choice(sizes),
            "num_inference_steps": rng.choice(steps),
            "guidance_scale": rng.choice(guidances),
            "negative_prompt": rng.choice(negatives),
        }
        if rng.random() < 0.05:
            arguments["image"] = True
        return {"arguments": arguments, "n": rng.choice(outputs)}

    requests = arrivals(rng, one)
    flags = {"batching_max_size": rng.choice([1, 2, 4, 8, 16]),
             "batching_delay_ms": rng.choice([0, 5, 50, 200, 1000])}  # fmt: skip
    rules: list[dict[str, Any]] | None = None
    if rng.random() < 0.5:
        size = rng.choice(sizes)
        rules = [{"model_contains": "tiny", "max_batch_size": rng.choice([2, 3, 6]),
                  "resolution": rng.choice(["*", f"{size}x{size}"])}]  # fmt: skip
        if rng.random() < 0.5:
            rules[0]["max_cost"] = rng.choice([10_000, 20_000, 60_000])
    requests_made = [_sglang_request(scheduler, request) for request in requests]
    core = _sglang_core(scheduler, flags, rules, folder)
    read: list[int] = []  # arrived, but not yet read by the loop
    time = VirtualTime(requests, read.append)
    batches: list[dict[str, Any]] = []
    stamps = [0.0] * len(requests)
    scheduler.time.monotonic = lambda: time.now_s
    core._record_batch_dispatch_metrics = lambda **values: batches.append({"said": values})
    time.move(0.0)
    while sum(len(entry["members"]) for entry in batches) < len(requests):
        for index in read:
            stamps[index] = time.now_s
            core.waiting_queue.append((None, requests_made[index], time.now_s))
        read.clear()
        if items := core.get_next_batch_to_run():
            batch, members = batches[-1], [requests_made.index(req) for _, req in items]
            values = batch.pop("said")
            batch |= {"at_s": round(time.now_s, 4), "members": members}
            batch |= {"stop_reason": values["stop_reason"], "outputs": values["output_count"]}
            batch |= {"cap": values["effective_max_output_count"]}
            time.move(time.now_s + OUTPUT_S * values["output_count"])
            continue
        oldest_s = core.waiting_queue[0][2] if core.waiting_queue else None
        leaves = None if oldest_s is None else oldest_s + core._batching_delay_s
        then = min(moment for moment in (leaves, time.next_s) if moment is not None)
        time.move(max(then, time.now_s + 1e-6))  # one more turn of its loop
    for request, stamp in zip(requests, stamps, strict=True):
        request["at_s"] = round(stamp, 4)  # its loop's read time, where its delay begins
    return {**flags, "rules": rules, "requests": requests, "batches": batches}


def _sglang_request(scheduler: Any, request: dict[str, Any]) -> Any:
    arguments = dict(request["arguments"])
    image = arguments.pop("image", None)
    params = scheduler.SamplingParams(
        prompt="a cat", num_outputs_per_prompt=request["n"], num_frames=1, **arguments
    )
    req = scheduler.Req(sampling_params=params)
    if image:
        req.image_path = "a.png"
    return req


def _sglang_core(
    scheduler: Any, flags: dict[str, int], rules: list[dict[str, Any]] | None, folder: Path
) -> Any:
    path = None
    if rules:
        path = folder / "rules.json"
        path.write_text(json.dumps(rules))
    architecture = SimpleNamespace(vae_scale_factor=8)
    pipeline = SimpleNamespace(vae_config=SimpleNamespace(arch_config=architecture))
    pipeline.estimate_request_cost = scheduler.estimate.__get__(pipeline)
    for name in ("supports_dynamic_batching", "supports_dynamic_batching_for_request"):
        setattr(pipeline, name, lambda *_: True)
    for name in ("supports_sequential_dit_inference", "supports_batching_image_conditioning",
                 "supports_sequential_multi_output_inference"):  # fmt: skip
        setattr(pipeline, name, lambda: False)
    args = SimpleNamespace(
        batching_mode="dynamic", batching_max_size=flags["batching_max_size"],
        model_path="tiny", has_layerwise_offload_components=lambda: False,
        batching_config=path, pipeline_config=pipeline,
    )  # fmt: skip
    core = object.__new__(scheduler.Scheduler)
    core.server_args, core.metrics, core._batch_metrics_enabled = args, None, True
    core._batch_admission = scheduler.BatchAdmissionController(args, 0)
    core._batching_max_size = max(1, flags["batching_max_size"])
    core._batching_delay_s = flags["batching_delay_ms"] / 1000.0
    core.waiting_queue = deque()
    core._pi05_segments_enabled = lambda: False
    return core


# vLLM-Omni


def omni_trace(rng: random.Random, omni: Any) -> dict[str, Any]:
    """One trace of `RequestScheduler` and of `DiffusionEngine`'s wait before a wave."""
    sizes, steps = rng.sample([512, 768, 1024], rng.randint(1, 2)), rng.choice([(8,), (8, 20)])
    guidances = rng.choice([(None,), (1.0, 4.0), (4.0, 5.0)])
    negatives = rng.choice([(None,), (None, "", "bad"), ("bad", "worse")])
    outputs, adapters = rng.choice([(1,), (1, 1, 2)]), rng.choice([(None,), (None, "a", "b")])

    def one() -> dict[str, Any]:
        size = rng.choice(sizes)
        arguments = {
            "width": size,
            "height": size,
            "num_inference_steps": rng.choice(steps),
            "guidance_scale": rng.choice(guidances),
            "negative_prompt": rng.choice(negatives),
        }
        return {"arguments": arguments, "n": rng.choice(outputs), "lora": rng.choice(adapters)}

    requests = arrivals(rng, one)
    flags = {"max_num_seqs": rng.choice([1, 2, 4, 8]),
             "request_batch_max_wait_ms": rng.choice([0, 20, 100, 400])}  # fmt: skip
    scheduler = object.__new__(omni.scheduler.RequestScheduler)
    omni.scheduler.RequestScheduler.__init__(scheduler)
    scheduler.od_config = SimpleNamespace(**flags)
    scheduler.max_num_running_reqs = flags["max_num_seqs"]
    time = VirtualTime(
        requests, lambda index: scheduler.add_request(_omni_request(omni, requests[index], index))
    )

    def wait(timeout: float) -> None:
        woken_s = time.now_s + max(timeout, 1e-4)
        time.move(woken_s if time.next_s is None else min(woken_s, time.next_s))

    engine = SimpleNamespace(
        scheduler=scheduler, dp_concurrent=False, _scheduling_paused=False,
        stop_event=SimpleNamespace(is_set=lambda: False), _cv=SimpleNamespace(wait=wait),
    )  # fmt: skip
    omni.engine.time.monotonic = lambda: time.now_s
    batches: list[dict[str, Any]] = []
    time.move(0.0)
    while sum(len(entry["members"]) for entry in batches) < len(requests):
        if not scheduler.num_waiting_requests():
            assert time.next_s is not None
            time.move(time.next_s)
            continue
        omni.engine.DiffusionEngine._wait_for_admission_if_needed_locked(engine)
        scheduled = [entry.request_id for entry in scheduler.schedule().scheduled_new_reqs]
        members = [int(number) for number in scheduled]
        batches.append({"at_s": round(time.now_s, 4), "members": members})
        time.move(time.now_s + OUTPUT_S * sum(requests[index]["n"] for index in members))
        finished = omni.interface.DiffusionRequestStatus.FINISHED_COMPLETED
        scheduler._finish_requests(dict.fromkeys(scheduled, finished))
    return {**flags, "requests": requests, "batches": batches}


def _omni_request(omni: Any, request: dict[str, Any], index: int) -> Any:
    arguments = {name: value for name, value in request["arguments"].items() if value is not None}
    negative = arguments.pop("negative_prompt", None)
    prompt = {"prompt": "a cat"} | ({} if negative is None else {"negative_prompt": negative})
    params = omni.inputs.OmniDiffusionSamplingParams(
        seed=index, num_outputs_per_prompt=request["n"], **arguments
    )
    if request["lora"]:
        number = 1 + ord(request["lora"]) - ord("a")
        params.lora_request, params.lora_scale = SimpleNamespace(lora_int_id=number), 1.0
    return omni.request.OmniDiffusionRequest(
        prompt=prompt, sampling_params=params, request_id=str(index)
    )


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """In the block, imports of a peer resolve to its own files and stand-ins."""
    importer = Importer([folder])
    with patch.object(sys, "meta_path", [importer, *sys.meta_path]):
        yield


def record_sglang(folder: Path) -> list[dict[str, Any]]:
    with imported(folder):
        base = "sglang.multimodal_gen"
        scheduler: Any = importlib.import_module(f"{base}.runtime.managers.scheduler")
        batch = importlib.import_module(f"{base}.runtime.pipelines_core.schedule_batch")
        params = importlib.import_module(f"{base}.configs.sample.sampling_params")
        config = importlib.import_module(f"{base}.configs.pipeline_configs.base")
    params.RLRolloutArgs.validate_sampling_params = staticmethod(lambda _: None)
    scheduler.Req, scheduler.SamplingParams = batch.Req, params.SamplingParams
    scheduler.estimate = config.PipelineConfig.estimate_request_cost
    scheduler.BatchAdmissionController._get_device_memory_gb = staticmethod(lambda _: None)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        return [sglang_trace(rng, scheduler, Path(place)) for _ in range(TRACES)]


def record_omni(folder: Path) -> list[dict[str, Any]]:
    with imported(folder):
        base = "vllm_omni.diffusion"
        omni = SimpleNamespace(
            scheduler=importlib.import_module(f"{base}.sched.request_scheduler"),
            interface=importlib.import_module(f"{base}.sched.interface"),
            engine=importlib.import_module(f"{base}.diffusion_engine"),
            request=importlib.import_module(f"{base}.request"),
            inputs=importlib.import_module("vllm_omni.inputs.data"),
        )
    rng = random.Random(0)
    return [omni_trace(rng, omni) for _ in range(TRACES)]


def version_in(folder: Path) -> str:
    """The version of the wheel unpacked there."""
    return next(folder.glob("*.dist-info")).name.split("-")[1].removesuffix(".dist")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--vllm-omni", type=Path, required=True)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, folder, record in (("sglang", options.sglang, record_sglang),
                                 ("vllm_omni", options.vllm_omni, record_omni)):  # fmt: skip
        traces = ",\n".join(json.dumps(trace, separators=(",", ":")) for trace in record(folder))
        text = f'{{"version":"{version_in(folder)}","traces":[\n{traces}\n]}}\n'
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
