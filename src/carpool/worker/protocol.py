"""The messages between the front, its workers, and the fork server. `encoding.py` turns them into
bytes.

The end of file on the socket signals a dead peer.
"""

from typing import Any, NamedTuple

import msgspec

from carpool.artifacts import Mesh, Sound
from carpool.config import EngineSettings, LogFormat, LogLevel
from carpool.request.card import Card
from carpool.telemetry.activity import SeenForward, SeenMove, Snapshot
from carpool.types import CheckedRequest, JournalEntry, RequestSize, Timings

MOST_INLINE_BYTES = 64 << 20  # larger outputs are sent as files: other messages need not wait


class ForkRequest(msgspec.Struct):
    """A request to the fork server for one worker, which inherits these.

    With the byte before it, the front passes three descriptors: the worker's socket, its stdout and
    its stderr. The answer is the worker's process id, or `FORK_REFUSED`; and after its end, its
    exit status. If the front closes the socket earlier, the worker is killed.
    """

    environ: dict[bytes, bytes]
    folder: bytes  # its working directory
    umask: int


FORK_REFUSED = 0  # instead of a process id: the front has to start that worker itself


class LoadModel(msgspec.Struct, tag="load_model"):
    """The first message to a worker: the model to load."""

    model: str
    settings: EngineSettings
    spool: bytes = b""  # folder for outputs too large for a message; empty: no files
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otel: bool = False  # export traces
    bars: bool = True  # show loading progress; for several workers it would be garbled
    factory: str | None = None  # `module:function` that builds the pipeline, instead of `model`
    is_restart: bool = False  # an earlier worker of this kind was ready before
    deadlock: str = ""  # line where an earlier worker deadlocked: requests ride privately


class Submit(msgspec.Struct, tag="submit"):
    request: CheckedRequest
    follow: bool = False  # send `Progress`
    trace: str = ""  # context of the front's span, as in the header `traceparent`
    waited_s: float = 0.0  # seconds in the front's queue, included in the request's times
    is_admitted: bool = False  # accepted by a pool or another worker: do not refuse it
    is_journalled: bool = False  # send `Answers`
    journal: list[JournalEntry] = []  # entries of an earlier run, to resume at its end

    def after(self, past: list[JournalEntry], more_s: float) -> "Submit":
        """The same submission `more_s` later, to resume at the end of the journal `past`."""
        return msgspec.structs.replace(self, journal=past, waited_s=self.waited_s + more_s)


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class Reset(msgspec.Struct, tag="reset"):
    """The front was lost: cancel all requests. Answered by `WorkerReady` after their end."""


class Release(msgspec.Struct, tag="release"):
    """Give up a request before its next forward, if its journal is complete.

    Answered by `RequestReleased`, or not at all.
    """

    request_id: str


class GetStatistics(msgspec.Struct, tag="get_statistics"):
    pass


class GetTimelines(msgspec.Struct, tag="get_timelines"):
    request_ids: list[str]


class Estimate(msgspec.Struct, tag="estimate"):
    """Predict the time of a request that arrives now, without running it."""

    request: CheckedRequest


class Watch(msgspec.Struct, tag="watch"):
    """Start or stop sending `Activity`."""

    is_on: bool


class Held(msgspec.Struct, tag="held"):
    """The worker's share of the front's backlog: a larger one makes forwards wider."""

    work_s: float


class AddLora(msgspec.Struct, tag="add_lora"):
    """Register an adapter while requests run: `Reloaded`, then the answer with its problems."""

    name: str
    path: str


class Reload(msgspec.Struct, tag="reload"):
    """Reload the adapter folder and the batching config."""


Query = GetStatistics | GetTimelines | Estimate | AddLora


class Ask(msgspec.Struct, tag="ask"):
    """A query; the `Answer` has the same number."""

    number: int
    query: Query


class WorkerReady(msgspec.Struct, tag="worker_ready"):
    """The model is loaded; requests are accepted."""

    card: Card
    versions: dict[str, str]  # versions of the libraries that the engine uses
    load_s: float
    device: str = ""
    weights_bytes: int = 0
    free_bytes: int | None = None  # device memory after loading; None: unknown
    model_digest: str = ""  # see `Identity`; empty: unknown

    def now(self, card: Card, **changes: int | None) -> "WorkerReady":
        """The same message with the current adapters; or also with other `free_bytes`."""
        return msgspec.structs.replace(self, card=card, **changes)


class Reloaded(msgspec.Struct, tag="reloaded"):
    """The model after `Reload` or `AddLora`, and problems."""

    card: Card
    problems: list[str]


class LoadFailure(msgspec.Struct, tag="load_failure"):
    message: str
    wants_memory: bool = False


