"""The application before a fake worker, on a loopback port, for clients of other libraries."""

import threading
from typing import Any

import uvicorn

from support.app import Grey, app_of


class Timed(Grey):
    """A fake worker, half of whose steps are done."""

    async def timelines(self, request_ids: Any) -> list[dict[str, Any]]:
        moments = {"submitted_at": 0.0, "started_at": 0.0, "ended_at": None}
        more: dict[str, Any] = {"error": None, "queued_s": 0.0, "total_s": 1.0, "phases": []}
        return [{"id": one, "status": "running", "step": 2, "steps": 4, **moments, **more}
                for one in request_ids]  # fmt: skip


class Running:
    """A server of a fake worker on a loopback port, in a thread."""

    def __init__(self, worker: Grey, **settings: Any) -> None:
        self.worker = worker
        config = uvicorn.Config(
            app_of(worker, **settings), port=0, log_level="error", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join()
