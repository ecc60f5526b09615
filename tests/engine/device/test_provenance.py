"""What was put together of known parts is known, until one of them changes."""

from support.pretended.process import on_pretended_device


@on_pretended_device
def test_tensors_put_together_alike_have_one_digest_without_a_look_at_the_device() -> None:
    from types import SimpleNamespace
    from typing import Any

    import torch

    from carpool.engine import pinned_copies, provenance
    from carpool.engine.fiber import Fiber, Returned
    from carpool.engine.fuse import Fuser
    from support.pretended.report import REPORT

    context: Any = SimpleNamespace(enter=pinned_copies.watch, leave=pinned_copies.ignore)
    fuser = Fuser()

    def in_fiber(body: Any) -> Any:
        came = Fiber(body, context).start()
        assert isinstance(came, Returned)
        return came.value

    first, second = (torch.arange(n, device="pretended").reshape(1, n) for n in (4, 6))
    digests = {fuser.digests.of(one) for one in (first, second)}
    REPORT.clear()
    steps = [in_fiber(lambda: torch.cat([first, second], dim=-1)) for _ in range(3)]
    known = {fuser.digests.of(one) for one in steps}
    assert not REPORT.syncs
    turned = in_fiber(lambda: torch.cat([second, first], dim=1))
    assert len(known) == 1
    assert len(digests | known | {fuser.digests.of(turned)}) == 4

    first.add_(1)  # what the others were made of is gone
    assert provenance.parts_of(steps[0]) is None
    fresh = in_fiber(lambda: torch.cat([first, second], dim=1))
    assert fuser.digests.of(fresh) not in known


@on_pretended_device
def test_only_the_code_of_a_request_sees_a_torch_cat_that_remembers() -> None:
    # a forward must not: compiled graphs are valid for the function that they were made with
    import torch

    from carpool.engine.fiber import Fiber, park
    from carpool.engine.isolation import Isolation

    plain, seen = torch.cat, []

    def body() -> None:
        seen.append(torch.cat)
        park(None)
        seen.append(torch.cat)

    isolation = Isolation({}, torch.device("pretended"))
    isolation.install()
    try:
        assert torch.cat is plain
        fiber = Fiber(body, isolation.context(seed=0))
        fiber.start()
        assert torch.cat is plain
        fiber.resume(None)
    finally:
        isolation.remove()

    assert torch.cat is plain
    assert len(seen) == 2
    assert plain not in seen


@on_pretended_device
def test_the_source_of_a_copy_is_kept_outside_of_pinned_memory() -> None:
    import weakref
    from types import SimpleNamespace
    from typing import Any

    import torch

    from carpool.engine import pinned_copies, provenance
    from carpool.engine.fiber import Fiber, Returned

    context: Any = SimpleNamespace(enter=pinned_copies.watch, leave=pinned_copies.ignore)
    values, pinned = torch.arange(4.0), []
    plain: Any = pinned_copies._pinned

    def note(value: Any) -> Any:
        staged = plain(value)
        pinned.append(weakref.ref(staged))
        return staged

    pinned_copies._pinned = note
    pinned_copies.TO.add()
    try:
        came = Fiber(lambda: values.to("pretended"), context).start()
    finally:
        pinned_copies.TO.drop()
        pinned_copies._pinned = plain

    assert isinstance(came, Returned)
    source = provenance.source_of(came.value)
    assert source is not None
    assert torch.equal(source, values)
    assert [memory() for memory in pinned] == [None]
