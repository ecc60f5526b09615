"""Write docs/how-it-works.svg: the life of three requests that share forwards.

usage: make docs     (or: python docs/make_drawing.py)

The schedule below equals the engine's; positions are computed from it. Colours follow the reader's
light or dark theme; the drawing has its own background.
"""

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).with_name("how-it-works.svg")
WIDTH, LEFT, TOP, LANE, PITCH, GAP = 1000, 160, 96, 44, 66, 12  # SVG units
LANES = {"A": "4 steps", "B": "5 steps", "C": "3 steps, LoRA"}
PIXELS = {"encode": 46, "denoise": 60, "decode": 54}  # width of a forward of one row
ROW = 9  # additional width of each further row

STYLE = """
.page { fill: #ffffff; stroke: #d0d7de }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
.small { font-size: 12.5px } .quiet { fill: #59636e } .title { font-size: 19px; font-weight: 600 }
.name { font-size: 15px; font-weight: 600 } .step { font-size: 13px; font-weight: 600 }
.line { stroke: #d0d7de; stroke-width: 2 } .arrow { stroke: #59636e; stroke-width: 1.6; fill: none }
.tip { fill: #59636e } .box { fill: #f6f8fa; stroke: #d0d7de }
.encode { fill: #d7f2e6; stroke: #1a7f5a } .denoise { fill: #dbe9ff; stroke: #1f5fbf }
.decode { fill: #ffe6cf; stroke: #b35900 } .chip { fill: #ffffff }
.note { fill: #6639ba } .on { fill: #ffffff; font-size: 12px; font-weight: 700 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc }
  .quiet { fill: #9ba5b0 } .line { stroke: #3d444d } .arrow { stroke: #9ba5b0 } .tip { fill: #9ba5b0 }
  .box { fill: #151b23; stroke: #3d444d }
  .encode { fill: #0f3a2b; stroke: #3fb98a } .denoise { fill: #12294f; stroke: #6ca6ff }
  .decode { fill: #46290c; stroke: #f0a05a } .chip { fill: #0d1117 }
  .note { fill: #8957e5 } .on { fill: #ffffff }
}
"""  # noqa: E501


@dataclass(frozen=True)
class Forward:
    """One forward of the drawing: its phase, and each request's step in it ('': none)."""

    phase: str
    steps: dict[str, str]

    @property
    def width(self) -> int:
        return PIXELS[self.phase] + ROW * (len(self.steps) - 1)


FORWARDS = (
    Forward("encode", {"A": ""}),
    Forward("denoise", {"A": "1/4"}),
    Forward("encode", {"B": ""}),
    Forward("denoise", {"A": "2/4", "B": "1/5"}),
    Forward("denoise", {"A": "3/4", "B": "2/5"}),
    Forward("encode", {"C": ""}),
    Forward("denoise", {"A": "4/4", "B": "3/5", "C": "1/3"}),
    Forward("decode", {"A": ""}),
    Forward("denoise", {"B": "4/5", "C": "2/3"}),
    Forward("denoise", {"B": "5/5", "C": "3/3"}),
    Forward("decode", {"B": "", "C": ""}),
)
ARRIVES = {"A": (0, -0.3), "B": (1, 0.35), "C": (4, 0.45)}  # forward, fraction of its width
NOTES = (  # number, forward, lane, text
    (1, 1, "B", "B arrives during a step, and joins at the next one."),
    (2, 3, "A", "A at step 2 and B at step 1: one forward of two rows."),
    (3, 6, "C", "Three requests, three settings, one adapter: still one forward."),
    (4, 7, "A", "A is done: its row is free at once, the others go on."),
    (5, 10, "C", "B and C end together, and share the decoding, too."),
)


def alone() -> int:
    """The number of forwards for the same requests in sequence."""
    return sum(len(forward.steps) for forward in FORWARDS)


def text(x: float, y: float, words: str, style: str = "small", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, style: str, radius: int = 7) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
        f'class="{style}"/>'
    )


def line(x: float, y: float, to_x: float, to_y: float, style: str = "line") -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" class="{style}"/>'


def arrow(x: float, y: float, to_x: float) -> str:
    tip = f"{to_x:g},{y:g} {to_x - 8:g},{y - 4.5:g} {to_x - 8:g},{y + 4.5:g}"
    return line(x, y, to_x - 6, y, "arrow") + f'<polygon points="{tip}" class="tip"/>'


def number(x: float, y: float, of: int) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="9" class="note"/>' + text(
        x, y + 4.2, str(of), "on", "middle"
    )


def lane_y(name: str) -> float:
    return TOP + PITCH * list(LANES).index(name)


def starts() -> list[float]:
    """The left edge of each forward."""
    edges, x = [], float(LEFT + 30)
    for forward in FORWARDS:
        edges.append(x)
        x += forward.width + GAP
    return edges