class Picture(msgspec.Struct):
    width: int
    height: int
    rgb: bytes  # 3 * width * height


class RawVideo(msgspec.Struct):
    """A video, with sound if the model makes it. The front removes the file at `path`."""

    width: int
    height: int
    length: int  # frames
    rgb: bytes  # 3 * width * height * length; empty if in a file
    path: bytes = b""  # may be other than UTF-8
    sound: Sound | None = None


class Progress(msgspec.Struct, tag="progress"):
    """The denoising steps that a request with `follow` has done, and all its steps."""

    request_id: str
    step: int
    steps: int


class Preview(msgspec.Struct, tag="preview"):
    """An estimate of the final image after some steps, or a text in progress."""

    request_id: str
    step: int  # a text's: tokens
    steps: int
    picture: Picture | None
    text: str = ""
    is_prompt: bool = False  # the text is the rewritten prompt so far


class Answers(msgspec.Struct, tag="answers"):
    """Journal entries: answers of calls, by request id."""

    entries: list[tuple[str, JournalEntry]]
    passed: dict[str, int] = {}  # numbers of later calls, replayed or not recorded


class RequestReleased(msgspec.Struct, tag="released"):
    """The worker released a request; its whole journal was sent before."""

    request_id: str


class Started(msgspec.Struct, tag="started"):
    """A request has left the queue: it may cause a death of the worker from now on."""

    request_id: str


class Deadlocked(msgspec.Struct, tag="deadlocked"):
    """The engine's thread is deadlocked: later workers need private rides."""

    place: str  # line of the deadlock


class Report(msgspec.Struct, array_like=True):
    """The state of a worker, for the front's router; the engine's `LoadReport`."""

    step_costs: dict[RequestSize, list[float]]  # seconds of a step, by number of sharing requests
    steps_left: dict[str, float]  # remaining steps of running requests, or tokens, by id
    shares_sweeps: bool = False  # streamed weights: requests of all sizes share every step
    place_s: float | None = None  # predicted until the next request can start; None: unknown
    private: dict[str, str] = {}  # reasons for private rides, by task
    # by writer (see `writer_of`): a text's usual tokens, and a token's seconds by sharing texts
    text_costs: dict[str, tuple[float, list[float]]] = {}


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent every second: the progress of the engine's loop."""

    stalled_s: float  # seconds since the loop's last progress; 0 while idle
    expected_s: float | None  # predicted duration of the current forward; None: unknown
    report: Report | None = None


class RawText(msgspec.Struct):
    """A text generated by a language model."""

    text: str
    finish_reason: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int

    def fields(self) -> dict[str, Any]:
        """The fields of the pipeline's output."""
        return msgspec.structs.asdict(self)


class TokenUsage(msgspec.Struct):
    """The input and output tokens of a request, as counted by its model."""

    text_tokens: int
    image_tokens: int


class Done(msgspec.Struct, tag="done"):
    request_id: str
    seed: int
    pictures: list[Picture]
    timings: Timings
    usage: TokenUsage
    clip: RawVideo | None = None  # replaces pictures
    mesh: Mesh | None = None  # replaces pictures
    sound: Sound | None = None  # replaces pictures
    text: RawText | None = None  # replaces pictures
    warnings: list[str] = []  # shown to the client
    skipped_steps: int = 0
    settings: dict[str, Any] = {}  # the settings used


class RequestFailed(msgspec.Struct, tag="request_failed"):
    request_id: str
    error: str  # class name in `carpool.errors`
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Answer(msgspec.Struct, tag="answer"):
    """The answer to a query: statistics, known timelines, an `Estimated`, or problems."""

    number: int  # of its `Ask`
    value: Any


class Activity(msgspec.Struct, tag="activity"):
    """The engine's forwards since the last message, and its current requests; while watched."""

    requests: Snapshot
    forwards: list[SeenForward]
    missed: int  # dropped forwards
    worker: int = 0  # set by the front
    model: str = ""  # set by the front
    moves: list[SeenMove] = []  # between workers, since the last message; set by the front


class Estimated(NamedTuple):
    """The answer to `Estimate`."""

    seconds: float | None  # denoising steps alone on the device; None: unknown
    wait_s: float  # predicted seconds until its start
    speed: float  # seconds of lone work done by one second of shared forwards


ToWorker = LoadModel | Submit | Cancel | Release | Reset | Ask | Held | Reload | Watch
AboutRequest = Started | Answers | RequestReleased | Progress | Preview | Done | RequestFailed
AboutWorker = WorkerReady | LoadFailure | Deadlocked | Heartbeat | Reloaded | Activity
ToFront = AboutRequest | AboutWorker | Answer
