"""The rules for requests of texts."""

from typing import Any

import pytest
from PIL import Image

from carpool.errors import Rejected
from carpool.request.card import Parameter, Task
from carpool.request.texts import check_text

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
