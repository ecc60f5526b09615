"""The browser of a file's tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser
