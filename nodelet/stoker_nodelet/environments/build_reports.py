"""Reports to the gcs of what this node installs, for its event log."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from stoker_wire.errors import StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.messages.node_api import MAX_BUILDS, EnvironmentBuild, ReportBuilds
from stoker_wire.process.background import Background

_MAX_WAITING = 1000
"""Reports that wait for a gcs that is away; then the oldest are lost."""

_REPORT_S = 30.0
_ROUTE = "/v1/environments/reported"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BuildReports:
    """The reports of one node, sent in their order while its builds go on."""

    node_id: str
    gcs: Client
    background: Background
    _waiting: deque[EnvironmentBuild] = field(default_factory=lambda: deque(maxlen=_MAX_WAITING))
    _is_sending: bool = False

    def add(self, build: EnvironmentBuild) -> None:
        """Send a report soon."""
        self._waiting.append(build)
        if not self._is_sending:
            self._is_sending = True
            self.background.spawn(self._run(), name="build-reports")

    async def _run(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), MAX_BUILDS)
                batch = tuple(self._waiting.popleft() for _ in range(count))
                try:
                    report = ReportBuilds(builds=batch)
                    await self.gcs.call("POST", _ROUTE, report, timeout_s=_REPORT_S)
                except StokerError as error:
                    _log.warning("the gcs did not take %d reports of builds: %s", count, error)
        finally:
            self._is_sending = False
