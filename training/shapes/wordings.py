"""Free wordings of scenes: texts that users may type instead of a caption.

A wording combines independent choices: an opening, a name for each colour and shape, their
connection, the positions, the name of the background, an ending, and sometimes a typing error. A
tenth of the combinations is held out: `is_held_out`.
"""

import random
from dataclasses import dataclass, replace
from hashlib import sha256

from training.shapes.draw import CANONICAL, PALETTE, SHAPES, Item, Scene, caption, random_style

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "scarlet", "crimson", "ruby", "blood red", "tomato coloured", "bright red"),
    "green": ("green", "emerald", "grass green", "lime", "leaf green", "dark green", "mint"),
    "blue": ("blue", "azure", "navy", "cobalt", "sky blue", "ocean blue", "light blue"),
    "yellow": ("yellow", "lemon", "golden", "gold", "sunny yellow", "canary yellow"),
    "purple": ("purple", "violet", "lilac", "plum", "lavender", "magenta"),
    "orange": ("orange", "tangerine", "pumpkin coloured", "amber", "carrot coloured"),
    "black": ("black", "pitch black", "jet black", "coal black", "ink black"),
    "white": ("white", "snow white", "ivory", "milky white", "chalk white"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "disk", "dot", "ball", "round thing", "round shape", "full moon"),
    "square": ("square", "box", "block", "tile", "square thing", "cube", "four sided shape"),
    "triangle": ("triangle", "pyramid", "three cornered shape", "wedge", "triangular thing"),
    "star": ("star", "five pointed star", "starfish", "pentagram", "star shape", "little star"),
    "ring": ("ring", "hoop", "doughnut", "donut", "loop", "circle with a hole", "wheel rim"),
    "cross": ("cross", "plus", "plus sign", "addition sign", "plus shape", "swiss cross"),
}
SHAPE_TRAITS: dict[str, tuple[str, ...]] = {  # "something TRAIT and COLOUR"
    "circle": ("round", "circular", "ball shaped", "perfectly round"),
    "square": ("square", "boxy", "with four equal sides", "box shaped"),
    "triangle": ("triangular", "with three corners", "three sided", "pyramid shaped"),
    "star": ("star shaped", "with five points", "starry", "like a star"),
    "ring": ("ring shaped", "round with a hole", "like a doughnut", "hollow and round"),
    "cross": ("cross shaped", "like a plus sign", "plus shaped", "shaped like a cross"),
}
PLACES: dict[str, tuple[str, ...]] = {  # backgrounds that imply a colour
    "red": ("lava all around", "a sea of tomatoes"),
    "green": ("grass behind it", "a meadow behind it", "a lawn all around", "a forest behind it"),
    "blue": ("sky behind it", "the sea behind it", "the sky in the back", "water all around"),
    "yellow": ("sand all around", "a wheat field behind it", "a desert behind it"),
    "purple": ("a lavender field behind it", "heather all around"),
    "orange": ("a sunset behind it", "pumpkins all around"),
    "black": (
        "night behind it",
        "the night sky behind it",
        "darkness all around",
        "outer space behind it",
    ),
    "white": (
        "snow all around",
        "a snowy field behind it",
        "a blank page behind it",
        "clouds all around",
    ),
}
OPENINGS = (
    "", "", "", "draw ", "please draw ", "paint ", "i want ", "i'd like ", "give me ", "show me ",
    "can you make ", "could you draw me ", "make a picture of ", "a picture of ", "an image of ",
    "picture this: ", "let's have ", "we need ", "how about ", "a simple drawing of ", "there is ",
)  # fmt: skip
ENDINGS = (
    "",
    "",
    "",
    "",
    " please",
    " thanks",
    ", thank you",
    "!",
    ".",
    " if you can",
    ", nothing else",
)
BACKGROUNDS = (
    " on a {c} background", " on {c}", " against a {c} background", " in front of a {c} wall",
    " with a {c} background", ", {c} background", " over {c}", ", background {c}",
    " on a {c} canvas", ", everything behind it {c}", " with {c} behind it", " on {c} paper",
    ", all else {c}",
)  # fmt: skip
PAIRS = (  # left and right item
    "{l} left of {r}", "{l} to the left of {r}", "{r} right of {l}", "{r} to the right of {l}",
    "{l} and to its right {r}", "{r} and to its left {l}", "on the left {l}, on the right {r}",
    "on the right {r}, on the left {l}", "{l} followed by {r}", "{l} with {r} on its right",
    "{r} with {l} on its left", "{l} on the left and {r} on the right",
    "{r} on the right and {l} on the left", "{l} next to {r}, from left to right",
    "first {l}, then {r}",
)  # fmt: skip
ADJECTIVES = (
    "",
    "",
    "",
    "",
    "big ",
    "small ",
    "nice ",
    "lovely ",
    "single ",
    "large ",
    "tiny ",
    "shiny ",
)
_HELD_OUT_PERCENT = 10


