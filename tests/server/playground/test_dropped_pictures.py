"""What the playground reads of a dropped picture: its scripts, run by Node on files made here."""

import io
import json
import os
import shutil
import struct
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from carpool.errors import InvalidValue
from carpool.media.metadata import exif, png_text
from carpool.request.samplers import SAMPLERS, check_scheduler
from carpool.server.routes.playground import FOLDER
from support.pictures import saved

SCRIPT = """
import { readFileSync } from "node:fs";
const { readPicture } = await import(process.argv[2] + "/metadata.js");
const { parse, stringify } = await import(process.argv[2] + "/json.js");
const work = JSON.parse(readFileSync(0, "utf-8"));
const file = async (path) => readPicture(new Blob([readFileSync(path)]), work.entry);
const told = [];
for (const path of work.files || []) told.push(await file(path));
for (const text of work.texts || []) told.push(stringify(parse(text)));
for (const digits of work.seeds || []) {
  told.push(stringify({ seed: BigInt(digits), text: "0.5:1" }));
}
console.log(JSON.stringify({ told, peak: process.memoryUsage().rss }));
"""
LINE = "Steps: 20, Sampler: Euler a, CFG scale: 7.5, Seed: 123, Size: 512x768, Model: x"
READ = {"num_inference_steps": 20, "guidance_scale": 7.5, "seed": 123, "width": 512, "height": 768}


