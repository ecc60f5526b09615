"""Replaced attributes of classes, where others replace them as well."""

from typing import Any

from carpool.engine.patches import Patches


class Base:
    def inherited(self) -> str:
        return "plain"


class Owner(Base):
    def own(self) -> str:
        return "plain"


def doubled(plain: Any) -> Any:
    def method(self: Any) -> str:
        return f"{plain(self)} {plain(self)}"

    return method


def patches() -> Patches:
    return Patches(Owner, {"own": doubled, "inherited": doubled})


def test_the_last_user_puts_the_plain_attributes_back() -> None:
    before, one = dict(vars(Owner)), patches()

    one.add()
    one.add()
    one.drop()
    assert (Owner().own(), Owner().inherited()) == ("plain plain", "plain plain")
    one.drop()

    assert dict(vars(Owner)) == before


def test_what_another_one_replaced_for_a_moment_is_not_put_back_for_good() -> None:
    """A library had its replacement in place as ours was put in, and took it out meanwhile."""
    plain, one = Owner.own, patches()

    Owner.own = lambda self: "for a moment"  # type: ignore[method-assign]
    one.add()
    Owner.own = plain  # type: ignore[method-assign]
    one.drop()

    assert Owner.own is plain
    assert "inherited" not in vars(Owner)


def test_what_another_one_replaces_while_ours_is_in_place_is_left_to_it() -> None:
    plain, one = Owner.own, patches()

    one.add()
    theirs = Owner.own = lambda self: "theirs"  # type: ignore[method-assign]
    one.drop()

    assert Owner.own is theirs
    Owner.own = plain  # type: ignore[method-assign]
