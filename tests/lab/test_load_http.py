"""`carpool bench` over real HTTP: servers that misbehave, videos, the command, sweeps."""

import asyncio
import contextlib
import email
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image

from carpool.config import EngineSettings
from carpool.errors import CarpoolError, LibraryMissing
from carpool_lab.load.client import LoadClient, RequestError
from carpool_lab.load.command import bench
from carpool_lab.load.sweep import FLAGS, SweepSettings, serving, sweep
from carpool_lab.workload import Mix, Setting
from support import server_process as own

DRAW = {"size": f"{own.SIZE[0]}x{own.SIZE[1]}", **own.DRAW}


class FakeServer:
    """An OpenAI-compatible server that does what the prompt says; it draws nothing."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []  # bodies, in order
        self.headers: list[Mapping[str, str]] = []
        self.looks: dict[str, int] = {}  # at each video job
        self.is_done = threading.Event()
        self.app = FastAPI()
        self.app.post("/v1/images/generations")(self.picture)
        self.app.post("/v1/videos")(self.video)
        self.app.get("/v1/videos/{job}")(self.look)
        self.app.get("/v1/videos/{job}/content")(self.content)
        self.app.get("/stats")(self.stats)

    async def picture(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        match body["prompt"]:
            case "too many":
                error = {"message": "4 wait", "type": "rate_limit_error", "code": "queue_full"}
                return JSONResponse({"error": {**error, "param": None}}, status_code=429)
            case "broken":
                return Response("<html>oh</html>", status_code=502)
            case "nothing":
                return JSONResponse({"created": 1, "data": []})
            case "never":
                await asyncio.Event().wait()
            case "hang up":
                return Response("{", headers={"content-length": "100"})
        return JSONResponse({"data": [{"b64_json": "AAAA"}], "peak_memory_mb": 12.5})

    async def video(self, request: Request) -> Response:
        kind = request.headers["content-type"].encode()
        form = email.message_from_bytes(
            b"content-type: " + kind + b"\r\n\r\n" + await request.body()
        )
        assert form.get_content_type() == "multipart/form-data"
        fields = {
            str(part.get_param("name", header="content-disposition")): part.get_payload()
            for part in form.walk()
            if not part.is_multipart()
        }
        self.asked.append(fields)
        job = str(fields["prompt"])
        self.looks[job] = 0
        return JSONResponse({"id": job, "object": "video", "status": "queued"})

    async def look(self, job: str) -> Response:
        self.looks[job] += 1
        if self.looks[job] < 3:
            return JSONResponse({"id": job, "status": "in_progress"})
        if job == "poison":
            error = {"code": "out_of_memory", "message": "too long"}
            return JSONResponse({"id": job, "status": "failed", "error": error})
        return JSONResponse({"id": job, "status": "completed"})

    async def content(self, job: str) -> Response:
        if job == "lost":
            error = {"code": "video_not_found", "message": "no such video"}
            return JSONResponse({"error": error}, status_code=404)
        return Response(b"" if job == "empty" else b"mp4", media_type="video/mp4")

    async def stats(self) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 7 * 2**20}}


@contextlib.contextmanager
def listening(fake: FakeServer) -> Iterator[str]:
    """The fake on a free port of the loopback device, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        config = uvicorn.Config(
            fake.app, lifespan="off", log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([door],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    with listening(fake) as url:
        yield fake, url


def tell(url: str, prompt: str, task: Any = "text-to-image", timeout_s: float = 20.0) -> str:
    """Ask once; gives the reason of the failure, or "fine"."""

    async def ask() -> str:
        async with LoadClient(url, task, api_key="key", timeout_s=timeout_s) as client:
            try:
                await client.ask({"prompt": prompt, "seed": 3, "fps": 8})
            except RequestError as failed:
                return failed.reason if failed.message else "no message"
            return "fine"

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a cat", "fine"), ("too many", "429 queue_full"), ("broken", "502 Bad Gateway"),
        ("nothing", "no picture"), ("hang up", "connection: RemoteProtocolError"),
    ],
)  # fmt: skip
def test_whatever_the_server_does_has_a_reason(
    served: tuple[FakeServer, str], prompt: str, reason: str
) -> None:
    assert tell(served[1], prompt) == reason


def test_the_key_is_sent_and_the_url_may_end_in_v1(served: tuple[FakeServer, str]) -> None:
    fake, url = served

    assert tell(f"{url}/v1/", "a cat") == "fine"

    assert fake.headers[-1]["authorization"] == "Bearer key"
    assert fake.asked[-1] == {"prompt": "a cat", "seed": 3, "fps": 8}


