"""FastAPI and diffusers with a lock: one request at a time, first come, first served.

usage: python -m benchmarks.others.locked_server PORT
"""

import asyncio
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from benchmarks.others import plain


def create_app() -> FastAPI:
    """The server, with its pipeline loaded."""
    pipe, lock, app = plain.load(), asyncio.Lock(), FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/v1/images/generations")
    async def generate(body: plain.Body) -> dict[str, Any]:
        async with lock:  # asyncio's lock is fair; a thread lock is not
            [image] = await asyncio.to_thread(plain.draw, pipe, [body])
        return await asyncio.to_thread(plain.answer, image)

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
