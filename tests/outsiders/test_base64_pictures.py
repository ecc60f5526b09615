"""Pictures in base64 as programs write it: in lines, URL-safe, unpadded, escaped; on every door."""

import base64
import json
import textwrap
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import BodyTooLarge, InvalidValue
from carpool.media import uploads
from carpool.media.uploads import read_data_url
from support.app import Grey, ask, refusal
from support.endpoints import EDITS
from support.forms import BOTH, worker_of
from support.pictures import picture, png, saved

SMALL, LARGE = png(64, 48), png(640, 560)  # the body of the large one is beyond that of texts
FORM = {"content-type": "application/x-www-form-urlencoded"}


def pieces(text: str, length: int) -> list[str]:
    return [text[at : at + length] for at in range(0, len(text), length)]


FORMS: dict[str, Callable[[bytes], str]] = {
    "plain": lambda data: base64.b64encode(data).decode(),
    "in lines": lambda data: base64.encodebytes(data).decode(),
    "in lines of a mail": lambda data: base64.encodebytes(data).decode().replace("\n", "\r\n"),
    "indented": lambda data: textwrap.indent(base64.encodebytes(data).decode(), "\t "),
    "URL-safe": lambda data: base64.urlsafe_b64encode(data).decode(),
    "unpadded": lambda data: base64.b64encode(data).decode().rstrip("="),
    "URL-safe, in lines, unpadded": lambda data: "\n".join(
        pieces(base64.urlsafe_b64encode(data).decode().rstrip("="), 64)
    ),
}
PREFIXES = ("data:image/png;base64,", "data:;base64,", "DATA:application/octet-stream;base64,")


def a1111(text: str) -> tuple[str, Any]:
    return "/sdapi/v1/img2img", {"prompt": "a", "init_images": [text]}


def edit(text: str) -> tuple[str, Any]:
    return EDITS, {"prompt": "a", "images": [{"image_url": text}]}


def chat(text: str) -> tuple[str, Any]:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": text}}]
    message = {"role": "user", "content": content}
    return "/v1/chat/completions", {"messages": [message], "modalities": ["image"]}


def inference(text: str) -> tuple[str, Any]:
    return "/", {"inputs": text, "parameters": {"prompt": "a"}}


def post(content: str, path: str, **options: Any) -> Grey:
    worker = worker_of(BOTH)
    answer = ask(content, path, worker=worker, **options)
    assert answer.status_code == 200, answer.text
    return worker


def drawn_from(worker: Grey, data: bytes) -> bool:
    """Whether the pixels are those of a file, or it was made smaller for the model."""
    [job] = worker.jobs
    image, sent = job.arguments["image"], picture(data)
    return bool(image.size != sent.size or image.tobytes() == sent.convert("RGB").tobytes())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("door", [a1111, edit, chat, inference])
def test_a_picture_is_read_however_its_base64_is_written(
    door: Any, data: bytes, form: Callable[[bytes], str]
) -> None:
    bare = form(data)
    texts = [PREFIXES[0] + bare, *([bare.strip()] if door in (a1111, inference) else [])]
    for text in texts:
        path, body = door(text)
        assert drawn_from(post(json.dumps(body), path), data)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_bare_file_of_any_kind_may_be_url_safe(kind: str) -> None:
    for data in (saved(picture(SMALL), kind), saved(picture(png(1100, 1000)), kind)):
        for door in (a1111, inference):
            path, body = door(FORMS["URL-safe, in lines, unpadded"](data))
            assert drawn_from(post(json.dumps(body), path), data)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_url_may_state_any_kind_of_file(prefix: str) -> None:
    path, body = edit(prefix + FORMS["plain"](SMALL))

    assert drawn_from(post(json.dumps(body), path), SMALL)


@pytest.mark.parametrize(
    "escape",
    [
        lambda text: text.replace("+", "\\u002B").replace("=", "\\u003D"),  # .NET
        lambda text: text.replace("=", "\\u003d").replace("+", "\\u002b"),  # Gson
        lambda text: text.replace("/", "\\/"),  # PHP
        lambda text: text.replace("\\n", "\\u000a").replace("/", "\\u002F"),
    ],
)
def test_a_large_picture_may_be_escaped_as_json_libraries_do_it(
    escape: Callable[[str], str],
) -> None:
    for door in (a1111, edit):
        path, body = door(PREFIXES[0] + FORMS["in lines"](LARGE))
        assert drawn_from(post(escape(json.dumps(body)), path), LARGE)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", FORMS)
