"""Functions that a worker fetches: only what is named by its own hash is unpickled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from stoker.exceptions import SerializationError
from stoker.runtime.tasks.functions import pickled
from stoker.runtime.worker.invoke import Invoker


def invoker(**stored: bytes) -> Invoker:
    async def load_function(digest: str) -> bytes:
        return stored[f"f{digest}"]

    io, clients, other = MagicMock(), MagicMock(), MagicMock()
    other.worker_process_setup = ""
    io.run = lambda coroutine, timeout_s: asyncio.run(coroutine)
    clients.load_function = load_function
    return Invoker(other, io, other, clients, other, other, other, other, other, other)


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return Path.touch, (self.flag,)


def test_a_function_under_anothers_name_is_not_read(tmp_path: Path) -> None:
    good, name, _ = pickled(len, what="len")
    bad, other, _ = pickled(Bomb(tmp_path / "ran"), what="bomb")
    worker = invoker(**{f"f{name}": bad})
    for blob in (b"", bad, bad + good):
        with pytest.raises(SerializationError, match="not what it is named by"):
            worker.load_function(name, blob)
    assert not (tmp_path / "ran").exists()
    assert worker.load_function(name, good) is len
    worker = invoker(**{f"f{name}": good, f"f{other}": bad})
    assert worker.load_function(name) is len
    worker.load_function(other)
    assert (tmp_path / "ran").exists(), "under its own name it is what its sender meant"
