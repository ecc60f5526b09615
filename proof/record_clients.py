"""Run the peers' own load clients against this server, and record their requests.

    python -m proof.record_clients --sglang FOLDER --vllm-omni FOLDER

The folders hold the unpacked wheels; only aiohttp is installed. The clients' files are imported
unchanged, with stand-ins for all other imports. The server runs on a loopback port with a fake
worker. `tests/server/compat/test_peer_clients.py` replays the
records.
"""

import argparse
import asyncio
import base64
import importlib
import io
import json
import sys
import tempfile
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from PIL import Image

from carpool.config import EngineSettings, ServeSettings
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import unpacked
from carpool.request.card import Card, Parameter, Task
from carpool.server.app import create_app
from carpool.server.routes.jobs import write_images
from carpool.server.routes.videos import write_video
from carpool.types import CheckedRequest, Timings
from carpool.worker.protocol import Done, Picture, RawVideo, TokenUsage, WorkerReady
from carpool.worker.supervisor import Supervisor
from proof.record_peers import Importer

FILE = Path("tests/server/compat/recorded/peer_clients.json")
SG = "sglang.multimodal_gen.benchmarks"
REAL = {f"{SG}.bench_serving", f"{SG}.datasets", "sglang.srt.utils.network"}
REAL |= {"vllm_omni.benchmarks.patch.patch", "vllm_omni.metrics.definitions"}
REAL |= {"vllm_omni.metrics.utils"}
HEADERS = ("content-type", "authorization", "accept")
PEERS = {"sglang", "vllm", "vllm_omni", "datasets", "transformers", "prettytable"}


def card(makes: str) -> Card:
    """The card of a model that makes pictures or videos from a text or a picture."""
    sizes = {"width": 64, "height": 64, "num_inference_steps": 4}
    sizes |= {"num_frames": 5} if makes == "video" else {}
    parameters = [Parameter("prompt", "str"), Parameter("guidance_scale", "float", default=3.5)]
    parameters += [Parameter(name, "int", default=value) for name, value in sizes.items()]
    extra = [Parameter("image", "other"), Parameter("strength", "float", default=0.6)]
    tasks = (
        Task(f"text-to-{makes}", "GreyPipeline", tuple(parameters)),
        Task(f"image-to-{makes}", "GreyFromImage", tuple(parameters + extra)),
    )
    return Card("grey", tasks, {}, 16, None, 1 << 20, 100)


class Grey(Supervisor):
    """A fake worker that makes grey pictures or videos at once."""

    def __init__(self, makes: str) -> None:
        super().__init__("none", EngineSettings())
        self.ready, self._state = WorkerReady(card(makes), {}, 0.0), "ready"
        self._makes = makes

    async def statistics(self) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 1 << 30}}

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> Done:
        grey = b"\x80" * 3 * 16 * 16
        message = Done(request.request_id, request.seed, [], Timings(), TokenUsage(1, 1))
        if self._makes == "image":
            message.pictures = [Picture(16, 16, grey)]
        else:
            message.clip = RawVideo(16, 16, 2, grey * 2)
        return message


class Recorder:
    """ASGI middleware that records every request with the status of its answer."""

    def __init__(self, app: Any) -> None:
        self.app, self.records, self.client = app, list[dict[str, Any]](), ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, headers = bytearray(), {k.decode(): v.decode() for k, v in scope["headers"]}
        record: dict[str, Any] = {
            "client": self.client,
            "method": scope["method"],
            "path": scope["path"],
            "headers": {name: headers[name] for name in HEADERS if name in headers},
        }

        async def heard() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
            await send(message)

        await self.app(scope, heard, told)
        record["body"] = base64.b64encode(body).decode()
        is_poll = scope["method"] == "GET" and scope["path"] != "/v1/model_info"
        matches = [entry for entry in self.records if entry["path"] == record["path"]]
        if not is_poll and sum(entry["client"] == self.client for entry in matches) < 2:
            self.records.append(record)


@asynccontextmanager
async def served(worker: Any) -> AsyncIterator[tuple[str, Recorder]]:
    """Run a server on a loopback port with a fake worker."""
    store = JobStore(None)
    writers = {"image": write_images, "video": write_video}
    runner = Runner(
        store, worker, writers, model=lambda: "grey", max_running=1, read=unpacked, again_s=0.01
    )
    recorder = Recorder(create_app(worker, ServeSettings(port=0), runner))
    worker._is_open.set()
    server = uvicorn.Server(uvicorn.Config(recorder, port=0, log_level="error", lifespan="off"))
    tasks = [asyncio.create_task(runner.run()), asyncio.create_task(server.serve())]
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", recorder
    finally:
        server.should_exit = True
        await tasks[1]
        tasks[0].cancel()
        await runner.stop()
        store.close()


@contextmanager
def imported(folders: Sequence[Path]) -> Iterator[None]:
    """Import the clients' files from the folders, and stand-ins for all other modules."""
    importer = Importer(folders, REAL, PEERS)
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)


async def sglang(url: str, recorder: Recorder, task: str, **options: Any) -> dict[str, Any]:
    """`bench_serving`, without `--model`."""
    recorder.client = f"sglang bench_serving {task}"
    bench = importlib.import_module(f"{SG}.bench_serving")
    with tempfile.TemporaryDirectory() as folder:
        Image.new("RGB", (48, 48), "red").save(Path(folder) / "a.png")
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("a cat\na dog\n")
        report = Path(folder) / "report.json"
        args = ["bench", "--base-url", url, "--task", task, "--num-prompts", "2"]
        dataset = folder if task.startswith("image") else str(prompts)
        args += ["--dataset", "vbench", "--dataset-path", dataset, "--output-file", str(report)]
        for name, value in options.items():
            args += [f"--{name.replace('_', '-')}", str(value)]

        def run() -> None:
            sys.argv, before = args, sys.argv
            try:
                parser = bench_arguments(bench)
                asyncio.run(bench.benchmark(parser))
            finally:
                sys.argv = before

        await asyncio.to_thread(run)
        report_data: dict[str, Any] = json.loads(report.read_text())
        return report_data


def bench_arguments(bench: types.ModuleType) -> Any:
    """The arguments, parsed by the client's own command line."""
    source = Path(str(bench.__file__)).read_text()
    main = source[source.index("parser = argparse.ArgumentParser") :]
    lines = [line.removeprefix("    ") for line in main.splitlines()]
    end = next(n for n, line in enumerate(lines) if "parse_args()" in line)
    scope = {"argparse": argparse, **vars(bench)}
    exec("\n".join(lines[: end + 1]), scope)
    return scope["args"]


class EventLines:
    """Stand-in for vLLM's `StreamedResponseHandler`: splits a stream into messages."""

    def __init__(self) -> None:
        self._rest = ""

    def add_chunk(self, chunk: bytes) -> list[str]:
        *whole, self._rest = (self._rest + chunk.decode()).split("\n\n")
        return whole


class Outcome(SimpleNamespace):
    """Stand-in for vLLM's `RequestFuncOutput`: unset fields are 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


async def omni(url: str, recorder: Recorder, kind: str) -> list[Any]:
    """Run the functions of `vllm bench serve --omni` with one request each."""
    aiohttp: Any = importlib.import_module("aiohttp")  # not a dependency of this project

    lib: Any = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
    lib.ASYNC_REQUEST_FUNCS, lib.OPENAI_COMPATIBLE_BACKENDS = {}, []
    patch = importlib.import_module("vllm_omni.benchmarks.patch.patch")
    stand_ins: dict[str, Any] = {
        "StreamedResponseHandler": EventLines,
        "_validate_api_url": lambda *_: None,
        "_update_headers_common": lambda *_: None,
        "_update_payload_common": lambda payload, request: payload.update(request.extra_body or {}),
        "_get_chat_content": lambda request, **_: [
            {"type": "text", "text": request.prompt},
            *(request.multi_modal_content or []),
        ],
        "MixRequestFuncOutput": Outcome,
    }
    vars(patch).update(stand_ins)
    picture = "data:image/png;base64," + base64.b64encode(_png()).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}]
    metrics = {"return_stage_metrics": True}
    calls: list[tuple[str, str, dict[str, Any], Any]] = [
        ("openai_image_generations", "/v1/images/generations",
         {**metrics, "num_outputs_per_prompt": 2, "width": 32, "height": 32, "seed": 42}, None),
        ("openai_image_edits", "/v1/images/edits",
         {**metrics, "seed": 42, "generator_device": "cpu", "bot_task": "think"}, content),
        ("openai_chat", "/v1/chat/completions",
         {**metrics, "modalities": ["image"], "seed": 42}, None),
    ]  # fmt: skip
    if kind == "2v":
        body: dict[str, Any] = {"num_frames": 5, "fps": 8, "width": 32, "height": 32}
        body |= {"poll_interval_s": 0.2, "seed": 42, "extra_params": {"guidance_scale": 2.0}}
        calls = [("openai_videos", "/v1/videos", body, None)]
        calls += [("openai_videos", "/v1/videos", {**body, "num_frames": 9}, content)]
    outcomes = []
    async with aiohttp.ClientSession() as session:
        for name, path, extra, pictures in calls:
            recorder.client = f"vllm bench serve --omni {path}"
            suffix = "_completions" if "chat" in name else ""
            ask = getattr(patch, f"async_request_{name}_omni{suffix}")
            request = SimpleNamespace(
                prompt="a cat", api_url=url + path, prompt_len=2, output_len=16, model="grey",
                model_name=None, extra_body=extra, multi_modal_content=pictures,
                extra_headers=None, request_id=None, ignore_eos=False, mm_position="last",
            )  # fmt: skip
            outcomes.append((path, await ask(request, session)))
    return outcomes


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (48, 48), "red").save(out, "PNG")
    return out.getvalue()


def outcome(reply: Any) -> str:
    """The client's view of a request's result."""
    return "ok" if reply.success else f"FAILED: {str(reply.error)[-300:]}"


async def run(folders: Sequence[Path]) -> list[dict[str, Any]]:
    records = []
    with imported(folders):
        for kind, worker in (("2i", Grey("image")), ("2v", Grey("video"))):
            async with served(worker) as (url, recorder):
                size = {"width": 32, "height": 32, "num_inference_steps": 3}
                tasks = {"2i": ["text-to-image", "image-to-image"],
                         "2v": ["text-to-video", "image-to-video"]}  # fmt: skip
                for task in tasks[kind]:
                    extra = {"num_frames": 5, "fps": 8} if kind == "2v" else {}
                    report = await sglang(url, recorder, task, **size, **extra)
                    completed, failed = report["completed_requests"], report["failed_requests"]
                    print(f"sglang {task}: {completed} completed, {failed} failed")
                outcomes = await omni(url, recorder, kind)
                for endpoint, reply in outcomes:
                    print(f"vllm-omni {endpoint}: {outcome(reply)}")
                records += [{"makes": kind, **record} for record in recorder.records]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--vllm-omni", type=Path, required=True)
    options = parser.parse_args()
    records = asyncio.run(run([options.sglang, options.vllm_omni]))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(records, indent=1) + "\n")
    print(f"{len(records)} requests in {FILE}")


if __name__ == "__main__":
    main()
