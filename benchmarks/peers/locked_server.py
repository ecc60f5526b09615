"""FastAPI and diffusers with a lock: one request at a time, first come, first served.

usage: python -m benchmarks.peers.locked_server FOLDER PORT
"""

import asyncio
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from benchmarks.peers import plain


def create_app(folder: str) -> FastAPI:
    """The server, with its pipeline loaded."""
    pipe, lock, app = plain.load(folder), asyncio.Lock(), FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/v1/images/generations")
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        async with lock:  # asyncio's is fair; one between threads would not be
            [image] = await asyncio.to_thread(plain.draw, pipe, [body])
        return await asyncio.to_thread(plain.answer, image)

    return app


if __name__ == "__main__":
    uvicorn.run(
        create_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning"
    )
