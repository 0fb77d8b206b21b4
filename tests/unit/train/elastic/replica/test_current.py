"""The context of a thread: its own, and an error with the fix where there is none."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stoker.exceptions import ConflictError
from stoker_train.elastic.replica.current import current, set_current


def test_each_thread_has_its_own() -> None:
    found: list[Any] = []

    def loop() -> None:
        mine: Any = object()
        set_current(mine)
        found.append(current() is mine)
        set_current(None)
        with pytest.raises(ConflictError, match="runs no loop of an elastic trainer"):
            current()
        found.append(True)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert found == [True, True]
    with pytest.raises(ConflictError):
        current()