def timeline() -> list[str]:
    """Lanes, with the forwards above and the device below."""
    edges = starts()
    parts = [text(24, 40, f"{len(FORWARDS)} forwards instead of {alone()}", "title")]
    parts.append(text(24, 62, "Time runs to the right; a block is one forward, over all requests "
                              "that share it.", "small quiet"))  # fmt: skip
    for key, phase in ((690, "encode"), (812, "denoise"), (914, "decode")):
        name = {"encode": "text encoder", "denoise": "denoiser", "decode": "VAE"}[phase]
        parts += [rect(key, 29, 16, 14, phase, 3), text(key + 22, 41, name)]
    for name, description in LANES.items():
        y, (at, share) = lane_y(name), ARRIVES[name]
        begin = edges[at] + share * FORWARDS[at].width
        last = max(i for i, forward in enumerate(FORWARDS) if name in forward.steps)
        end = edges[last] + FORWARDS[last].width
        parts += [
            text(24, y + 19, f"Request {name}", "name"),
            text(24, y + 37, description, "small quiet"),
        ]
        parts += [line(begin, y + LANE / 2, end, y + LANE / 2)]
        parts.append(f'<circle cx="{begin:g}" cy="{y + LANE / 2:g}" r="4.5" class="tip"/>')
    device = TOP + PITCH * len(LANES) + 4
    parts += [text(24, device + 17, "Device", "name"), line(LEFT, device + 32, 980, device + 32)]
    for x, forward in zip(edges, FORWARDS, strict=True):
        names = list(forward.steps)
        top: float = lane_y(names[0])
        bottom: float = lane_y(names[-1]) + LANE
        parts.append(rect(x, top, forward.width, bottom - top, forward.phase))
        for name in names:
            step = forward.steps[name] or name
            parts.append(rect(x + 6, lane_y(name) + 9, forward.width - 12, 26, "chip", 5))
            label = f"{name} {step}" if forward.steps[name] else step
            middle = x + forward.width / 2
            parts.append(text(middle, lane_y(name) + 26.5, label, "step", "middle"))
        rows = len(names)
        parts.append(rect(x, device + 31 - 9 * rows, forward.width, 9 * rows, forward.phase, 2))
        parts.append(text(x + forward.width / 2, device + 49, str(rows), "small quiet", "middle"))
    parts.append(text(24, device + 49, "rows", "small quiet"))
    for of, at, name, _ in NOTES:
        share = ARRIVES[name][1] if at == ARRIVES[name][0] else 0.5
        parts.append(number(edges[at] + share * FORWARDS[at].width, lane_y(name) - 2, of))
    for index, (of, _, _, words) in enumerate(NOTES):
        x, y = 24 + 470 * (index % 2), device + 84 + 26 * (index // 2)
        parts += [number(x + 9, y - 4, of), text(x + 26, y, words)]
    return parts


def closer(y: float) -> list[str]:
    """A close-up of the forward with three rows."""
    parts = [line(24, y, 976, y), text(24, y + 34, "One of these forwards, closer", "title")]
    steps = (
        (24, 190, "1. Fibers park"), (258, 150, "2. Policy"),
        (452, 220, "3. One forward"), (716, 260, "4. Split, and resume"),
    )  # fmt: skip
    for x, width, title in steps:
        parts += [rect(x, y + 52, width, 178, "box", 9), text(x + 14, y + 76, title, "name")]
    for left, right in pairwise(steps):
        parts.append(arrow(left[0] + left[1] + 8, y + 141, right[0] - 8))
    parked = (("A 4/4", "guidance 3.5"), ("B 3/5", "guidance 7"), ("C 1/3", "with LoRA"))
    for index, (name, description) in enumerate(parked):
        row = y + 92 + 34 * index
        parts += [rect(38, row, 62, 26, "denoise", 5), text(69, row + 17.5, name, "step", "middle")]
        parts.append(text(108, row + 17.5, description, "small quiet"))
        parts.append(rect(466, row, 62, 26, "denoise", 5))
        parts.append(text(497, row + 17.5, name, "step", "middle"))
        parts.append(arrow(533, row + 13, 562))
        parts += [
            rect(730, row, 62, 26, "denoise", 5),
            text(761, row + 17.5, name, "step", "middle"),
        ]
    parts.append(text(38, y + 214, "each at a module call", "small quiet"))
    for index, words in enumerate(("one fuse key:", "may they share?", "", "learned seconds:",
                                   "is one more row", "worth its time?")):  # fmt: skip
        parts.append(text(272, y + 104 + 20 * index, words))
    parts.append(rect(566, y + 92, 92, 94, "denoise", 7))
    parts.append(text(612, y + 136, "denoiser", "step", "middle"))
    parts.append(text(612, y + 154, "unmodified", "small quiet", "middle"))
    parts.append(text(466, y + 214, "stacked along the batch axis", "small quiet"))
    for index, words in enumerate(("its pipeline's own code", "runs on: scheduler step,",
                                   "callbacks, next call,", "and parks again")):  # fmt: skip
        parts.append(text(806, y + 104 + 24 * index, words))
    parts.append(text(730, y + 214, "a failure would end one request only", "small quiet"))
    return parts


def page() -> str:
    height = 706
    label = f"Three requests share {len(FORWARDS)} forwards; alone they would take {alone()}."
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(label)}">',
        f"<style>{STYLE}</style>", rect(1, 1, WIDTH - 2, height - 2, "page", 12),
        *timeline(), *closer(456), "</svg>", "",
    ])  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page())
