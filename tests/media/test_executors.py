"""Threads shared between tenants: in turn, never all of them, and never for who has left."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.media.executors import FairExecutor, FairSemaphore
from support.fake_hosts import settle


class Users:
    """Tasks that hold a slot until they are told to leave."""

    def __init__(self, slots: FairSemaphore) -> None:
        self.slots, self.holding = slots, list[str]()
        self.told: dict[str, asyncio.Event] = {}  # to leave
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, cost: int = 0) -> None:
        """One a name: its tenant is the first letter."""
        for name in names:
            self.begin(name, cost)
        await settle()

    def begin(self, name: str, cost: int) -> None:
        self.told[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._use(name, cost))

    async def leave(self, name: str) -> None:
        self.told[name].set()
        await settle()

    async def _use(self, name: str, cost: int) -> None:
        await self.slots.acquire(name[0], cost)
        self.holding.append(name)
        try:
            await self.told[name].wait()
        finally:
            self.holding.remove(name)
            self.slots.release(name[0], cost)


async def test_tenants_take_turns_however_much_one_of_them_asks_for() -> None:
    users = Users(FairSemaphore(1, per_tenant=1))
    await users.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")

    order = []
    while users.holding:
        [name] = users.holding
        order.append(name)
        await users.leave(name)

    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_one_tenant_never_has_all_slots() -> None:
    users = Users(FairSemaphore(3, per_tenant=2))
    await users.come(*(f"a{i}" for i in range(100)))
    assert users.holding == ["a0", "a1"]

    await users.come("b1")

    assert users.holding == ["a0", "a1", "b1"]


async def test_costs_together_stay_within_the_budget_and_a_large_one_is_not_passed_by() -> None:
    users = Users(FairSemaphore(9, per_tenant=9, budget=10))
    await users.come("a1", cost=6)
    await users.come("b1", cost=5)
    await users.come("c1", cost=1)
    assert users.holding == ["a1"]

    await users.leave("a1")
    assert users.holding == ["b1", "c1"]

    await users.come("d1", cost=99)
    assert users.holding == ["b1", "c1"]
    await users.leave("b1")
    await users.leave("c1")
    assert users.holding == ["d1"]  # alone it may


async def test_who_leaves_while_waiting_takes_no_turn_and_lets_the_others_pass() -> None:
    users = Users(FairSemaphore(2, per_tenant=2, budget=10))
    await users.come("a1", cost=6)
    await users.come("b1", cost=9)
    await users.come("c1", cost=1)
    assert users.holding == ["a1"]

    users.tasks["b1"].cancel()
    await settle()

    assert users.holding == ["a1", "c1"]


async def test_who_is_cancelled_at_the_moment_of_its_turn_gives_it_on() -> None:
    users = Users(FairSemaphore(1, per_tenant=1))
    await users.come("a1", "b1", "c1")

    users.told["a1"].set()
    await asyncio.sleep(0)  # a1 leaves, b1's turn is set and b1 has not run
    users.tasks["b1"].cancel()
    await settle()

    assert users.holding == ["c1"]


Step = tuple[str, int]  # what happens, and to whom
STEPS = st.tuples(st.sampled_from(["a", "b", "c", "cancel", "leave", "settle"]), st.integers(0, 12))


async def test_a_slot_that_comes_free_is_not_given_to_who_is_being_cancelled() -> None:
    users = Users(FairSemaphore(1, per_tenant=1))
    await users.come("a1", "b1", "c1")

    users.told["a1"].set()
    users.tasks["b1"].cancel()  # it hears of that after a1 has left
    await settle()

    assert users.holding == ["c1"]


@given(st.lists(STEPS, max_size=60))
def test_slots_and_budget_hold_for_any_order_and_nobody_is_forgotten(steps: list[Step]) -> None:
    """Whatever happens between two steps of the event loop, as cancellations do."""

    async def scene() -> None:
        users, costs = Users(FairSemaphore(3, per_tenant=2, budget=10)), dict[str, int]()
        for number, (what, value) in enumerate(steps):
            names = list(users.tasks)
            if what == "settle":
                await settle()
            elif what == "cancel" and names:
                users.tasks[names[value % len(names)]].cancel()
            elif what == "leave" and names:
                users.told[names[value % len(names)]].set()
            elif what in "abc":
                costs[f"{what}{number}"] = value
                users.begin(f"{what}{number}", value)
            check(users, costs)
        for _ in users.tasks:
            await settle()
            check(users, costs)
            for name in users.holding:
                users.told[name].set()
        await settle()
        assert all(task.done() for task in users.tasks.values())
        async with asyncio.timeout(5):
            await users.slots.acquire("a", 10)
            await users.slots.acquire("b")
            await users.slots.acquire("c")

    asyncio.run(scene())


def check(users: Users, costs: dict[str, int]) -> None:
    tenants = [name[0] for name in users.holding]
    assert len(tenants) <= 3
    assert all(tenants.count(one) <= 2 for one in tenants)
    held = [costs[name] for name in users.holding]
    assert sum(held) <= 10 or sum(map(bool, held)) == 1


# Threads


class Slow:
    """Work that runs until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(10)
        return threading.current_thread().name


async def test_work_of_one_tenant_that_never_ends_keeps_no_other_waiting() -> None:
    executor, stuck = FairExecutor("test", 2, per_tenant=1), Slow()
    works = [asyncio.create_task(executor.run("a", stuck)) for _ in range(50)]
    try:
        assert await asyncio.wait_for(executor.run("b", lambda: 7), 5) == 7
    finally:
        stuck.may_end.set()
    assert "test" in await works[0]


async def test_a_thread_stays_taken_until_its_work_has_ended_though_the_caller_left() -> None:
    executor, stuck, next_ = FairExecutor("test", 1, per_tenant=1), Slow(), Slow()
    next_.may_end.set()
    first = asyncio.create_task(executor.run("a", stuck))
    await asyncio.to_thread(stuck.begun.wait, 5)
    first.cancel()
    second = asyncio.create_task(executor.run("a", next_))
    await settle()
    assert not next_.begun.is_set()

    stuck.may_end.set()

    assert await asyncio.wait_for(second, 5)


async def test_work_of_who_has_left_is_never_begun() -> None:
    executor, stuck, never = FairExecutor("test", 1, per_tenant=1), Slow(), Slow()
    first = asyncio.create_task(executor.run("a", stuck))
    gone = asyncio.create_task(executor.run("b", never))
    await settle()
    gone.cancel()
    stuck.may_end.set()
    await first

    assert await executor.run("c", lambda: 7) == 7
    assert not never.begun.is_set()


async def test_an_error_is_the_callers_and_frees_the_thread() -> None:
    executor = FairExecutor("test", 1, per_tenant=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await executor.run("a", lambda: 1 // 0)


async def test_a_tenant_rests_as_long_as_it_has_worked_and_the_others_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now_s = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: now_s)
    executor, long, other = FairExecutor("test", 2, per_tenant=1, rests=True), Slow(), Slow()
    other.may_end.set()
    first = asyncio.create_task(executor.run("a", long))
    await asyncio.to_thread(long.begun.wait, 5)
    second = asyncio.create_task(executor.run("a", other))
    now_s = 3.0
    long.may_end.set()
    await first
    assert await executor.run("b", lambda: 7) == 7

    await settle()
    assert not other.begun.is_set()
    now_s = 6.0
    await second
