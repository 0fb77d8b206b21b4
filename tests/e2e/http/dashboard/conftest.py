"""The browser of the tests of the dashboard, and where their pictures go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.http.dashboard._browser import chromium

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.http.dashboard._browser import Screen


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def picture() -> Callable[[Screen, str], None]:
    """Makes a picture for the documentation, if STOKER_TEST_SCREENSHOTS names a folder for them."""
    folder = os.environ.get("STOKER_TEST_SCREENSHOTS", "")

    def take(screen: Screen, name: str) -> None:
        if folder:
            screen.save(Path(folder) / f"dashboard-{name}.png")

    return take
