"""A language model on another server: it rewrites prompts, or writes plans for GLM-Image.

The request's fiber is parked while a thread waits for the answer; other requests go on. Every
failure there is one error with the URL and the problem.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import httpx2
import torch

from carpool.config import LANGUAGE_KEY_VARIABLE
from carpool.engine.fiber import park
from carpool.engine.model.rewriter import INSTRUCTION, MOST_TOKENS, TellPrompt, answer_in
from carpool.engine.tokenizers import HostCall
from carpool.errors import LanguageServerFailed, SettingRejected

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole URLs with passwords

T = TypeVar("T")
PAUSES_S = (0.5, 2.0)
"""Before a second and a third attempt. Half: less patience with a restarting server."""
CONNECT_S = 5.0  # twice: an unreachable host costs a request 30 s
MAX_CHARACTERS = 32_000  # limit of a rewritten prompt, equal to the limit for clients
PLANNER = "vision_language_encoder"
"""GLM-Image's component that plans images."""
_PASSING = (408, 429, 502, 503, 504)
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)


class LanguageServer:
    """A server with `/v1/chat/completions`, or, for plans, with SGLang's `/generate`.

    Args:
        url: http(s)://HOST[:PORT], with or without /v1; a password in it is never shown.
        model: name of the model there; None: the first in its list.
        timeout_s: for an answer, over all attempts.
        writes_prompts: it rewrites prompts; else it writes plans.

    Raises:
        SettingRejected: `url` is not valid.
    """

    def __init__(
        self, url: str, model: str | None, timeout_s: float, *, writes_prompts: bool = True
    ) -> None:
        try:
            target = httpx2.URL(url)
        except httpx2.InvalidURL:
            target = httpx2.URL("")
        if target.scheme not in ("http", "https") or not target.host or target.query:
            rule = "must be http://HOST:PORT or https://HOST, with or without /v1"
            raise SettingRejected(f"language_url: {rule}", param="language_url")
        key, bare = os.environ.get(LANGUAGE_KEY_VARIABLE), target.copy_with(userinfo=b"")
        self._shown = str(bare).rstrip("/").removesuffix("/v1")
        self._base = self._shown if key else str(target).rstrip("/").removesuffix("/v1")
        self._model, self._timeout_s, self.writes_prompts = model, timeout_s, writes_prompts
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(headers=headers, limits=httpx2.Limits(max_connections=None))
        self.close = self._client.close

    def rewrite(self, prompt: str, tell: TellPrompt) -> str:
        """Rewrite a prompt in a request's fiber; an empty answer keeps the prompt.

        Args:
            tell: called on another thread; its exception ends the call.

        Raises:
            LanguageServerFailed: with the URL and the problem.
        """
        text: str = park(HostCall(partial(self._written, prompt, tell), waits=True))
        return text or prompt

    @contextmanager
    def planning(self, pipe: Any, seed: int) -> Iterator[None]:
        """Within this context, the server writes the plan of a request's image."""
        planner, own = getattr(pipe, PLANNER, None), vars(pipe)
        if not self.writes_prompts:
            own[PLANNER] = Planner(planner, self, seed)
        try:
            yield
        finally:
            if not self.writes_prompts:
                own[PLANNER] = planner

    def plan(self, body: Mapping[str, Any], limit: int) -> Any:
        """Write a plan in a request's fiber; returns its tokens.

        Raises:
            LanguageServerFailed: as in `rewrite`, or the plan is incomplete.
        """

        def read(answer: httpx2.Response) -> list[int]:
            answer.read()
            tokens = list(answer.json()["output_ids"])
            if len(tokens) < limit - 1 or not all(type(token) is int for token in tokens):
                raise ValueError(f"{len(tokens)} tokens, and a plan has {limit - 1}")
            return tokens[:limit]

        return park(HostCall(partial(self._ask, "/generate", body, read), waits=True))

    def _written(self, prompt: str, tell: TellPrompt) -> str:
        if self._model is None:
            self._model = self._ask(
                "/v1/models", None, lambda answer: str(json.loads(answer.read())["data"][0]["id"])
            )
        messages = [("system", INSTRUCTION), ("user", prompt)]
        body = {
            "model": self._model, "stream": True, "temperature": 0, "max_tokens": MOST_TOKENS,
            "messages": [{"role": role, "content": text} for role, text in messages],
        }  # fmt: skip
        return self._ask("/v1/chat/completions", body, partial(self._text, tell=tell))

    def _text(self, answer: httpx2.Response, tell: TellPrompt) -> str:
        """The text of a stream of chunks."""
        text, has_ended = "", False
        for line in answer.iter_lines():
            if line[:1] in ("{", "[", "<"):  # JSON or HTML instead
                raise ValueError(f"no stream of chunks: {line:.200}")
            name, _, data = line.partition(":")
            if name != "data" or (has_ended := has_ended or data.strip() == "[DONE]"):
                continue
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise ValueError(error.get("message") if isinstance(error, dict) else error)
            for choice in chunk.get("choices") or ():
                text += (choice.get("delta") or {}).get("content") or ""
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"more than {MAX_CHARACTERS} characters")
            tell(_joined(text, "ignore"))
        if not has_ended:
            raise httpx2.RemoteProtocolError("the answer broke off")
        return answer_in(_joined(text))

    def _ask(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[httpx2.Response], T]
    ) -> T:
        """Send a request, with retries while they may help and time is left. On any thread.

        Raises:
            LanguageServerFailed: with the URL and the problem.
        """
        due_s, problem = time.monotonic() + self._timeout_s, ""
        for pause_s in (*PAUSES_S, None):
            may_pass, left_s = True, max(0.01, due_s - time.monotonic())
            timeout = httpx2.Timeout(left_s, connect=min(CONNECT_S, left_s))
            method = "GET" if body is None else "POST"
            ask = partial(self._client.stream, json=body, timeout=timeout)
            try:
                with ask(method, self._base + path) as answer:
                    answer.stream = _Bounded(answer.stream, due_s)
                    if answer.status_code == 200:
                        return read(answer)
                    problem, may_pass = _refusal(answer), answer.status_code in _PASSING
            except httpx2.ConnectError as error:
                problem = f"it cannot be reached ({error})"
            except httpx2.TimeoutException:
                problem = f"no answer within {self._timeout_s:g} s (language_timeout)"
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                problem = f"the connection broke ({error})"
            except _UNREADABLE as error:
                problem, may_pass = f"its answer is not as expected ({error})", False
            if not may_pass or pause_s is None or time.monotonic() + pause_s >= due_s:
                break
            time.sleep(pause_s)
        raise LanguageServerFailed(f"the language server {self._shown}{path}: {problem:.400}")


