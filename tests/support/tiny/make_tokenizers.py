"""Write the tokenizers that the tiny checkpoints share: `python -m tiny.make_tokenizers`.

They are committed, a few kilobytes each, and built here from fixed lists rather than
trained: a trained vocabulary differs from one process to the next. Nothing here knows
about models; the checkpoints read the vocabulary sizes from the saved files.
"""

import string
from itertools import pairwise
from pathlib import Path

import transformers
from tokenizers import pre_tokenizers

FOLDER = Path(__file__).parent / "tokenizers"
WORDS = [
    *("a", "an", "the", "of", "in", "on", "and", "with"),
    *("photo", "painting", "cat", "dog", "horse", "moon", "rain", "sky", "balloon"),
    *("astronaut", "riding", "dance", "monkey", "red", "blue", "green"),
    *("bad", "low", "quality", "blurry"),
]
HEADER_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]
CHAT_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
CHAT_WORDS = [  # of what pipelines lay around a prompt
    *("system", "user", "assistant", "Describe", "the", "image", "by", "detailing", "color"),
    *("shape", "size", "texture", "quantity", "text", "spatial", "relationships", "of", "objects"),
    *("and", "background", "key", "features", "input", "then", "explain", "how", "user's"),
    *("instruction", "should", "alter", "or", "modify", "Generate", "a", "new", "that", "meets"),
    *("requirements", "while", "maintaining", "consistency", "with", "original", "where"),
    *("appropriate", "You", "are", "an", "AI", "reasons", "about", "descriptions", "give"),
    *("structured", "responses", "focusing", "on", "object", "attribution", "actions", "without"),
    *("speculation", "make", "to", "bigger", "Picture", "(", "),", "'s"),
]
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}\
{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def clip() -> transformers.CLIPTokenizer:
    """Build a byte-level BPE: most of `WORDS` are one token, other text falls to its bytes.

    Start is 0 and end, also the padding, 1: an end of 2 has another meaning to CLIP.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters)]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        head = word[0]
        for letter in [*word[1:-1], word[-1] + "</w>"][: len(word) - 1]:
            merges.append((head, letter))
            head += letter
    merges = list(dict.fromkeys(merges))
    tokens += dict.fromkeys(left + right for left, right in merges)
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5() -> transformers.T5TokenizerFast:
    """Build a Unigram model of `WORDS` and the printable ASCII characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS]
    pieces += [(character, -6.0) for character in sorted(string.printable) if character > " "]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def gemma() -> transformers.GemmaTokenizer:
    """Build a BPE of `WORDS` and the printable ASCII characters; other text falls to its bytes."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    vocab, merges = spelled(specials, WORDS)
    return transformers.GemmaTokenizer(
        vocab=vocab, merges=merges, model_max_length=1024, add_bos_token=True
    )


def llama() -> transformers.LlamaTokenizer:
    """Build a BPE like Gemma's, with Llama 3's headers, of which each role is one token."""
    specials = ["<unk>", "<s>", "</s>", "<pad>", *HEADER_TOKENS]
    vocab, merges = spelled(specials, ["system", "user", "assistant", *WORDS])
    return transformers.LlamaTokenizer(
        vocab=vocab, merges=merges, pad_token="<pad>", extra_special_tokens=HEADER_TOKENS,
        add_prefix_space=False, padding_side="right", model_max_length=1024,
    )  # fmt: skip


def spelled(specials: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges that spell `words` letter by letter, "▁" being a blank."""
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *(character for character in sorted(string.printable) if character > " ")]
    heads = [(word[:i], word[i]) for word in words for i in range(1, len(word))]
    merges = list(dict.fromkeys([*heads, *(("▁", word) for word in words)]))
    tokens += dict.fromkeys(left + right for left, right in merges)
    return {token: index for index, token in enumerate(tokens)}, merges


def qwen2() -> transformers.Qwen2Tokenizer:
    """Build a byte-level BPE: all of `WORDS`, and all that pipelines add to them, are one token.

    So their templates come to about as many tokens as with the real one, from which they cut a
    fixed number.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], int] = {}
    for word in [*WORDS, *CHAT_WORDS]:
        for spelled in (word, "Ġ" + word):  # Ġ is a blank
            pieces = merged(list(spelled), merges)
            while len(pieces) > 1:
                merges[pieces[0], pieces[1]] = len(merges)
                pieces = merged(pieces, merges)
    tokens = dict.fromkeys([*CHAT_TOKENS, *letters, *(left + right for left, right in merges)])
    return transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges),
        eos_token="<|im_end|>", extra_special_tokens=CHAT_TOKENS, chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )  # fmt: skip


def merged(pieces: list[str], merges: dict[tuple[str, str], int]) -> list[str]:
    """Join what `merges` join, the first of them first."""
    while pairs := [pair for pair in pairwise(pieces) if pair in merges]:
        at = list(pairwise(pieces)).index(min(pairs, key=merges.__getitem__))
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]
    return pieces


TOKENIZERS = {"clip": clip, "t5": t5, "gemma": gemma, "llama": llama, "qwen2": qwen2}

if __name__ == "__main__":
    for name, build in TOKENIZERS.items():
        build().save_pretrained(FOLDER / name)
