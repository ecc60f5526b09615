"""The rules for requests of texts."""

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from carpool.errors import Rejected
from carpool.request.card import Parameter, Task
from carpool.request.parameters import check
from carpool.request.prompt_weights import fragments, has_weights, weights_warning
from carpool.request.texts import check_text
from carpool.types import Request
from support.app import CARD

READER = Task("text-generation", "TextPipeline", (Parameter("messages", "list"),))
SEER = Task("text-generation", "SeeingTextPipeline", (Parameter("image", "other"),))
SAID = [{"role": "user", "content": "a"}]
SEEN = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ""}]}]
PICTURE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        (READER, {"prompt": "a"}),
        (READER, {"messages": SAID}),
        (READER, {"messages": [{"role": "assistant", "content": None}, *SAID]}),
        (READER, {"messages": SAID, "temperature": 0, "top_p": 1, "top_k": 0, "stop": ["a"] * 16}),
        (SEER, {"messages": SAID}),
        (SEER, {"messages": SEEN, "image": PICTURE}),
        (SEER, {"messages": SEEN * 2, "image": [PICTURE] * 2}),
    ],
)
def test_conversations_and_prompts_are_taken(task: Task, arguments: dict[str, Any]) -> None:
    check_text(task, arguments)


@pytest.mark.parametrize(
    ("task", "arguments", "text"),
    [
        (READER, {}, "prompt or messages"),
        (READER, {"prompt": "a", "messages": SAID}, "not both"),
        (READER, {"prompt": " \n"}, "prompt is empty"),
        (READER, {"messages": []}, "empty list"),
        (READER, {"messages": [{"role": "system", "content": "a"}]}, "no text of the user"),
        (READER, {"messages": ["a"]}, "role null"),
        (READER, {"messages": [{"role": "tool", "content": "a"}]}, 'role "tool"'),
        (READER, {"messages": [{"role": "user", "content": 3}]}, "content 3"),
        (READER, {"messages": [{"role": "user", "content": {"type": "text"}}]}, "content"),
        (READER, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content"),
        (READER, {"messages": SEEN}, "1 pictures"),
        (SEER, {"messages": SEEN}, "image has 0 pictures, messages 1"),
        (SEER, {"messages": SAID, "image": PICTURE}, "image has 1 pictures, messages 0"),
        (READER, {"prompt": "a", "temperature": 101}, "temperature=101"),
        (READER, {"prompt": "a", "min_p": 1.5}, "min_p=1.5"),
        (READER, {"prompt": "a", "repetition_penalty": 0}, "above 0"),
        (READER, {"prompt": "a", "stop": ["a"] * 17}, "17 texts"),
        (READER, {"prompt": "a", "stop": ["a" * 257]}, "256 characters"),
        (READER, {"prompt": "a", "stop": [3]}, "stop has 3"),
    ],
)
def test_what_no_language_model_can_read_is_refused(
    task: Task, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(Rejected, match=text):
        check_text(task, arguments)


# Weights in prompts, as AUTOMATIC1111 writes them: what they mean, and what requests are told


UP, DOWN = 1.1, 1 / 1.1
READS = replace(CARD, weights_reader="compel")


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a cat", [("a cat", 1)]), ("", [("", 1)]), ("a (cat:1.3)", [("a ", 1), ("cat", 1.3)]),
        ("a (cat : .5 ) b", [("a ", 1), ("cat ", 0.5), (" b", 1)]),
        ("(a (b) c)", [("a ", UP), ("b", UP * UP), (" c", UP)]),
        ("((a:2) b:3)", [("a", 6), (" b", 3)]),
        ("[a] [[b]]", [("a", DOWN), (" ", 1), ("b", DOWN * DOWN)]),
        (r"a \(b\) \[c\] \\d", [(r"a (b) [c] \d", 1)]), (r"(a\):2)", [("a)", 2)]),
        ("(a, [b:1.5)", [("a, ", 1.5), ("b", 1.5 * DOWN)]), ("a (b", [("a ", 1), ("b", UP)]),
        ("a) b]", [("a) b]", 1)]), ("at 10:30, x:2)", [("at 10:30, x:2)", 1)]),
        ("(10:30:1.2)", [("10:30", 1.2)]), ("(a:1.2.3)", [("a:1.2.3", UP)]),
    ],
)  # fmt: skip
def test_a_prompt_is_split_by_its_weights(prompt: str, parts: list[tuple[str, float]]) -> None:
    read = fragments(prompt)

    assert [text for text, _ in read] == [text for text, _ in parts]
    assert [weight for _, weight in read] == pytest.approx([weight for _, weight in parts])
    assert has_weights(prompt) == any(weight != 1 for _, weight in parts)


@pytest.mark.parametrize(
    ("card", "parameters", "message"),
    [
        (CARD, {"prompt_weights": True}, "SD 1.5, SD 2 and SDXL, not GreyPipeline"),
        (replace(CARD, weights_reader="missing"), {"prompt_weights": True}, "pip install compel"),
        (READS, {"prompt_weights": "yes"}, "true or false"),
        (READS, {"prompt_weights": True, "prompt": "(a:-1)"}, "must be 0 or more"),
        (READS, {"prompt_weights": True, "clip_skip": 2}, "clip_skip=1"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(
    card: Any, parameters: dict[str, Any], message: str
) -> None:
    [task] = card.tasks
    task = replace(task, parameters=(*task.parameters, Parameter("clip_skip", "int")))

    with pytest.raises(Rejected, match=message):
        check(
            replace(card, tasks=(task,)), Request(**{"prompt": "a", **parameters}), from_json=True
        )


def test_what_nothing_reads_is_warned_about_and_prose_is_not() -> None:
    def warned(prompt: str, **options: bool) -> str:
        return "\n".join(weights_warning(prompt, "prompt", CARD, **options))

    assert 'prompt has "(cat:1.3)", "(dog:1.3)", drawn as words: weights' in warned(
        "a (cat:1.3), (dog:1.3)"
    )
    assert '"((cat))"' in warned("a ((cat))")
    for prose in ("a cat (black)", "a [sic] cat AND dog", r"a \(cat:1.3\)", "at 10:30"):
        assert not warned(prose)
    assert '"[cat]"' in warned("a [cat]", is_notation=True)
    for edit in ("[a:b:0.5]", "[a|b]", "a BREAK b", "a AND b"):
        assert "editing and composition" in warned(edit, is_notation=True, is_read=True)
    assert not warned("a (cat:1.3) [b] ((c))", is_notation=True, is_read=True)


def test_a_request_says_whether_its_weights_are_read() -> None:
    for wish in (True, False, None):
        assert check(READS, Request("a (b:2)", prompt_weights=wish)).prompt_weights is wish