class _Bounded(httpx2.SyncByteStream):
    """An answer that ends in time: httpx limits only the wait for its next piece."""

    def __init__(self, stream: Any, due_s: float) -> None:
        self._stream, self._due_s = stream, due_s

    def close(self) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            if time.monotonic() > self._due_s:
                raise httpx2.ReadTimeout("it writes too slowly")
            yield piece


def _joined(text: str, errors: str = "strict") -> str:
    """The text with its surrogates, of which chunks may have one each, as characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", errors)


def _refusal(answer: httpx2.Response) -> str:
    text = " ".join(answer.read()[:2000].decode(errors="replace").split())
    if answer.status_code in (401, 403):
        text = f"set {LANGUAGE_KEY_VARIABLE} to a key of that server"
    return f"status {answer.status_code}: {text:.300}"


class Planner:
    """Replaces GLM-Image's planner in a pipeline: another server writes the plans.

    Plans for image edits are written by the planner itself: no server supports them.
    """

    def __init__(self, module: Any, server: LanguageServer, seed: int) -> None:
        self._module, self._server, self._seed = module, server, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def generate(self, **inputs: Any) -> Any:
        """Like the planner's `generate`; returns (1, prompt and new tokens)."""
        ids, limit = inputs["input_ids"], inputs["max_new_tokens"]
        if inputs.get("pixel_values") is not None or ids.shape[0] != 1:
            return self._module.generate(**inputs)
        config = self._module.generation_config
        own = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k")}
        sampling = {"temperature": 1.0} | {name: value for name, value in own.items() if value}
        sampling |= {"ignore_eos": True, "sampling_seed": self._seed % 2**31}
        body = {
            "input_ids": ids[0].tolist(),
            "image_data": [{"image_grid_thw": inputs["image_grid_thw"].tolist()}],
            "sampling_params": {**sampling, "max_new_tokens": limit},
        }
        tokens = self._server.plan(body, limit)
        words = self._module.get_output_embeddings().weight.shape[0]
        if not all(0 <= token < words for token in tokens):
            raise LanguageServerFailed(f"a plan has tokens that are none of the model's {words}")
        return torch.cat([ids, torch.tensor([tokens], device=ids.device)], dim=1)
