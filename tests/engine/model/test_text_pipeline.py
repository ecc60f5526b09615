"""A language model as a pipeline: texts equal those of plain `generate`, whole and in pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import carpool
from carpool.engine.model.text_pipeline import WrittenText
from carpool.errors import InvalidValue, LoadFailed, Rejected, SettingRejected
from support.tiny.parts import qwen2_tokenizer
from support.tiny.writers import save_writer, writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer(tmp_path_factory.mktemp("models") / "writer")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[carpool.Engine]:
    with carpool.load(folder) as loaded:
        yield loaded


def plain(folder: Path, prompt: str, seed: int | None, **options: Any) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(seed or 0)
    with torch.no_grad():
        record = {"return_dict_in_generate": True, "tokenizer": tokenizer}  # for stop texts
        ids = model.generate(**inputs, pad_token_id=0, **record, **options).sequences
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def assert_as_plain(folder: Path, prompts: list[str], outputs: Any, **options: Any) -> None:
    pairs = zip(prompts, outputs, strict=True)
    texts = [plain(folder, prompt, output.seed, **options) for prompt, output in pairs]
    assert [output.text for output in outputs] == texts


def test_prompts_are_continued_as_by_generate(engine: carpool.Engine, folder: Path) -> None:
    prompts = ["a red circle", "Ein grüner Stern", "x"]
    options: Any = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 40}

    outputs = engine.generate(prompts, seed=3, **options)

    assert_as_plain(folder, prompts, outputs, do_sample=True, **options)


def saved(folder: Path, name: str, **sizes: Any) -> Path:
    tokenizer, cls = qwen2_tokenizer(), getattr(transformers, name)
    tokenizer.save_pretrained(folder)
    words = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}
    cls(cls.config_class(**words, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        # its first forward scales its weights in place
        ("RwkvForCausalLM", {"hidden_size": 32, "num_hidden_layers": 7}),
        ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 2}),  # its context is -1: any length
    ],
)
def test_models_of_other_kinds_are_continued_too(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    saved(tmp_path, name, **sizes)
    prompts = ["a red circle", "x"]

    with carpool.load(tmp_path) as engine:
        outputs = engine.generate(prompts, seed=1, max_new_tokens=6, temperature=0.9)

    assert_as_plain(tmp_path, prompts, outputs, do_sample=True, max_new_tokens=6, temperature=0.9)


def test_a_model_of_encoder_and_decoder_is_refused_as_such(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    saved(tmp_path, "T5ForConditionalGeneration", **sizes)
    with pytest.raises(LoadFailed, match="t5 of encoder and decoder"):
        carpool.load(tmp_path)


def test_the_pieces_of_a_text_are_told_as_they_come(engine: carpool.Engine) -> None:
    handle = engine.submit("a red circle", max_new_tokens=12, seed=3)

    pieces = [event.text for event in handle if event.kind == "preview"]

    assert len(pieces) > 6
    assert "".join(pieces) == handle.result().text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": "a", "max_new_tokens": 300}, "must be at most 255: the context has 256"),
        ({"prompt": "a 5 " * 300}, "the model's context has 256"),
        ({"prompt": ""}, "prompt is empty"),
    ],
)
def test_what_the_context_has_no_room_for_is_refused(
    engine: carpool.Engine, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(Rejected, match=text):
        engine.generate(carpool.Request(**arguments))


def test_without_a_template_one_message_of_the_user_is_continued(tmp_path: Path) -> None:
    save_writer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    said: Any = [{"role": "user", "content": "a red circle"}]

    with carpool.load(tmp_path) as engine:
        [output] = engine.generate(carpool.Request(messages=said), max_new_tokens=9, seed=1)
        with pytest.raises(InvalidValue, match="no chat template"):
            engine.generate(carpool.Request(messages=said * 2), max_new_tokens=9)

    assert output.text == plain(tmp_path, "a red circle", 1, max_new_tokens=9)


def test_a_conversation_that_the_template_refuses_is_the_callers_fault(tmp_path: Path) -> None:
    save_writer(tmp_path)
    refusal = "{{ raise_exception('no system message') }}"
    template = "{% for m in messages %}{% if m.role == 'system' %}" + refusal
    template += "{% endif %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    asked: Any = [{"role": "user", "content": ["a red ", "circle"]}, {"role": "assistant"}]

    with carpool.load(tmp_path) as engine:
        [output] = engine.generate(carpool.Request(messages=asked), max_new_tokens=9, seed=1)
        with pytest.raises(InvalidValue, match=r"chat template refuses.*: no system message"):
            engine.generate(carpool.Request(messages=[{"role": "system"}, *asked]))

    assert output.text == plain(tmp_path, "a red \ncircle", 1, max_new_tokens=9)


ODD: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "do_sample": True},
    "beams that answer twice": {"num_beams": 2, "num_return_sequences": 2},
    "several tokens a step": {"prompt_lookup_num_tokens": 3},
    "drafts by its first layer": {"assistant_early_exit": 1},  # its config changes meanwhile
    "own stop texts": {"stop_strings": ["e", " "]},
    "ends and a record": {"eos_token_id": [*range(0, 700, 9)], "return_dict_in_generate": True},
}


@pytest.mark.parametrize("entries", ODD.values(), ids=ODD)
def test_a_model_s_own_ways_to_generate_are_kept(tmp_path: Path, entries: dict[str, Any]) -> None:
    save_writer(tmp_path)
    transformers.GenerationConfig(**{"eos_token_id": 2, **entries}).save_pretrained(tmp_path)
    prompts, pieces = ["a red circle a red circle", "Ein grüner Stern"], ["", ""]

    def note(number: int, event: carpool.Event) -> None:
        pieces[number] += event.text or ""

    with carpool.load(tmp_path) as engine:
        outputs = engine.generate(prompts, seed=3, max_new_tokens=14, progress=note)
        again = engine.generate(prompts[:1], seed=3, max_new_tokens=14)

    assert_as_plain(tmp_path, [*prompts, prompts[0]], [*outputs, *again], max_new_tokens=14)
    assert pieces == [output.text for output in outputs]


def test_weights_that_are_missing_and_settings_of_pipelines_are_refused(tmp_path: Path) -> None:
    model = writer()
    weights = dict(model.state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    qwen2_tokenizer().save_pretrained(tmp_path)

    with pytest.raises(LoadFailed, match=r"model.layers.1.mlp.up_proj.weight"):
        carpool.load(tmp_path)
    with pytest.raises(SettingRejected, match="component"):
        carpool.load(tmp_path, component=("vae=x.safetensors",))


def write(text: str, stops: list[str]) -> tuple[list[str], str]:
    tokenizer, pieces = qwen2_tokenizer(), list[str]()
    written = WrittenText(tokenizer, stops, 100, lambda piece, *_: pieces.append(piece))
    ids = tokenizer(text, return_tensors="pt").input_ids
    for end in range(1, ids.shape[1] + 1):
        if not written.has_stopped:
            written(ids[:, :end], None)
    return pieces, written.end()


@pytest.mark.parametrize("text", ["two words", "Grün 日本語 🙂 ende", "a\n\n  b", "🙂"])
def test_pieces_are_whole_characters_that_make_up_the_text(text: str) -> None:
    pieces, whole = write(text, [])

    assert whole == "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["END"], "one two "), (["two", "e t"], "on"), (["D."], "one two EN"), (["x", "E."], None)],
)
def test_nothing_of_a_stop_text_is_told(stops: list[str], expected: str | None) -> None:
    pieces, whole = write("one two END.", stops)

    assert whole == "".join(pieces) == (expected or "one two END.")