def node(tmp_path: Path, **work: Any) -> Any:
    program = shutil.which("node")
    if program is None and os.environ.get("BROWSER") == "required":
        pytest.fail("Node is not installed, and BROWSER=required")
    if program is None:
        pytest.skip("Node is not installed")
    script = tmp_path / "read.mjs"
    script.write_text(SCRIPT)
    folder = tmp_path / "playground"  # a package of modules, as browsers take them
    if not folder.exists():
        shutil.copytree(str(FOLDER), folder)
        (folder / "package.json").write_text('{"type": "module"}')
    run = subprocess.run(
        [program, script, folder], input=json.dumps(work), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def read(tmp_path: Path, *contents: bytes, **work: Any) -> list[tuple[dict[str, Any] | None, str]]:
    """The settings and the note of each file."""
    paths = [tmp_path / f"{number}.bin" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    told = node(tmp_path, files=[str(path) for path in paths], **work)["told"]
    return [(one["settings"], one["note"]) for one in told]


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG with chunks of its own before the pixels."""
    plain = saved(Image.new("RGB", (2, 2)))
    made = b""
    for kind, data in chunks:
        crc = zlib.crc32(kind + data)
        made += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)
    return plain[:33] + made + plain[33:]


def text(value: str, name: bytes = b"parameters") -> bytes:
    return png((b"tEXt", name + b"\0" + value.encode("latin-1")))


def unicode_comment(value: str, order: str, tiff: bytes) -> bytes:
    """EXIF whose header is in one order of bytes, and whose comment in another."""
    mark = "<" if tiff == b"II" else ">"
    data = b"UNICODE\0" + value.encode(order)
    head = tiff + struct.pack(mark + "HI", 42, 8)
    pointer = struct.pack(mark + "HHHII", 1, 0x8769, 4, 1, 26) + struct.pack(mark + "I", 0)
    inner = struct.pack(mark + "HHHII", 1, 0x9286, 7, len(data), 44) + struct.pack(mark + "I", 0)
    return head + pointer + inner + data


def jpeg(block: bytes) -> bytes:
    plain = saved(Image.new("RGB", (2, 2)), "JPEG")
    segment = b"Exif\0\0" + block
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + plain[2:]


# Texts of AUTOMATIC1111 and its extensions

TEXTS: list[tuple[str, dict[str, Any]]] = [
    (f"a cat\nNegative prompt: dogs, birds\n{LINE}",
     {**READ, "prompt": "a cat", "negative_prompt": "dogs, birds"}),
    (f"a cat,\non a mat\nNegative prompt: dogs,\nbirds\n{LINE}",
     {**READ, "prompt": "a cat,\non a mat", "negative_prompt": "dogs,\nbirds"}),
    (f'a cat\n{LINE}, ADetailer prompt: "a face, Steps: 3, Seed: 9, Size: 8x8", Version: v1',
     {**READ, "prompt": "a cat"}),
    (f'a cat\nSteps: 20, ADetailer prompt: "x \\"y, Seed: 9\\", CFG scale: 1", {LINE[11:]}',
     {**READ, "prompt": "a cat"}),
    (f'a cat\n{LINE}, Civitai resources: [{{"weight":0.8,"name":"a, Steps: 3"}}], Hires steps: 9',
     {**READ, "prompt": "a cat"}),
    (f'a cat\n{LINE}, Wildcard prompt: "__animal__, Steps: 99"', {**READ, "prompt": "a cat"}),
    (f"a cat\nNegative prompt: dogs\n{LINE}\nTemplate: a {{cat|dog}}, Steps: 5\n"
     "Negative Template: {a|b}", {**READ, "prompt": "a cat", "negative_prompt": "dogs"}),
    (f"a cat\n{LINE}\n\nTemplate: one\nover lines", {**READ, "prompt": "a cat"}),
    (f"Seed: a plant, Steps: of stone\n{LINE}",
     {**READ, "prompt": "Seed: a plant, Steps: of stone"}),
    (f'a cat\n{LINE}, Broken: "no end, Seed: 9', {**READ, "prompt": "a cat"}),
    ("a cat\nSeed: 123, Size: 8x9, Model: x",
     {"prompt": "a cat", "seed": 123, "width": 8, "height": 9}),
    (f"a cat\r\n{LINE}", {**READ, "prompt": "a cat"}),
    ("only a prompt", {"prompt": "only a prompt"}),
    ("a cat\nSteps: 4, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 1",
     {"prompt": "a cat", "num_inference_steps": 4, "true_cfg_scale": 1, "guidance_scale": 3.5,
      "seed": 1}),
    (f"a cat <lora:x:0.8> <lora:y><lyco:z:1:1>\n{LINE}",
     {**READ, "prompt": "a cat", "lora": [{"id": "x", "scale": 0.8}, {"id": "y", "scale": 1},
                                          {"id": "z", "scale": 1}]}),
]  # fmt: skip


def test_fields_are_read_as_their_programs_write_them(tmp_path: Path) -> None:
    told = read(tmp_path, *(text(said) for said, _ in TEXTS))

    for (said, wanted), (settings, _) in zip(TEXTS, told, strict=True):
        assert settings == wanted, said


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    hires = "Clip skip: 2, Hires upscale: 2, ADetailer model: face, A: 1, B: 2, C: 3, D: 4"

    (_, some), (_, tags), (_, none) = read(
        tmp_path,
        text(f"a\n{LINE}, {hires}"),
        text("a <lora:x:1:lbw=A> <hypernet:y:1>\nNegative prompt: b <lora:z:1>\nSteps: 3, Seed: 4"),
        text("a\nSteps: 3, Seed: 4, Model: m, Version: v1"),
    )

    assert some.startswith("Not read from this picture: Sampler, Clip skip, Hires upscale,")
    assert some.endswith("2 more.")
    for tag in ("<lora:x:1:lbw=A>", "<hypernet:y:1>", "<lora:z:1>"):
        assert tag in tags
    assert none == ""


# Containers


def test_texts_are_read_wherever_they_lie(tmp_path: Path) -> None:
    said = f"a cat\n{LINE}"
    packed = zlib.compress(said.encode())
    foreign = f"ein Bär, 猫 🐈\n{LINE}"
    block = {
        (tiff, order): unicode_comment(foreign, order, tiff)
        for tiff in (b"II", b"MM")
        for order in ("utf-16-le", "utf-16-be")
    }
    webp = Image.new("RGB", (2, 2))
    ascii_ = block[b"II", "utf-16-le"].replace(b"UNICODE\0", b"ASCII\0\0\0")
    ascii_ = ascii_[:52] + said.encode().ljust(len(ascii_) - 52, b"\0")
    cat, other = {**READ, "prompt": "a cat"}, {**READ, "prompt": "ein Bär, 猫 🐈"}

    told = read(
        tmp_path,
        png((b"zTXt", b"parameters\0\0" + packed)),
        png((b"iTXt", b"parameters\0\1\0\0\0" + packed)),
        png((b"iTXt", b"parameters\0\0\0de\0Parameter\0" + foreign.encode())),
        png((b"tEXt", b"parameters\0" + foreign.encode())),  # UTF-8 where Latin-1 belongs
        png((b"eXIf", block[b"MM", "utf-16-be"])),
        *(jpeg(one) for one in block.values()),
        with_exif(webp, "WEBP", block[b"II", "utf-16-le"]),
        with_exif(webp, "WEBP", b"Exif\0\0" + block[b"MM", "utf-16-be"]),
        jpeg(ascii_),
    )

    settings = [one for one, _ in told]
    assert settings == [cat, cat, *[other] * 9, cat]


def test_carpools_own_files_give_their_settings_back(tmp_path: Path) -> None:
    metadata = {"model": "m", "prompt": "a 猫", "seed": 2**63 - 1, "num_inference_steps": 7,
                "guidance_scale": 3.5, "width": 64, "height": 48}  # fmt: skip
    image = Image.new("RGB", (64, 48))
    path = tmp_path / "own.png"
    image.save(path, pnginfo=png_text(metadata))

    (own, note), (photo, _) = read(
        tmp_path, path.read_bytes(), with_exif(image, "JPEG", exif(metadata))
    )

    assert (own, note) == ({**metadata, "seed": str(2**63 - 1)}, "")
    assert photo == {key: value for key, value in (own or {}).items() if key != "model"}


def with_exif(image: Image.Image, kind: str, block: bytes) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, exif=block)
    return out.getvalue()


def test_a_text_that_unpacks_without_end_is_left_unread(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(200 << 20), 1)
    good = (b"tEXt", f"parameters\0{LINE}".encode())

    paths = [tmp_path / f"{number}.png" for number in range(3)]
    paths[0].write_bytes(png((b"iTXt", b"parameters\0\1\0\0\0" + bomb)))
    paths[1].write_bytes(png((b"zTXt", b"other\0\0" + bomb), good))
    paths[2].write_bytes(png((b"zTXt", b"parameters\0\0" + bomb[:1000] + b"damaged"), good))
    answer = node(tmp_path, files=[str(path) for path in paths])

    first, second, third = (one["settings"] for one in answer["told"])
    assert first is None
    assert second == third == READ
    assert answer["peak"] < 180 << 20


def test_damaged_files_have_no_settings(tmp_path: Path) -> None:
    whole = [text(f"a\n{LINE}"), jpeg(unicode_comment(LINE, "utf-16-le", b"II"))]
    cuts = [one[:size] for one in whole for size in (0, 1, 3, 9, 20, 30, 40, 45, 60)]
    odd = [
        png((b"tEXt", b"")), png((b"tEXt", b"\0")), png((b"iTXt", b"parameters\0")),
        png((b"zTXt", b"parameters\0")), png((b"eXIf", b"II")),
        jpeg(b"II*\0" + b"\xff" * 40), jpeg(b"MM\0*" + b"\0\0\0\x08" + b"\0\1" + b"\x87\x69" * 20),
        b"RIFF\0\0\0\0WEBPEXIF\xff\xff\xff\xff", b"no picture", text("{", b"carpool"),
    ]  # fmt: skip

    assert read(tmp_path, *cuts, *odd) == [(None, "")] * len([*cuts, *odd])


# Other tools


def test_json_of_other_tools_is_read_and_graphs_are_named(tmp_path: Path) -> None:
    invoke = {"positive_prompt": "a cat", "negative_prompt": "dogs", "steps": 20, "cfg_scale": 7.5,
              "seed": 2**60 + 1, "width": 512, "height": 768, "model": {"name": "x"}}  # fmt: skip
    swarm = {"sui_image_params": {"prompt": "a cat", "seed": 5, "steps": 9, "cfgscale": 2.0}}
    novel = {"prompt": "a cat <lora:x:1>", "uc": "dogs", "steps": 28, "scale": 5.0, "seed": 7}
    graph = {"3": {"class_type": "KSampler", "inputs": {"seed": 5, "steps": 20}}}
    shown = {"nodes": [{"id": 3, "type": "KSampler"}], "links": []}

    told = read(
        tmp_path, text(json.dumps(invoke), b"invokeai_metadata"), text(json.dumps(swarm)),
        text(json.dumps(novel), b"Comment"), text(json.dumps(graph), b"prompt"),
        text(json.dumps(shown), b"workflow"), text(json.dumps({"unrelated": 1})),
        text("made with a brush", b"Software"),
    )  # fmt: skip

    settings = [one for one, _ in told]
    size = {"width": 512, "height": 768}
    assert settings[0] == {
        "prompt": "a cat", "negative_prompt": "dogs", "num_inference_steps": 20,
        "guidance_scale": 7.5, "seed": str(2**60 + 1), **size,
    }  # fmt: skip
    assert settings[1] == {
        "prompt": "a cat", "seed": 5, "num_inference_steps": 9, "guidance_scale": 2,
    }  # fmt: skip
    assert settings[2] == {
        "prompt": "a cat", "negative_prompt": "dogs", "num_inference_steps": 28,
        "guidance_scale": 5, "seed": 7, "lora": [{"id": "x", "scale": 1}],
    }  # fmt: skip
    assert settings[3:] == [None] * 4
    assert ["ComfyUI" in note for _, note in told] == [False] * 3 + [True] * 2 + [False] * 2


# Seeds


def test_seeds_beyond_53_bits_are_kept_exactly(tmp_path: Path) -> None:
    seeds = [2**53, 2**53 + 1, 2**63 - 1, 0, 7]

    told = [one for one, _ in read(tmp_path, *(text(f"a\nSteps: 3, Seed: {n}") for n in seeds))]
    texts = [
        '{"a":9007199254740993,"b":["x 9007199254740993","\\"9007199254740993"],'
        '"c":1.2345678901234567890,"d":-9007199254740993,"e":1e30,"f":12345678901234567e3}'
    ]
    parsed = node(tmp_path, texts=texts)["told"]
    sent = node(tmp_path, seeds=[str(n) for n in seeds])["told"]

    assert [int(one["seed"]) for one in told if one] == seeds
    values = json.loads(parsed[0])
    assert (values["a"], values["d"]) == ("9007199254740993", "-9007199254740993")
    assert values["b"] == ["x 9007199254740993", '"9007199254740993']
    assert (values["c"], values["e"]) == (1.2345678901234567890, 1e30)
    assert [json.loads(one) for one in sent] == [{"seed": n, "text": "0.5:1"} for n in seeds]


def test_more_tools_are_read_and_what_is_left_of_their_json_is_named(tmp_path: Path) -> None:
    fooocus = {"prompt": "a cat", "steps": 30, "guidance_scale": 4.0, "seed": "12345",
               "resolution": "(1024, 768)", "loras": [["x", 0.5]], "sampler": "x", "styles": "[]",
               "metadata_scheme": "fooocus", "vae": "None", "refiner_model": ""}  # fmt: skip
    easy = {"prompt": "a cat", "seed": "9", "num_inference_steps": "25", "guidance_scale": "7.5"}
    graph = (b"tEXt", b'prompt\0{"3": {"class_type": "K", "inputs": {"seed": NaN, "a": [NaN]}}}')

    told = read(
        tmp_path,
        text(json.dumps(fooocus)),
        png(*((b"tEXt", f"{name}\0{value}".encode()) for name, value in easy.items())),
        png(graph),
        png(graph, (b"tEXt", f"parameters\0a cat\n{LINE}".encode())),  # of a node that writes both
        text('{"prompt": "a NaN, Infinity", "steps": 3, "scale": NaN}'),
        text('{"prompt": "a, NaN, b", "steps": 3}'),
    )

    settings, notes = zip(*told, strict=True)
    assert settings == (
        {"prompt": "a cat", "num_inference_steps": 30, "guidance_scale": 4, "seed": 12345,
         "width": 1024, "height": 768},
        {"prompt": "a cat", "num_inference_steps": 25, "guidance_scale": 7.5, "seed": 9},
        None,
        {**READ, "prompt": "a cat"},
        {"prompt": "a NaN, Infinity", "num_inference_steps": 3},
        {"prompt": "a, NaN, b", "num_inference_steps": 3},
    )  # fmt: skip
    assert notes[0] == "Not read from this picture: loras, sampler, styles."
    assert (notes[1], notes[4]) == ("", "")
    assert "graph of nodes" in notes[2]


SD = {"schedulers": [*SAMPLERS], "parameters": [{"name": "prompt_weights"}]}  # of /v1/models


def test_weights_are_a_setting_where_the_model_reads_them_and_else_named(tmp_path: Path) -> None:
    files = [
        text(f"miku \\(vocaloid\\)\n{LINE}"),
        text(f"a (cat:1.3) <lora:x:1>\nNegative prompt: [dogs], \\[x\\]\n{LINE}"),
        text(f"a (red cat), ratio (16:9 b) BREAK\n{LINE}"),
    ]

    words, weights = read(tmp_path, *files), read(tmp_path, *files, entry=SD)

    told = [[one or {} for one, _ in some] for some in (words, weights)]
    plain = ["miku (vocaloid)", "a (cat:1.3)", "a (red cat), ratio (16:9 b) BREAK"]
    assert [[one["prompt"] for one in some] for some in told] == [plain, plain]
    assert [one.get("prompt_weights") for some in told for one in some] == [None] * 4 + [True] * 2
    assert [some[1]["negative_prompt"] for some in told] == ["[dogs], [x]", "[dogs], \\[x\\]"]
    notes = [note for some in (words, weights) for _, note in some]
    assert ["weights" in note for note in notes] == [False, True, True, False, False, True]
    assert "(cat:1.3)" in notes[1]
    assert "negative prompt, as [dogs]" in notes[1]
    assert "of the prompt, as BREAK" in notes[5]


NAMES = [
    ("DPM++ 2M Karras", ""), ("DPM++ 2M", "Karras"), ("Euler a", "Automatic"), ("UniPC", ""),
    ("DPM2 a", "Karras"), ("k_euler_ancestral", ""), ("dpmpp_2m_sde", "karras"),
    ("LMS", "Exponential"), ("DPM adaptive", ""), ("DDIM", "SGM Uniform"), ("k_dpm_2", ""),
    ("DPM++ 2M SDE Heun", "Beta"), ("sample_heun", ""), ("dpmpp_2m_gpu", ""), ("PLMS", ""),
]  # fmt: skip


def test_a_sampler_is_the_one_that_the_server_takes_it_for(tmp_path: Path) -> None:
    def name_here(name: str) -> str | None:
        with suppress(InvalidValue):
            return check_scheduler(name, SAMPLERS, "DDPMScheduler")
        return None

    as_text = [text(f"a\nSteps: 3, Sampler: {one}, Schedule type: {two}") for one, two in NAMES]
    as_json = [text(json.dumps({"steps": 3, "sampler": a, "scheduler": b})) for a, b in NAMES]

    told = read(tmp_path, *as_text, *as_json, entry=SD)

    for pair, (settings, note) in zip([*NAMES, *NAMES], told, strict=True):
        expected = name_here(" ".join(pair).strip())
        assert (settings or {}).get("scheduler") == expected, pair
        assert ("ampler" in note) == (expected is None), pair


def test_exif_is_read_wherever_it_lies_in_an_avif(tmp_path: Path) -> None:
    head = struct.pack(">I", 24) + b"ftypavif\0\0\0\0avifmif1" + b"*II*\0MM\0*" * 9
    blocks = [unicode_comment(LINE, "utf-16-le", tiff) for tiff in (b"II", b"MM")]

    told = read(tmp_path, *(head + b"Exif\0\0" + one + b"*" * 99 for one in blocks), head, head[:9])

    assert told[:2] == [(READ, "Not read from this picture: Sampler.")] * 2
    assert told[2:] == [(None, "")] * 2
