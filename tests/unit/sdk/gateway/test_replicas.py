"""The replica of the gcs that connections are passed on to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.gateway import replicas as module
from stoker.gateway.replicas import GcsReplicas
from stoker_wire.errors import UnavailableError
from stoker_wire.settings import Settings

ONE, TWO = "http://one:1", "http://two:1"


class Opened:
    """Something joined with a replica."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def abort(self) -> None:
        self.ended.set()


async def test_one_that_cannot_be_reached_is_passed_over() -> None:
    down: set[str] = {ONE}
    asked: list[str] = []

    async def dial(url: str) -> Any:
        asked.append(url)
        if url in down:
            raise UnavailableError(f"{url} is down")
        return url

    found = GcsReplicas(Settings(), f"{ONE},{TWO}", dial)
    assert (await found.connect())[0] == TWO
    assert (await found.connect())[0] == TWO
    assert asked == [ONE, TWO, TWO], "it stays where it is answered"
    down.add(TWO)
    with pytest.raises(UnavailableError, match=r"(?s)two:1 is down.*one:1 is down"):
        await found.connect()
    await found.close()


async def test_what_is_joined_with_one_that_is_not_ready_ends_when_another_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STEADY_S", 0.01)
    ready = {ONE, TWO}

    async def dial(url: str) -> Any:
        return url

    async def is_ready(url: str) -> bool:
        return url in ready

    found = GcsReplicas(Settings(), f"{ONE},{TWO}", dial)
    monkeypatch.setattr(found, "_is_ready", is_ready)
    _, replica = await found.connect()
    opened = Opened()
    replica.open.add(opened)
    looks = asyncio.create_task(found.run())
    await asyncio.sleep(0.1)
    assert not opened.ended.is_set()
    ready.clear()
    await asyncio.sleep(0.1)
    assert not opened.ended.is_set(), "no other is better"
    ready.add(TWO)
    async with asyncio.timeout(20):
        await opened.ended.wait()
    assert (await found.connect())[0] == TWO
    looks.cancel()
    await found.close()
