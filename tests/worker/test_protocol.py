"""What goes into a frame comes out of it, whole or not at all."""

import io
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import EngineSettings
from carpool.request.card import Card, Parameter, Task
from carpool.types import MAX_SEED, CheckedRequest, Timings
from carpool.worker import encoding, protocol

texts = st.text(max_size=20)
numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
plain = st.none() | st.booleans() | numbers | floats | texts
arguments = st.dictionaries(texts, plain | st.lists(floats, max_size=3), max_size=4)
ids = st.text(min_size=1, max_size=20)
sides = st.integers(1, 1 << 20)

parameters = st.builds(
    Parameter,
    name=texts,
    kind=st.sampled_from(["int", "float", "bool", "str", "numbers", "other"]),
    required=st.booleans(),
    default=plain,
)
tasks = st.builds(
    Task, name=texts, pipeline=texts, parameters=st.lists(parameters, max_size=3).map(tuple),
    max_images=sides, image_mode=texts,
)  # fmt: skip
cards = st.builds(
    Card, id=texts, tasks=st.lists(tasks, min_size=1, max_size=2).map(tuple), defaults=arguments,
    size_multiple_px=sides, default_size_px=st.none() | st.tuples(sides, sides), max_pixels=sides,
    max_steps=sides,
)  # fmt: skip
settings = st.builds(
    EngineSettings,
    device=texts.filter(lambda text: "+" not in text),  # several are a setting of their own
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    revision=st.none() | texts,
    threads=st.none() | sides,
    batching_mode=st.sampled_from(["continuous", "dynamic", "request", "off"]),
    max_batch_size=sides,
    max_queue=st.integers(0, 1 << 20),
)
requests = st.builds(
    CheckedRequest, request_id=ids, seed=st.integers(0, MAX_SEED), arguments=arguments,
    timeout_s=st.none() | st.floats(0.001, 1e6), task=texts,
)  # fmt: skip
pictures = st.builds(protocol.Picture, width=sides, height=sides, rgb=st.binary(max_size=99))
clips = st.builds(
    protocol.RawVideo, width=sides, height=sides, length=sides, rgb=st.binary(max_size=99),
    path=st.binary(max_size=9),
)  # fmt: skip
usages = st.builds(protocol.TokenUsage, text_tokens=sides, image_tokens=sides)
timings = st.builds(Timings, *[st.floats(0, 1e6)] * 5)

to_worker = st.one_of(
    st.builds(protocol.LoadModel, model=texts, settings=settings, spool=st.binary(max_size=9)),
    st.builds(protocol.Submit, request=requests, follow=st.booleans()),
    st.builds(protocol.Cancel, request_id=ids),
    st.builds(protocol.Ask, number=sides, query=st.builds(protocol.GetStatistics)),
)
to_front = st.one_of(
    st.builds(
        protocol.WorkerReady,
        card=cards,
        versions=st.dictionaries(texts, texts, max_size=3),
        load_s=st.floats(0, 1e6),
    ),
    st.builds(protocol.LoadFailure, message=texts),
    st.builds(
        protocol.Done, request_id=ids, seed=st.integers(0, MAX_SEED),
        pictures=st.lists(pictures, max_size=2), timings=timings, usage=usages,
        clip=st.none() | clips,
    ),
    st.builds(protocol.Progress, request_id=ids, step=sides, steps=sides),
    st.builds(
        protocol.RequestFailed, request_id=ids, error=texts, message=texts, param=st.none() | texts,
        retry_after_s=st.none() | st.floats(0, 1e6),
    ),
    st.builds(protocol.Answer, number=sides, value=arguments),
)  # fmt: skip


class Peer(io.RawIOBase):
    """A peer whose bytes come `size` at a time, whatever is asked for."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = io.BytesIO(data), size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(memoryview(buffer)[: self._size])


def in_pieces(data: bytes, size: int) -> BinaryIO:
    return io.BufferedReader(Peer(data, size))


def read(stream: BinaryIO) -> bytes:
    body = encoding.read(stream)
    assert body is not None
    return body


@given(st.lists(to_worker, min_size=1, max_size=3), st.integers(1, 64))
def test_the_worker_reads_what_the_front_wrote(sent: list[Any], piece: int) -> None:
    stream = in_pieces(b"".join(map(encoding.encode, sent)), piece)

    assert [encoding.decode_to_worker(read(stream)) for _ in sent] == sent
    assert encoding.read(stream) is None


@given(st.lists(to_front, min_size=1, max_size=3), st.integers(1, 64))
def test_the_front_reads_what_the_worker_wrote(sent: list[Any], piece: int) -> None:
    stream = in_pieces(b"".join(map(encoding.encode, sent)), piece)

    assert [encoding.decode_to_front(read(stream)) for _ in sent] == sent
    assert encoding.read(stream) is None


@given(to_worker | to_front, st.data())
def test_a_frame_that_was_cut_is_none(sent: Any, data: st.DataObject) -> None:
    whole = encoding.encode(sent)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]

    assert encoding.read(in_pieces(cut, 1 << 20)) is None


def test_whole_numbers_and_fractions_keep_their_kind() -> None:
    request = CheckedRequest("a", 1, {"steps": 4, "scale": 4.0})

    submitted = encoding.decode_to_worker(
        read(in_pieces(encoding.encode(protocol.Submit(request)), 9))
    )

    assert isinstance(submitted, protocol.Submit)
    assert [type(value) for value in submitted.request.arguments.values()] == [int, float]


def test_neither_side_takes_the_others_frames() -> None:
    cancel = read(in_pieces(encoding.encode(protocol.Cancel("a")), 9))
    cannot = read(in_pieces(encoding.encode(protocol.LoadFailure("a")), 9))

    with pytest.raises(ValueError, match="Invalid value 'cancel'"):
        encoding.decode_to_front(cancel)
    with pytest.raises(ValueError, match="Invalid value 'load_failure'"):
        encoding.decode_to_worker(cannot)
