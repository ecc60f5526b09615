"""JSON of clients: what is parsed, what is refused unparsed, and at what cost."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from carpool.server.bodies import json_bodies
from support.app import without_nulls

MIB = 1 << 20
PIXELS = "A" * 2 * MIB  # base64, as it happens
URL = f"data:image/png;base64,{PIXELS}"


def refused(body: bytes | str) -> tuple[int, str]:
    """Status and message, of a body with pictures and of one without."""
    content = body.encode() if isinstance(body, str) else body
    with pytest.raises(HTTPException) as error:
        json_bodies.parse(json_bodies.cut(content)[0])
    if len(content) <= json_bodies.MOST_BYTES:
        with pytest.raises(HTTPException) as same:
            json_bodies.read(content)
        assert same.value.detail == error.value.detail
    return error.value.status_code, str(error.value.detail)


def with_pictures(value: Any) -> tuple[Any, dict[str, str]]:
    """What is read of a body, with a dash for each picture; and the pictures, by that."""
    text, pictures = json_bodies.cut(bytearray(json.dumps(value).encode()))
    names = {name: f"-{number}" for number, name in enumerate(pictures)}
    for name, dash in names.items():
        text = text.replace(name.encode(), dash.encode())
    return json_bodies.parse(text), {
        names[name]: str(url, "ascii") for name, url in pictures.items()
    }


@pytest.fixture
def never_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("it is parsed")

    monkeypatch.setattr(json, "loads", loads)


LARGE: dict[str, Callable[[], bytes]] = {
    "empty objects": lambda: b'{"images":[' + b"{}," * (7 * MIB) + b"{}]}",
    "digits": lambda: b'{"seed":' + b"9" * 20 * MIB + b"}",
    "a long text": lambda: b'{"prompt":"' + b"a" * 20 * MIB + b'"}',
    "escapes": lambda: b'{"prompt":"' + b"\\u0041" * (4 * MIB) + b'"}',
    "escaped quotes": lambda: b'{"prompt":"' + b'\\"' * (10 * MIB) + b'"}',
    "no picture but quotes": lambda: b'{"prompt":"data:' + b'\\"' * (10 * MIB) + b'"}',
    "no picture but backslashes": lambda: b'{"prompt":"data:' + b"\\\\" * (10 * MIB) + b'"}',
    "a picture without an end": lambda: b'{"image":"data:' + b"A" * 20 * MIB,
    "blanks": lambda: b'{"prompt":' + b" " * 20 * MIB + b'"a"}',
    "quotes": lambda: b'"' * 20 * MIB,
    "many pictures": lambda: b"[" + (b'"data:' + b"A" * 1024 + b'",') * (20 * 1024) + b"1]",
    "emoji": lambda: b'{"prompt":"data:' + "\U0001f600".encode() * (5 * MIB) + b'"}',
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
@pytest.mark.usefixtures("never_parsed")
def test_twenty_mebibytes_that_are_no_pictures_are_refused_unparsed_for_next_to_no_memory(
    make: Callable[[], bytes],
) -> None:
    body = make()
    tracemalloc.start()
    try:
        status, said = refused(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (status, "beside" in said) == (413, True)
    assert peak < 8 * MIB


@pytest.mark.parametrize(
    "body",
    [b"[" + b"{}," * 20_000 + b"1]", b"[" + b"[1]," * 10_000 + b"1]",
     b'["' + b'","' * 20_001 + b'"]',
     b"{" + b",".join(b'"%d":1' % number for number in range(20_002)) + b"}"],
    ids=lambda body: str(body[:20]),
)  # fmt: skip
def test_too_many_values_are_refused(body: bytes) -> None:
    assert refused(body) == (400, f"the body has more than {json_bodies.MOST_VALUES} values")


@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"\\"a":[[1],', "]}]")]
)
def test_deep_nesting_is_refused(opening: str, closing: str) -> None:
    for depth in (33, 900, 30_000):
        body = opening * depth + '""' + closing * depth

        assert refused(body)[1] == "the body nests lists or objects more than 32 deep"


@pytest.mark.parametrize(
    "value",
    [["[" * 50_000], ['"' * 20_000, "\\" * 20_000], {"{": "}" * 50_000}, ["a,b" * 30_000],
     [0.5] * 10_000, {str(number): number for number in range(10_000)}, "\\", '\\"', '"\\', ""],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_what_stands_in_texts_is_no_structure(value: Any) -> None:
    for ascii_ in (True, False):
        assert json_bodies.read(json.dumps(value, ensure_ascii=ascii_).encode()) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


@given(JSON, st.booleans())
def test_any_small_value_is_read_as_it_was_written_but_nulls(value: Any, ascii_: bool) -> None:
    assert json_bodies.read(json.dumps(value, ensure_ascii=ascii_).encode()) == without_nulls(value)


@given(st.binary(max_size=200) | st.text(alphabet='"\\[]{},:ad1 ', max_size=60).map(str.encode))
def test_any_bytes_are_refused_exactly_when_a_parser_refuses_them(body: bytes) -> None:
    try:
        expected = json.loads(body.decode())
    except ValueError:
        refused(body)
        return
    if repeated := has_a_key_twice(body):
        assert "twice" in refused(body)[1]
    assert repeated or str(json_bodies.read(body)) == str(expected)


def has_a_key_twice(body: bytes) -> bool:
    found = list[bool]()

    def seen(pairs: list[tuple[str, Any]]) -> None:
        found.append(len(dict(pairs)) < len(pairs))

    json.loads(body, object_pairs_hook=seen)
    return any(found)


# Pictures


def test_pictures_do_not_count_as_bytes_and_are_not_copied() -> None:
    body = bytearray(json.dumps({"prompt": "\U0001f600", "images": [{"image_url": URL}]}).encode())
    tracemalloc.start()
    try:
        text, pictures = json_bodies.cut(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < MIB
    [(name, url)] = pictures.items()
    assert str(url, "ascii") == URL
    assert json_bodies.parse(text) == {"prompt": "\U0001f600", "images": [{"image_url": name}]}


def test_several_pictures_stay_in_their_places() -> None:
    value = {"a": URL, "b": ["data:image/png;base64,short", URL + "B"], "c": [{"d": URL + "C"}]}

    left, pictures = with_pictures(value)

    assert left == {"a": "-0", "b": ["data:image/png;base64,short", "-1"], "c": [{"d": "-2"}]}
    assert pictures == {"-0": URL, "-1": URL + "B", "-2": URL + "C"}


def test_a_small_body_keeps_its_pictures() -> None:
    value = {"image": "data:image/png;base64," + "A" * 5000}

    assert with_pictures(value) == (value, {})


def test_slashes_may_be_escaped_as_php_does_it() -> None:
    for pixels in ("/" * 3 * MIB, "AAA/" * MIB, "A" * (MIB - 23) + "/" + "A" * MIB):
        url = f"data:image/png;base64,{pixels}"
        body = json.dumps([url]).replace("/", "\\/").encode()

        text, pictures = json_bodies.cut(body)

        assert [str(one, "ascii") for one in pictures.values()] == [url]
        assert json_bodies.parse(text) == list(pictures)


@pytest.mark.parametrize("broken", ["\n", "\\b", '\\"', "\\\\", "\x7f", "é", "\\u0041"])
def test_what_is_no_plain_text_is_no_picture(broken: str) -> None:
    for place in (0, MIB, 2 * MIB):
        body = f'["data:{PIXELS[:place]}{broken}{PIXELS[place:]}"]'

        assert refused(body)[0] == 413


def test_a_text_that_speaks_of_a_picture_is_none() -> None:
    value = [f'she said "data:{"A" * 5000}"', URL]

    left, pictures = with_pictures(value)

    assert (left, list(pictures.values())) == ([value[0], "-0"], [URL])


def test_no_more_than_some_pictures_are_free() -> None:
    urls = [f"data:{'A' * 100_000}{number}" for number in range(json_bodies.MOST_PICTURES + 11)]

    _, pictures = with_pictures(urls[:-1])

    assert json_bodies.MOST_PICTURES - 1 <= len(pictures) <= json_bodies.MOST_PICTURES
    assert refused(json.dumps(urls * 2))[0] == 413


def test_a_name_that_stands_for_a_picture_cannot_be_guessed() -> None:
    body = json.dumps([URL]).encode()

    assert json_bodies.cut(body)[1].keys().isdisjoint(json_bodies.cut(body)[1])