def test_an_answer_that_does_not_come_in_time_is_a_timeout(served: tuple[FakeServer, str]) -> None:
    assert tell(served[1], "never", timeout_s=0.2) == "timeout"


def test_nobody_there_is_a_failed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]

    assert tell(f"http://127.0.0.1:{port}", "a cat") == "connection: ConnectError"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "8000"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(CarpoolError, match="is no URL"):
        LoadClient(url, "text-to-image", api_key="key", timeout_s=1)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a wave", "fine"),
        ("poison", "video failed: out_of_memory"),
        ("lost", "404 video_not_found"),
        ("empty", "no video"),
    ],
)
def test_a_video_is_a_job_whose_file_is_fetched(
    served: tuple[FakeServer, str], prompt: str, reason: str
) -> None:
    fake, url = served

    assert tell(url, prompt, "text-to-video") == reason

    assert fake.looks[prompt] == 3
    assert fake.asked[-1] == {"prompt": prompt, "seed": "3", "fps": "8"}


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, module in (("httpx2", "load.client"), ("matplotlib.figure", "plot")):
        package = library.partition(".")[0]
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"carpool_lab.{module}", raising=False)
        with pytest.raises(LibraryMissing, match=f"pip install {package}"):
            __import__(f"carpool_lab.{module}")


# The command


def bench_command(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments])


def test_the_command_prints_the_block_and_saves_every_request(
    served: tuple[FakeServer, str], tmp_path: Path
) -> None:
    fake, url = served
    mix = tmp_path / "mix.jsonl"
    mix.write_text('{"prompt": "a cat", "num_inference_steps": 4}\n{"prompt": "too many"}\n')
    seen = len(fake.asked)

    flags = ["--num-prompts", 20, "--request-rate", 1000, "--warmup", 0, "--seed", 3]
    result = bench_command(
        "--url", url, "--mix", mix, *flags, "--size", "64x64", "--save-result", tmp_path / "r.json"
    )

    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["completed_requests"] + told["failed_requests"] == 20
    assert {one["reason"] for one in told["failures"]} == {"429 queue_full"}
    assert (
        f"Successful requests:                     {told['completed_requests']}/20" in result.stdout
    )
    assert "Peak Memory Max (MB):                    12.5" in result.stdout
    assert told["settings"]["request_rate"] == "1000"
    sent = sorted(fake.asked[seen:], key=lambda body: body["seed"])
    assert sent == sorted((one["body"] for one in told["requests"]), key=lambda body: body["seed"])
    assert all(body["size"] == "64x64" for body in sent)


def test_latency_targets_come_from_the_warmup(served: tuple[FakeServer, str]) -> None:
    fake, url = served
    seen = len(fake.asked)

    result = bench_command(
        "--url", url, "--num-prompts", 3, "--steps", 4, "--slo-scale", 1e6, "--json",
        "--max-concurrency", 1, "--warmup", 3, "--model", "m",
    )  # fmt: skip

    told = json.loads(result.stdout)
    assert len(fake.asked) - seen == 3 + 3
    assert (told["slo_attainment_rate"], told["goodput_qps"]) == (1.0, told["throughput_qps"])
    assert all(0 < one["slo_s"] < 1e7 for one in told["requests"])
    assert {one["body"]["model"] for one in told["requests"]} == {"m"}


def test_a_trace_is_sent_as_it_is_written(served: tuple[FakeServer, str], tmp_path: Path) -> None:
    fake, url = served
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 0.1, "prompt": "later"}\n{"at_s": 0, "prompt": "first"}\n')

    result = bench_command("--url", url, "--trace", trace, "--warmup", 0)

    assert result.exit_code == 0
    assert [body["prompt"] for body in fake.asked[-2:]] == ["first", "later"]
    assert f"trace {trace}" in result.stdout


def test_a_run_without_any_answer_fails_after_its_report(
    served: tuple[FakeServer, str], tmp_path: Path
) -> None:
    mix = tmp_path / "mix.jsonl"
    mix.write_text('{"prompt": "broken"}')

    result = bench_command("--url", served[1], "--mix", mix, "--num-prompts", 2, "--warmup", 0)

    assert "502 Bad Gateway:" in result.stdout
    assert isinstance(result.exception, CarpoolError)
    assert "no request succeeded" in str(result.exception)


