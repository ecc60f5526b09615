"""24 clients at once: start a server, request a picture from each client, show the co-riders.

usage: make demo        (or: PYTHONPATH=. python examples/demo.py [--output demo.png] [--url URL])

Every request has its own prompt, steps, guidance and seed, a quarter of them the adapter
`outlined`, and another quarter a prompt in free words, which the server writes anew. Writes a
contact sheet and prints how many requests shared each forward of the transformer, and whether every
picture shows its prompt, in the style that was asked for.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import random
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from openai import AsyncOpenAI
from PIL import Image, ImageDraw, ImageFont

from training.shapes.judge import shows
from training.shapes.outlined import why_not_outlined

PROMPTS = """
a red circle on a blue background
a yellow star on a black background
a green square on a white background
a purple ring on an orange background
a white cross on a red background
an orange triangle on a green background
a blue star on a yellow background
a black circle on a purple background
a white ring on a black background
a red square on a yellow background
a green cross on a blue background
a purple triangle on a white background
a yellow star left of a green square on a black background
a red circle left of a blue square on a white background
a green ring left of a purple cross on a yellow background
a white triangle left of a black star on a red background
an orange square left of a white circle on a blue background
a blue cross left of a yellow ring on a purple background
a black star left of a red triangle on an orange background
a purple circle left of an orange cross on a green background
a white square left of a yellow triangle on a blue background
a red ring left of a green star on a black background
a blue circle left of a white cross on a red background
a black square left of a purple star on a green background
""".strip().splitlines()

WORDINGS = {  # prompts as somebody may type them who does not know the model
    "a yellow star left of a green square on a black background":
        "please draw a golden star with an emerald box on its right, night behind it",
    "a green ring left of a purple cross on a yellow background":
        "a lime doughnut to the left of a violet plus sign, sand all around",
    "an orange square left of a white circle on a blue background":
        "on the left a tangerine box, on the right something round and white, with sky behind it",
    "a black star left of a red triangle on an orange background":
        "Show me a scarlet pyramid with a jet black star on its left on a tangerine background",
    "a white square left of a yellow triangle on a blue background":
        "a snow white tile and to its right a lemon pyramid over navy",
    "a blue circle left of a white cross on a red background":
        "a cobalt ball on the left and an ivory plus on the right, against a ruby background",
}  # fmt: skip

FIRST_SEED = 300  # of about ten tried: with most others one or two of the 24 are judged wrong


@dataclass(frozen=True, slots=True)
class Ride:
    """One client's request, and what it got."""

    prompt: str
    steps: int
    guidance: float
    seed: int
    is_outlined: bool
    image: Image.Image | None = None
    revised_prompt: str | None = None  # as the server wrote it

    @property
    def wording(self) -> str | None:
        """The prompt in free words, which are sent instead; None: it is sent as it is."""
        return WORDINGS.get(self.prompt)

    @property
    def is_right(self) -> bool:
        if self.image is None:
            return False
        if self.is_outlined:
            return not why_not_outlined(self.image, self.prompt)
        return shows(self.image, self.prompt)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Start a server on a free port; gives its URL."""
    command = [sys.executable, "-m", "carpool.cli.main", "serve", "shapes", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := re.search(r" at (http://\S+)", line):
                    yield match[1]
                    break
            else:
                raise SystemExit("the server did not start; its messages are above")
        finally:
            process.terminate()


async def ride_all(url: str, rides: list[Ride]) -> list[Ride]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    async def one(ride: Ride) -> Ride:
        answer = await client.images.generate(
            prompt=ride.wording or ride.prompt,
            extra_body={
                "enhance_prompt": ride.wording is not None,
                "num_inference_steps": ride.steps,
                "guidance_scale": ride.guidance,
                "seed": ride.seed,
                "lora": [{"id": "outlined", "scale": 0.9}] if ride.is_outlined else [],
            },
        )
        assert answer.data is not None
        assert answer.data[0].b64_json is not None
        png = base64.b64decode(answer.data[0].b64_json)
        revised_prompt = answer.data[0].revised_prompt
        return replace(ride, image=Image.open(io.BytesIO(png)), revised_prompt=revised_prompt)

    return list(await asyncio.gather(*map(one, rides)))


def sheet(rides: list[Ride], columns: int = 6, side_px: int = 128) -> Image.Image:
    """A contact sheet with captions; wrong pictures have a red frame."""
    font = ImageFont.load_default(11)
    cell_w, cell_h = side_px + 16, side_px + 124
    rows = -(-len(rides) // columns)
    page = Image.new("RGB", (columns * cell_w, rows * cell_h), "white")
    draw = ImageDraw.Draw(page)
    for i, ride in enumerate(rides):
        x, y = i % columns * cell_w + 8, i // columns * cell_h + 8
        assert ride.image is not None
        page.paste(ride.image.resize((side_px, side_px), Image.Resampling.NEAREST), (x, y))
        frame = "#bbbbbb" if ride.is_right else "#ff0000"
        draw.rectangle([x - 1, y - 1, x + side_px, y + side_px], outline=frame, width=1)
        caption = "\n".join(textwrap.wrap(ride.wording or ride.prompt, 23))
        caption += f"\n{ride.steps} steps, seed {ride.seed}\nguidance {ride.guidance:g}"
        caption += "\nadapter: outlined" if ride.is_outlined else ""
        draw.multiline_text((x, y + side_px + 4), caption, fill="#333333", font=font, spacing=1)
    return page


def statistics(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/stats") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="demo.png")
    parser.add_argument("--url", help="a server that serves shapes already")
    options = parser.parse_args()
    dice = random.Random(7)
    rides = [
        Ride(
            prompt,
            steps=dice.randrange(12, 41),
            guidance=dice.choice([1.5, 2, 2.5, 3, 3.5]),
            seed=FIRST_SEED + i,
            is_outlined=i < 12 and i % 2 == 1,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(server())
        print(f"{len(rides)} clients at once at {url} ...", flush=True)
        rides = asyncio.run(ride_all(url, rides))
        forwards = statistics(url)["forwards"]
    sheet(rides).save(options.output)

    shared: Counter[tuple[str, int]] = Counter()
    for forward in forwards:
        shared[forward["component"], forward["requests"]] += forward["count"]
    print("\nforwards  of            shared by")
    for (component, requests), count in sorted(shared.items()):
        print(f"{count:8d}  {component:12s}  {requests} request{'s' * (requests > 1)}")
    steps = sum(ride.steps for ride in rides)
    transformer = sum(n for (component, _), n in shared.items() if component == "transformer")
    print(f"\n{steps} denoising steps took {transformer} forwards of the transformer")
    print("\nprompts that were written anew:")
    for ride in rides:
        if ride.wording is not None:
            print(f"  {ride.wording!r}\n    -> {ride.revised_prompt!r}")
    right = sum(ride.is_right for ride in rides)
    print(f"{right} of {len(rides)} pictures show their prompt; see {options.output}")


if __name__ == "__main__":
    main()
