"""One profile of a process at a time, and no longer than it is taken."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.profiles.recordings import Recordings
from stoker_wire.errors import ConflictError
from stoker_wire.messages.node_api import TakeWorkerProfile

if TYPE_CHECKING:
    from pathlib import Path

ORDER = TakeWorkerProfile(job_id="job_1", seconds=0.1)


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Of a node with one worker, whose profiles are taken at once."""
    workers: Any = SimpleNamespace(
        processes=SimpleNamespace(living={"w_1": SimpleNamespace(pid=1, socket_path=tmp_path)}),
        state=SimpleNamespace(workers={"w_1": SimpleNamespace(job_id="job_1")}),
        identity=SimpleNamespace(session_dir=tmp_path),
    )

    async def record(_: Recordings, process: Any, order: TakeWorkerProfile, path: Path) -> None:
        await asyncio.to_thread(path.write_text, "a profile")

    monkeypatch.setattr(Recordings, "_record", record)
    return Recordings(workers, "py-spy")


async def test_the_end_of_sending_one_does_not_end_the_next(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused: list[ConflictError] = []

    async def record(_: Recordings, process: Any, order: TakeWorkerProfile, path: Path) -> None:
        await asyncio.to_thread(path.write_text, "another")
        await first.__aexit__(None, None, None)  # the first has been sent meanwhile
        assert recordings.traces("w_1")
        with pytest.raises(ConflictError) as caught:
            await recordings.take("w_1", ORDER).__aenter__()
        refused.append(caught.value)

    first = recordings.take("w_1", ORDER)
    await first.__aenter__()
    assert not recordings.traces("w_1")
    monkeypatch.setattr(Recordings, "_record", record)
    async with recordings.take("w_1", ORDER) as path:
        assert path.read_text() == "another"
    assert len(refused) == 1
    assert not os.listdir(tmp_path), "no file is left"


async def test_one_that_could_not_begin_is_in_nobodys_way(
    recordings: Recordings, tmp_path: Path
) -> None:
    folder = recordings.workers.identity
    folder.session_dir = tmp_path / "gone"  # type: ignore[misc]
    with pytest.raises(OSError):
        await recordings.take("w_1", ORDER).__aenter__()
    folder.session_dir = tmp_path  # type: ignore[misc]
    async with recordings.take("w_1", ORDER) as path:
        assert path.read_text() == "a profile"