@dataclass(frozen=True, slots=True)
class Wording:
    """A wording and its caption."""

    text: str
    caption: str
    choices: str  # the combination of phrases, without typing errors

    @property
    def is_held_out(self) -> bool:
        """Return whether this combination is held out from training; deterministic."""
        digest = int.from_bytes(sha256(self.choices.encode()).digest()[:4], "big")
        return digest % 100 < _HELD_OUT_PERCENT


def wording(rng: random.Random) -> Wording:
    """Draw a random scene, and word it."""
    colours = rng.sample(list(PALETTE), len(PALETTE))
    count = 1 if rng.random() < 0.5 else 2
    items = tuple(Item(rng.choice(colours[1:]), rng.choice(SHAPES)) for _ in range(count))
    scene = Scene(colours[0] if rng.random() < 0.75 else None, items)
    text = _captioned(scene, rng) if rng.random() < 0.1 else _worded(scene, rng)
    slipped = _slip(text, rng) if rng.random() < 0.15 else text
    if rng.random() < 0.3:
        slipped = slipped[:1].upper() + slipped[1:]
    return Wording(slipped, caption(scene, CANONICAL), text)


def _captioned(scene: Scene, rng: random.Random) -> str:
    """A caption in any style, to be rewritten to the canonical one."""
    return caption(scene, replace(random_style(rng), background_clause=True))


def _worded(scene: Scene, rng: random.Random) -> str:
    phrases = [_phrase(item, rng) for item in scene.items]
    text = phrases[0]
    if len(phrases) == 2:
        text = rng.choice(PAIRS).format(l=phrases[0], r=phrases[1])
    return rng.choice(OPENINGS) + text + _background(scene.background, rng) + rng.choice(ENDINGS)


def _phrase(item: Item, rng: random.Random) -> str:
    colour = rng.choice(COLOUR_WORDS[item.colour])
    if rng.random() < 0.25:
        trait = rng.choice(SHAPE_TRAITS[item.shape])
        return rng.choice((f"something {trait} and {colour}", f"something {colour} and {trait}"))
    shape = rng.choice(SHAPE_WORDS[item.shape])
    if rng.random() < 0.15:
        return f"{_article(shape)}{shape} in {colour}"
    words = f"{rng.choice(ADJECTIVES)}{colour} {shape}"
    return (_article(words) if rng.random() < 0.85 else "") + words


def _article(words: str) -> str:
    return "an " if words[0] in "aeiou" else "a "


def _background(colour: str | None, rng: random.Random) -> str:
    if colour is None:
        return ""
    if rng.random() < 0.3:
        return rng.choice((", ", " with ", ", with ")) + rng.choice(PLACES[colour])
    return rng.choice(BACKGROUNDS).format(c=rng.choice(COLOUR_WORDS[colour]))


def _slip(text: str, rng: random.Random) -> str:
    """Double or omit one letter, or swap it with the next."""
    at = rng.randrange(len(text) - 1)
    before, letter, after = text[:at], text[at], text[at + 1 :]
    if not letter.isalpha():
        return text
    return rng.choice(
        (before + 2 * letter + after, before + after, before + after[0] + letter + after[1:])
    )
