"""Requests from asyncio: wait for several at once, follow one, cancel one; they share forwards.

usage: python examples/asyncio_requests.py
"""

import asyncio

import carpool
from carpool.errors import Cancelled

PROMPTS = ["a red circle on a blue background", "a white star on a black background"]


async def main() -> None:
    with carpool.load("shapes") as engine:
        handles = [
            engine.submit(carpool.Request(prompt, seed=3, num_inference_steps=12))
            for prompt in PROMPTS
        ]
        unwanted = engine.submit(carpool.Request("a green ring on a white background", seed=4))
        async for event in handles[0]:
            print(event.kind, event.step, "of", event.steps)
            if event.step == 3:
                unwanted.cancel()
        for output in await asyncio.gather(*handles):
            output.images[0].save(f"{output.request_id}.png")
            print(output.request_id, "seed", output.seed, f"{output.timings.total_s:.2f} s")
        try:
            await unwanted
        except Cancelled as error:
            print(error)


if __name__ == "__main__":
    asyncio.run(main())
