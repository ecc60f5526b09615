"""Prompts and plans that another server writes: right, told as they come, or failed by name."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from carpool.config import LANGUAGE_KEY_VARIABLE, EngineSettings
from carpool.engine.model import language_server
from carpool.engine.model.load import load
from carpool.errors import Cancelled, LanguageServerFailed, SettingRejected
from carpool.models.embedded import REWRITER_DIR
from support.engine_driver import CLOSE, Recorder, driving, fresh, gap, solo
from support.language import Author, author
from support.tiny import ARGUMENTS

Answer = tuple[int, str]
SECRET = "sk-of-the-other-server"


def chunks(*pieces: str) -> str:
    """A stream of chat completions."""
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


class FakeServer(ThreadingHTTPServer):
    """Answers with what `answer` gives, and keeps what it was asked."""

    def __init__(self, answer: Callable[[int, str, Any], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, list[tuple[str, Any, str | None]]()
        self.url = f"http://user:hidden@127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, self.headers.get("authorization")))
        self._reply(*self.server.answer(len(self.server.asked), self.path, body))

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(answer: Callable[[int, str, Any], Answer]) -> Iterator[FakeServer]:
    server = FakeServer(answer)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_server, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv(LANGUAGE_KEY_VARIABLE, SECRET)


def drawn(url: str, *prompts: str, plain: str = "", **settings: Any) -> list[Recorder]:
    """Draw enhanced prompts, and one that is not."""
    with driving(fresh("flux"), language_url=url, **settings) as drive:
        wishes: list[Any] = [{"enhance_prompt": True}] * len(prompts) + [{}] * bool(plain)
        heard = [
            drive.submit(text, **ARGUMENTS["flux"], seed=seed, **wish)
            for seed, (text, wish) in enumerate(zip((*prompts, plain), wishes, strict=False))
        ]
        drive.finish()
    return heard


def framed(_: int, path: str, body: Any) -> Answer:
    assert path == "/v1/chat/completions"
    assert body["model"] == "first"
    prompt = body["messages"][-1]["content"]
    return 200, chunks("<think>hm</think>", prompt, ", framed \ud83d", "\ude42")


@pytest.mark.parametrize("isolation", ["auto", "private"])
def test_pictures_are_those_of_the_prompts_that_the_server_writes(isolation: str) -> None:
    with serving(framed) as server:
        *heard, plain = drawn(server.url, "a cat", "a dog", plain="a cat", isolation=isolation)

    for seed, (text, recorder) in enumerate(zip(("a cat", "a dog"), heard, strict=True)):
        prompt = f"{text}, framed 🙂"
        assert recorder.outcome.settings["revised_prompt"] == prompt
        assert gap(recorder.image, solo("flux", prompt, seed=seed)) < CLOSE
        told = [event.text for event in recorder.events if event.kind == "prompt"]
        assert told == ["<think>hm</think>", prompt]  # time stands still between them
        assert isolation == "private" or not recorder.outcome.warnings
    assert gap(plain.image, solo("flux", "a cat", seed=2)) < CLOSE
    assert [key for *_, key in server.asked] == [f"Bearer {SECRET}"] * 2


def passing(number: int, path: str, body: Any) -> Answer:
    return (503, "busy") if number < 3 else framed(number, path, body)


def broken_off(number: int, path: str, body: Any) -> Answer:
    whole = framed(number, path, body)
    return (200, whole[1].partition("\n\n")[0] + "\n\n") if number < 2 else whole


def silent(*_: Any) -> Answer:
    return 200, chunks(" ")


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [(passing, "a cat, framed 🙂"), (broken_off, "a cat, framed 🙂"), (silent, "a cat")],
)
def test_what_passes_is_tried_again_and_no_words_leave_the_prompt(answer: Any, prompt: str) -> None:
    with serving(answer) as server:
        [recorder] = drawn(server.url, "a cat")

    assert recorder.outcome.settings["revised_prompt"] == prompt


@pytest.mark.parametrize(
    ("answer", "attempts", "problem"),
    [
        ((503, "no\n room"), 3, "status 503: no room"),
        ((401, "key"), 1, "status 401: set CARPOOL_LANGUAGE_KEY"),
        ((307, ""), 1, "status 307"),
        ((200, "data: {broken\n\n"), 1, "not as expected"),
        ((200, 'data: {"error": {"message": "too long"}}\n\n'), 1, "too long"),
        ((200, ""), 3, "broke off"),
        ((200, '{"choices": [{"message": {}}]}'), 1, "no stream of chunks: .*message"),
        ((200, "data: []\n\n"), 1, "not as expected"),
        ((200, chunks("a \ud83d cat")), 1, "not as expected"),
        ((200, 'data: {"choices": [{"delta": {"content": 5}}]}\n\n'), 1, "not as expected"),
        ((200, chunks("ha" * 20_000)), 1, "more than 32000 characters"),
    ],
)
def test_a_failure_is_that_requests_own_and_says_where_and_what(
    answer: Answer, attempts: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with serving(lambda *_: answer) as server:
        recorder, other = drawn(server.url, "a cat", plain="a dog", language_model="given")

    place = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    with pytest.raises(LanguageServerFailed, match=f"(?s){place}: .*{problem}"):
        raise recorder.error or AssertionError
    assert other.error is None
    assert [body["model"] for _, body, _ in server.asked] == ["given"] * attempts
    assert not any(text in f"{recorder.error}{caplog.text}" for text in (SECRET, "hidden"))


def test_a_server_that_is_gone_or_says_nothing_is_named() -> None:
    hold = threading.Event()

    def held(*_: Any) -> Answer:
        hold.wait(30)
        return silent()

    def dripping(handler: _Handler, status: int, text: str) -> None:
        """Keeps the connection alive, and never comes to an end."""
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while not hold.wait(0.02):
                handler.wfile.write(b": wait\n\n")

    for reply in (_Handler._reply, dripping):
        with serving(held) as server, pytest.MonkeyPatch.context() as patched:
            hold.clear()
            patched.setattr(_Handler, "_reply", reply)
            [late] = drawn(server.url, "a cat", language_timeout=0.3)
            hold.set()
        assert "no answer within 0.3 s" in str(late.error)
    [lost] = drawn(server.url, "a cat", language_timeout=0.3)

    assert "cannot be reached" in str(lost.error)


def test_a_request_that_has_ended_hears_no_more_of_its_prompt() -> None:
    def ended(*_: Any, **__: Any) -> None:
        raise Cancelled("the request has ended")

    with serving(framed) as server, pytest.raises(Cancelled):
        language_server.LanguageServer(server.url, "first", 5.0)._written("a cat", ended)


class Painter(Author):
    """Plans a picture, and draws it, as GLM-Image does."""

    generate_prior_tokens = Author.__call__


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([(7 * i) % 100 for i in range(21)], None),
        ([1], "1 tokens, and a plan has 20"),
        ([10**6] * 21, "none of the model's"),
        (["a"] * 21, "not as expected"),
    ],
)
def test_a_plan_is_that_of_the_server_and_fails_where_it_is_none(
    ids: list[Any], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_server, "PLANNER", "text_encoder")
    pipe = author("glm", 1, Painter)
    planner = pipe.text_encoder
    answer = 200, json.dumps({"output_ids": ids})
    with serving(lambda *_: answer) as server, driving(pipe, language_url=server.url) as drive:
        assert drive.engine.loaded.card.enhancer == ""
        recorder = drive.submit("0", seed=2**40 + 5)
        drive.finish()
        assert not drive.widths("text_encoder", "generate")

    assert pipe.text_encoder is planner
    if problem is not None:
        assert isinstance(recorder.error, LanguageServerFailed)
        assert problem in str(recorder.error)
        return
    [(path, body, _)], [text] = server.asked, pipe.texts
    assert path == "/generate"
    assert recorder.outcome.fields["text"].tolist() == [text["input_ids"][0].tolist() + ids]
    assert body["input_ids"] == text["input_ids"][0].tolist()
    assert body["image_data"] == [{"image_grid_thw": text["image_grid_thw"].tolist()}]
    sampling = {"temperature": 1.0, "ignore_eos": True, "sampling_seed": 5, "max_new_tokens": 21}
    assert body["sampling_params"].items() >= sampling.items()


@pytest.mark.parametrize(
    ("url", "rule"),
    [("127.0.0.1:8", "must be http"), ("http://a/?b=c", "must be"), ("http://a", "one of")],
)
def test_what_is_no_url_or_one_too_many_is_refused_at_load(url: str, rule: str) -> None:
    rewriter = str(REWRITER_DIR) if rule == "one of" else None
    with pytest.raises(SettingRejected, match=rule):
        load(fresh("flux"), EngineSettings(language_url=url, rewriter=rewriter))
