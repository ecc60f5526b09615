"""The worker's end of the socket: what one request breaks, others do not feel."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

from carpool.config import EngineSettings
from carpool.engine.loop import EngineCore
from carpool.engine.model.usage import Meter
from carpool.types import CheckedRequest
from carpool.worker import encoding, protocol
from carpool.worker.message_handler import OpenRequests
from carpool.worker.process import WorkerProcess
from support.server_process import DRAW, MODEL, SIZE
from support.tiny import ARGUMENTS as OF_FAMILIES
from support.tiny import checkpoint

VIDEO = OF_FAMILIES["ltx2"]
ARGUMENTS = {"prompt": "a red circle", "width": SIZE[0], "height": SIZE[1], **DRAW}


class Front:
    """The other end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._stream = connection, connection.makefile("rb")
        connection.settimeout(30)

    def send(self, frame: protocol.ToWorker) -> None:
        self._connection.sendall(encoding.encode(frame))

    def receive(self) -> protocol.ToFront | None:
        """The next frame that is not about the worker's health."""
        while (body := encoding.read(self._stream)) is not None:
            frame = encoding.decode_to_front(body)
            if not isinstance(frame, protocol.Heartbeat | protocol.Started):
                return frame
        return None

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def working(model: str = MODEL, spool: str = "", **settings: Any) -> Iterator[Front]:
    """A worker on a thread of this process, told what to load."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        thread = threading.Thread(target=WorkerProcess(theirs).serve)
        thread.start()
        front = Front(ours)
        front.send(
            protocol.LoadModel(model, EngineSettings(device="cpu", **settings), os.fsencode(spool))
        )
        yield front
        front.close()
        thread.join(10)
        assert not thread.is_alive()


def test_downloads_of_one_of_several_workers_show_no_bars() -> None:
    enable_progress_bars()
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        front = Front(ours)
        front.send(protocol.LoadModel("/nothing", EngineSettings(device="cpu"), bars=False))
        thread = threading.Thread(target=WorkerProcess(theirs).serve)
        thread.start()
        answer = front.receive()
        front.close()
        thread.join(10)

    assert isinstance(answer, protocol.LoadFailure)
    assert are_progress_bars_disabled()


def submit(front: Front, request_id: str) -> protocol.ToFront | None:
    front.send(protocol.Submit(CheckedRequest(request_id, 1, ARGUMENTS)))
    return front.receive()


def film(front: Front) -> protocol.RawVideo:
    """Have a video made, of the arguments that its checkpoint comes with."""
    front.receive()
    arguments = {**VIDEO, "prompt": "a red circle", "output_type": "pil"}
    front.send(protocol.Submit(CheckedRequest("one", 1, arguments, task="text-to-video")))
    done = front.receive()
    assert isinstance(done, protocol.Done), done
    assert done.clip is not None
    assert not done.pictures
    return done.clip


def test_a_reload_that_fails_as_nobody_foresaw_is_told_and_requests_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(engine: EngineCore) -> list[str]:
        raise RecursionError("too deep")

    with working() as front:
        front.receive()
        monkeypatch.setattr(EngineCore, "reload", fail)
        front.send(protocol.Reload())
        reloaded = front.receive()
        assert isinstance(submit(front, "one"), protocol.Done)
    assert isinstance(reloaded, protocol.Reloaded)
    assert reloaded.problems == ["RecursionError: too deep"]


def test_a_request_that_cannot_be_measured_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Meter.usage

    def fail(meter: Meter, request: CheckedRequest) -> Future[tuple[int, int]]:
        if request.request_id == "bad":
            raise TypeError("no text")
        return usage(meter, request)

    monkeypatch.setattr(Meter, "usage", fail)
    with working() as front:
        front.receive()

        bad, good = submit(front, "bad"), submit(front, "good")

    assert isinstance(bad, protocol.RequestFailed)
    assert (bad.request_id, bad.error) == ("bad", "PipelineFailed")
    assert isinstance(good, protocol.Done)


def test_an_output_without_pictures_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.delivery.finish", lambda *_: {"images": []})
    with working() as front:
        front.receive()

        failed = submit(front, "one")

    assert isinstance(failed, protocol.RequestFailed)
    assert "no images" in failed.message


def test_a_worker_whose_engine_fails_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: EngineCore) -> bool:
        raise RuntimeError("a defect")

    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)  # of the tests' own process here
    monkeypatch.setattr(EngineCore, "step", fail)
    with working() as front:
        received = [front.receive() for _ in range(2)]

    assert ends[0] == 1  # its front starts a new one
    assert received[-1] is None  # it hangs up, too
    assert "a turn of the engine failed" in caplog.text


def test_steps_are_told_of_a_request_that_is_followed() -> None:
    with working() as front:
        front.receive()
        front.send(protocol.Submit(CheckedRequest("one", 1, ARGUMENTS), follow=True))
        received = [front.receive()]
        while isinstance(received[-1], protocol.Progress):
            received.append(front.receive())
        done = submit(front, "another")

    steps = [message.step for message in received if isinstance(message, protocol.Progress)]
    assert steps == sorted(set(steps))  # several short ones share a message
    assert received[-2] == protocol.Progress("one", 3, 3)
    assert isinstance(received[-1], protocol.Done)
    assert isinstance(done, protocol.Done)


def test_a_video_crosses_with_its_sound_as_a_file_where_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spool = str(checkpoint("ltx2")), tmp_path / "spool"
    spool.mkdir()
    with working(model, str(spool)) as front:
        small = film(front)
    assert not list(spool.iterdir())
    monkeypatch.setattr(protocol, "MOST_INLINE_BYTES", 1000)
    with working(model, str(spool)) as front:
        large = film(front)
    with working(model) as front:
        nowhere = film(front)

    assert (small.width, small.height, small.length) == (64, 32, 5)
    assert len(small.rgb) == 64 * 32 * 5 * 3
    assert len(set(small.rgb)) > 10
    assert (small.path, large.rgb) == (b"", b"")
    assert Path(os.fsdecode(large.path)).parent == spool
    assert Path(os.fsdecode(large.path)).read_bytes() == small.rgb == nowhere.rgb
    assert small.sound is not None
    assert large.sound is not None
    assert small.sound.rate == large.sound.rate > 0
    assert np.array_equal(small.sound.samples, large.sound.samples)


def test_after_a_reset_the_worker_is_ready_once_the_last_cancelled_request_has_ended() -> None:
    requests, said, cancelled = OpenRequests(), list[str](), list[str]()
    requests.add("one")
    requests.add("two")

    requests.reset(cancelled.append, lambda: said.append("ready"))
    assert sorted(cancelled) == ["one", "two"]
    requests.ended("one")
    assert not said
    requests.ended("two")
    assert said == ["ready"]

    requests.ended("one")  # is told once only
    requests.reset(cancelled.append, lambda: said.append("ready again"))
    assert said == ["ready", "ready again"]
