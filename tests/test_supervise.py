"""The front's side of a worker, without one."""

import asyncio
from contextlib import suppress

import pytest

from carpool import frames
from carpool.config import EngineSettings
from carpool.errors import Overloaded
from carpool.frames import Ready
from carpool.supervise import Supervisor
from carpool.types import Job
from hostile import CARD


class Silent(Supervisor):
    """Its worker takes everything and answers nothing."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__("none", settings)
        self.ready, self._state = Ready(CARD, {}, 0.0), "ready"
        self.sent: list[frames.ToWorker] = []

    def _send(self, frame: frames.ToWorker) -> None:
        self.sent.append(frame)


def test_a_worker_that_is_full_is_not_asked_and_one_with_a_place_is() -> None:
    async def story() -> None:
        supervisor = Silent(EngineSettings(max_running=1, max_queue=1))
        waiting = []
        for n in range(2):
            supervisor.check_room()
            waiting.append(asyncio.create_task(supervisor.submit(Job(f"{n}", 1, {}))))
            await asyncio.sleep(0)

        with pytest.raises(Overloaded, match="2 requests wait or run, the most is 1 \\+ 1") as told:
            supervisor.check_room()

        assert told.value.retry_after_s
        waiting.pop().cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        supervisor.check_room()
        waiting.pop().cancel()

    asyncio.run(story())


def test_who_is_given_up_is_cancelled_in_the_worker_once_and_who_is_answered_is_not() -> None:
    async def story() -> list[frames.ToWorker]:
        supervisor = Silent(EngineSettings())
        given_up, answered = (
            asyncio.create_task(supervisor.submit(Job(name, 1, {}))) for name in ("one", "two")
        )
        await asyncio.sleep(0)
        given_up.cancel()
        supervisor._answer("two", Overloaded("no"))
        await asyncio.wait([given_up, answered])
        return supervisor.sent

    sent = asyncio.run(story())

    assert [frame for frame in sent if isinstance(frame, frames.Cancel)] == [frames.Cancel("one")]