@pytest.mark.timeout(150)
def test_our_own_server_answers(tmp_path: Path) -> None:
    mix = tmp_path / "mix.jsonl"
    mix.write_text(json.dumps(DRAW) + "\n" + json.dumps({**DRAW, "num_inference_steps": 5}))

    with own.serving() as server:
        flags = ["--num-prompts", 8, "--request-rate", 50, "--slo-scale", 1000, "--warmup", 1]
        result = bench_command("--url", server.url, "--mix", mix, *flags)

    assert result.exit_code == 0, result.output
    assert "Successful requests:                     8/8" in result.stdout
    assert "SLO Attainment Rate (all):               100.00%" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loads", "0.5"], "--loads needs --sweep"),
        (["--sweep", "--url", "http://x"], "--url does not go with --sweep"),
        (["--sweep", "--request-rate", "3"], "--request-rate does not go with --sweep"),
        (["--sweep", "--modes", "on"], "--modes on: must be of continuous"),
        (["--sweep", "--loads", "0.5;1"], "write numbers, such as 0.5,0.9"),
        (["--sweep", "--loads", "0"], "must be above 0"),
        (["--sweep", "--output", "nowhere/x.png"], "there is no folder nowhere"),
        (["--sweep", "--output", "x.txt"], "must end in .png, .svg or .pdf"),
        (["--slo-scale", "3", "--warmup", "0"], "latency targets come from warmup requests"),
        (["--request-rate", "0"], "must be above 0"),
        (["--mix", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--mix", "wrong.jsonl"], "entry 1: weight=-1"),
        (["--trace", "empty.jsonl"], "empty"),
        (["--trace", "empty.jsonl", "--request-rate", "1"], "leave out --request-rate"),
        (["--mix", "latin.jsonl"], "not UTF-8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_ends_with_2_before_anything_is_sent(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.jsonl").write_text('{"weight": -1}')
    Path("empty.jsonl").write_text("\n")
    Path("latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))

    result = bench_command(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


# Sweeps


def test_a_sweep_asks_every_mode_for_the_same_at_the_same_part_of_the_capacity() -> None:
    asked: list[tuple[str, FakeServer]] = []

    @contextlib.asynccontextmanager
    async def start(model: str, mode: str) -> AsyncIterator[str]:
        fake = FakeServer()
        asked.append((mode, fake))
        with listening(fake) as url:
            yield url

    bars: list[str] = []

    def stage(what: str, count: int) -> Callable[[], None]:
        bars.append(f"{what}: {count}")
        return lambda: None

    wanted = SweepSettings(
        "m", ["off", "continuous"], [0.5, 2.0], Mix([Setting()]), count=5, warmup=1
    )
    swept = asyncio.run(sweep(wanted, stage, start=start))

    assert [mode for mode, _ in asked] == ["continuous", "off", "continuous"]
    (_, capacity), (_, off), (_, continuous) = asked
    assert len(capacity.asked) == 1 + 5
    assert len(off.asked) == 1 + 2 * 5
    assert sorted(map(str, off.asked)) == sorted(map(str, continuous.asked))
    assert [(one.mode, one.load) for one in swept.points] == [
        ("off", 0.5), ("off", 2.0), ("continuous", 0.5), ("continuous", 2.0),
    ]  # fmt: skip
    assert [one.rate_qps / swept.capacity_qps for one in swept.points] == pytest.approx(
        [0.5, 2.0, 0.5, 2.0]
    )
    assert bars[:3] == ["continuous, warmup: 1", "capacity: 5", "off, warmup: 1"]


def test_what_dynamic_and_request_need_to_batch_is_as_wide_as_continuous_may_be() -> None:
    assert {flags[-1] for flags in FLAGS.values()} == {str(EngineSettings().max_batch_size)}


def test_a_server_that_does_not_start_ends_the_sweep() -> None:
    async def start() -> None:
        async with serving("shapes", "sideways"):
            raise AssertionError("it cannot serve that")

    with pytest.raises(CarpoolError, match=r"shapes --batching-mode sideways` did not start"):
        asyncio.run(start())


@pytest.mark.slow  # three servers, one after another
@pytest.mark.timeout(300)
def test_a_sweep_of_real_servers_gives_a_table_and_a_picture(tmp_path: Path) -> None:
    mix = tmp_path / "mix.json"
    mix.write_text(json.dumps([{"prompts": ["a", "b"], **DRAW}]))

    result = bench_command(
        "--sweep", "--model", own.MODEL, "--modes", "off,continuous", "--loads", "0.5,0.9",
        "--num-prompts", 4, "--mix", mix, "--warmup", 1,
        "--output", tmp_path / "sweep.png", "--save-result", tmp_path / "sweep.json",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1:3] for line in result.stdout.splitlines()[4:]]
    assert [(mode.strip(), float(load)) for mode, load in rows] == [
        ("off", 0.5), ("off", 0.9), ("continuous", 0.5), ("continuous", 0.9),
    ]  # fmt: skip
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert [point["summary"]["completed_requests"] for point in told["points"]] == [4] * 4
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.width > 1000
