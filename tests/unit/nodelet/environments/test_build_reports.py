"""Reports of builds reach the gcs in their order, and one that is away delays no build."""

from __future__ import annotations

import asyncio
from typing import Any

from stoker_nodelet.environments.build_reports import BuildReports
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.node_api import MAX_BUILDS, BuildState, EnvironmentBuild, ReportBuilds
from stoker_wire.process.background import Background


class FakeGcs:
    """Takes reports once it is ``free``, but the first ``refused``."""

    def __init__(self, *, refused: int = 0) -> None:
        self.refused = refused
        self.batches: asyncio.Queue[list[str]] = asyncio.Queue()
        self.free = asyncio.Event()

    async def call(self, method: str, path: str, body: ReportBuilds, **_: Any) -> None:
        await self.free.wait()
        self.refused -= 1
        self.batches.put_nowait([one.key for one in body.builds])
        if self.refused >= 0:
            raise UnavailableError("away")


def build(key: str) -> EnvironmentBuild:
    return EnvironmentBuild(
        node_id="n_1", job_id="job_1", key=key, what="pip (x)", state=BuildState.READY
    )


async def test_reports_go_in_batches_in_their_order_while_builds_go_on() -> None:
    gcs = FakeGcs()
    keys = [str(number) for number in range(MAX_BUILDS + 5)]
    async with Background("test") as background, asyncio.timeout(20):
        reports = BuildReports("n_1", gcs, background)  # type: ignore[arg-type]
        for key in keys:
            reports.add(build(key))
        assert gcs.batches.empty()
        gcs.free.set()
        assert await gcs.batches.get() == keys[:MAX_BUILDS]
        assert await gcs.batches.get() == keys[MAX_BUILDS:]


async def test_a_report_that_is_refused_keeps_none_behind_it_back() -> None:
    gcs = FakeGcs(refused=1)
    gcs.free.set()
    async with Background("test") as background, asyncio.timeout(20):
        reports = BuildReports("n_1", gcs, background)  # type: ignore[arg-type]
        reports.add(build("lost"))
        assert await gcs.batches.get() == ["lost"]
        reports.add(build("kept"))
        assert await gcs.batches.get() == ["kept"]
