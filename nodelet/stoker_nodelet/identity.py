"""Who this nodelet is and where its things lie: facts that do not change once it listens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from stoker_wire.messages.common import Address

NO_ADDRESS = Address("", "", "", "", "")
"""The address of a process that is no runtime of ours (a job's driver)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Names, URLs and folders of one nodelet. ``token`` never appears on a command line."""

    node_id: str
    host_id: str
    url: str
    unix: str
    gcs_url: str
    token: str
    session_dir: Path
    arena_dir: Path
    socket_dir: Path
    fake_gpus: bool = False
    triton_dir: str = ""
    python: str = sys.executable

    @property
    def log_dir(self) -> Path:
        return self.session_dir / "logs"

    def socket_path(self, worker_id: str) -> Path:
        """Return where a worker listens."""
        return self.socket_dir / f"{worker_id}.sock"

    def worker_log(self, worker_id: str) -> Path:
        return self.log_dir / f"worker-{worker_id}.log"

    def driver_log(self, job_id: str) -> Path:
        return self.log_dir / f"job-{job_id}.log"
