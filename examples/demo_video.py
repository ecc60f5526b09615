"""Eight videos at once, without a server: which shared forwards, and whether they are right.

usage: make demo        (or: PYTHONPATH=. python examples/demo_video.py [--output demo-video.mp4])

Writes one video of all clips side by side.
"""

import argparse
from collections import Counter

from PIL import Image

import carpool
from carpool.media import encode_video
from training.shapes.video.judge import why_not

PROMPTS = """
a red circle moving right on a black background
a yellow square moving left on a blue background
a blue triangle moving up on a white background
a green cross moving down on a black background
an orange circle moving up on a blue background
a purple square moving right on a white background
a red triangle moving left on a white background
a yellow cross moving down on a blue background
""".strip().splitlines()
COLUMNS, ZOOM, FPS = 4, 3, 6


def wall(clips: list[list[Image.Image]]) -> list[Image.Image]:
    """The frames of a video that shows all clips, in rows of `COLUMNS`."""
    side = clips[0][0].width * ZOOM + ZOOM
    frames = []
    for moment in zip(*clips, strict=True):
        page = Image.new("RGB", (COLUMNS * side, len(clips) // COLUMNS * side), "gray")
        for i, frame in enumerate(moment):
            big = frame.resize((side - ZOOM, side - ZOOM), Image.Resampling.NEAREST)
            page.paste(big, (i % COLUMNS * side, i // COLUMNS * side))
        frames.append(page)
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="demo-video.mp4")
    options = parser.parse_args()
    asked = [
        carpool.Request(prompt, seed=seed, num_inference_steps=10 + seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    with carpool.load("shapes-video") as engine:
        clips = [output.frames[0] for output in engine.generate(asked, output_type="pil")]
        forwards = engine.statistics()["forwards"]
    with open(options.output, "wb") as file:
        file.write(encode_video(wall(clips), FPS))

    shared: Counter[int] = Counter()
    for forward in forwards:
        if forward["component"] == "transformer":
            shared[forward["requests"]] += forward["count"]
    for requests, count in sorted(shared.items()):
        print(f"{count:8d} forwards of the transformer for {requests} requests")
    wrong = [why_not(clip, prompt) for clip, prompt in zip(clips, PROMPTS, strict=True)]
    print(f"{wrong.count('')} of {len(clips)} clips show their prompt; see {options.output}")


if __name__ == "__main__":
    main()
