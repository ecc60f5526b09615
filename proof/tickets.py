"""The clients' requests, each with its expected picture, drawn alone in advance.

All tickets have different scenes, so the judge recognises a picture that belongs to another
ticket.
"""

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
from PIL import Image, ImageChops

from training.shapes.draw import prompts
from training.shapes.judge import shows

ENDPOINT = "/v1/images/generations"
STEPS = (6, 8, 12, 16)
DEADLINE_S = 600.0  # orders the work; far enough to avoid refusals
EXACT = ("--numerics", "exact")  # flags of the server: batching changes no bit of a picture

Verdict = Literal["right", "foreign", "spoiled"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request and its expected picture."""

    body: dict[str, Any]
    picture: Image.Image

    @property
    def prompt(self) -> str:
        text: str = self.body["prompt"]
        return text

    def verdict(self, file: bytes, tickets: Sequence["Ticket"]) -> Verdict:
        """Judge a received picture of this ticket.

        Returns:
            foreign: it shows another ticket's scene. spoiled: it is neither foreign nor the
            expected picture.
        """
        picture = decoded(file)
        if gap(picture, self.picture) == 0 and shows(picture, self.prompt):
            return "right"
        prompts = {ticket.prompt for ticket in tickets} - {self.prompt}
        return "foreign" if any(shows(picture, prompt) for prompt in prompts) else "spoiled"


async def tickets(
    http: httpx2.AsyncClient, count: int, seed: int, models: Sequence[str] = ()
) -> list[Ticket]:
    """Let a server draw requests in sequence; keeps those that the judge finds right.

    Args:
        models: models of a fleet; requests then have priorities, some also deadlines.

    Raises:
        RuntimeError: it draws too few right pictures.
    """
    rng, tickets = random.Random(seed), list[Ticket]()
    for number, prompt in enumerate(prompts(count)):
        body = {"prompt": prompt, "seed": number, "num_inference_steps": rng.choice(STEPS)}
        if models:
            body |= {"model": rng.choice(models), "priority": rng.randint(-5, 5)}
            body |= {"deadline_s": DEADLINE_S} if rng.random() < 1 / 3 else {}
        answer = await http.post(ENDPOINT, json=body)
        answer.raise_for_status()
        picture = decoded(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        if shows(picture, prompt):
            tickets.append(Ticket(body, picture))
        if len(tickets) == count:
            return tickets
    raise RuntimeError(f"only {len(tickets)} pictures are right, {count} are needed")


def decoded(file: bytes) -> Image.Image:
    """Decode a picture file."""
    with Image.open(io.BytesIO(file)) as image:
        return image.convert("RGB")


def gap(first: Image.Image, second: Image.Image) -> int:
    """The largest difference between two pictures, 0-255; pictures of two sizes differ by 255."""
    if first.size != second.size:
        return 255
    bands = ImageChops.difference(first, second).getextrema()
    return max(int(high) for _, high in bands)  # type: ignore[misc]
