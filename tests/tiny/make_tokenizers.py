"""Write the tokenizers that the tiny checkpoints share: `python -m tiny.make_tokenizers`.

They are committed, a few kilobytes each, and built here from fixed lists rather than
trained: a trained vocabulary differs from one process to the next. Nothing here knows
about models; the checkpoints read the vocabulary sizes from the saved files.
"""

import string
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5TokenizerFast

FOLDER = Path(__file__).parent / "tokenizers"
WORDS = [
    *("a", "an", "the", "of", "in", "on", "and", "with"),
    *("photo", "painting", "cat", "dog", "horse", "moon", "rain", "sky", "balloon"),
    *("astronaut", "riding", "dance", "monkey", "red", "blue", "green"),
    *("bad", "low", "quality", "blurry"),
]


def clip() -> CLIPTokenizer:
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
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5() -> T5TokenizerFast:
    """Build a Unigram model of `WORDS` and the printable ASCII characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS]
    pieces += [(character, -6.0) for character in sorted(string.printable) if character > " "]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


TOKENIZERS = {"clip": clip, "t5": t5}

if __name__ == "__main__":
    for name, build in TOKENIZERS.items():
        build().save_pretrained(FOLDER / name)