def test_a_picture_in_an_urlencoded_form_is_read_too(name: str, data: bytes) -> None:
    url = PREFIXES[0] + FORMS[name](data)
    escaped = urlencode({"prompt": "a", "url": url})
    for content in (escaped, f"prompt=a&url={url}" if " " not in url else escaped):
        assert drawn_from(post(content, EDITS, headers=FORM), data)


def test_a_mask_is_read_likewise() -> None:
    path, body = a1111(FORMS["in lines"](SMALL))
    body |= {"mask": FORMS["URL-safe, in lines, unpadded"](png(64, 48)), "inpainting_fill": 1}

    [job] = post(json.dumps(body), path).jobs

    assert job.task == "inpaint"


@given(
    data=st.binary(max_size=90),
    piece=st.integers(4, 9),
    blanks=st.lists(st.sampled_from(["", "\n", "\r\n", " \t", "\n\n\n"]), max_size=200),
    is_safe=st.booleans(),
    padding=st.integers(0, 2),
    is_escaped=st.booleans(),
)
def test_any_way_of_writing_gives_the_same_bytes_in_pieces_of_any_size(
    data: bytes, piece: int, blanks: list[str], is_safe: bool, padding: int, is_escaped: bool
) -> None:
    encode = base64.urlsafe_b64encode if is_safe else base64.b64encode
    text = encode(data).decode()
    text = text[: len(text) - min(padding, text.count("="))]
    blanks += [""] * (len(text) - len(blanks))
    text = "".join(letter + blank for letter, blank in zip(text, blanks, strict=False))
    text = quote(text, safe="") if is_escaped else text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads, "_PIECE", piece)
        for url in (f"data:image/png;base64,{text}", f"data:image/png;base64,{text}".encode()):
            sent = url if isinstance(url, str) else memoryview(url)
            assert read_data_url(sent, max_bytes=max(100, len(text))) == data


@pytest.mark.parametrize(
    "letters", ["A", "AAAAA", "AA==AAAA", "AA==\nAA==", "A===", "=AAA", "AA*A", "%ZZAA", "AAAA%"]
)
def test_what_is_no_base64_is_refused_in_pieces_of_any_size(letters: str) -> None:
    for piece in (4, 5, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uploads, "_PIECE", piece)
            with pytest.raises(InvalidValue):
                read_data_url(f"data:image/png;base64,{letters}")


@pytest.mark.parametrize("blank", ["", "\n", " ", "%0A"])
def test_blanks_do_not_hide_how_large_a_picture_is(blank: str) -> None:
    text = blank.join(pieces(FORMS["plain"](b"1234567890" * 100), 4))
    url = f"data:image/png;base64,{text}"

    assert len(read_data_url(url, max_bytes=1000)) == 1000
    with pytest.raises(BodyTooLarge):
        read_data_url(url, max_bytes=999)
    with pytest.raises(BodyTooLarge):
        read_data_url("data:image/png;base64,AAAA" + blank * 10_000 + "AAAA" * 9999, max_bytes=999)


@pytest.mark.parametrize("meant", ["data: a b", "50 % of a+b = ä"])
def test_other_values_of_an_urlencoded_form_are_read_as_forms_are(meant: str) -> None:
    worker = worker_of(BOTH)
    content = f"prompt={quote_plus(meant, safe=':')}&url=" + quote(
        PREFIXES[0] + FORMS["plain"](LARGE)
    )

    assert ask(content, EDITS, worker=worker, headers=FORM).status_code == 200
    assert worker.jobs[0].arguments["prompt"] == meant


def test_letters_of_another_alphabet_are_refused_by_name() -> None:
    path, body = a1111("iVBORw0KGgo*" + FORMS["plain"](SMALL))

    told = refusal(ask(json.dumps(body), path, worker=worker_of(BOTH)))

    assert (told["code"], told["param"]) == ("invalid_value", "init_images")
