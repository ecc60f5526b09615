"""Every test of the matrix is watched: see `support.watchdog`."""

from collections.abc import Iterator

import pytest

from support.watchdog import watching


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    with watching():
        yield
