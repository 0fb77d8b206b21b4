"""Names, folders, addresses and offer of one nodelet: facts that never change, shared by all of its parts.

The URL alone is known later than the rest, because a service has its routes before it listens. It has
one place, the ``Endpoint``; to ask for it too early is an error, so nobody can keep a wrong copy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker_wire.errors import UnavailableError
from stoker_wire.http.auth import Credential
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.common import Address

NO_ADDRESS = Address("", "", "", "", "")
"""The address of a process that is no runtime of ours (a job's driver)."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The resources and labels that a node offers, where they differ from settings and machine."""

    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    resources: dict[str, float] | None = None
    labels: dict[str, str] | None = None


class Endpoint:
    """The nodelet's own URL, which ``serve`` sets once, as soon as the service listens."""

    __slots__ = ("_url",)

    def __init__(self) -> None:
        self._url = ""

    @property
    def url(self) -> str:
        """Return the URL by which other nodes and this node's workers reach the nodelet."""
        if not self._url:
            raise UnavailableError("this node does not listen yet")
        return self._url

    def listens_at(self, url: str) -> None:
        """Set the URL."""
        self._url = url


@dataclass(frozen=True, slots=True)
class Identity:
    """Names and folders of one nodelet, what it shows to others, and what signs for its processes."""

    node_id: str
    host_id: str
    endpoint: Endpoint
    unix: str
    gcs_url: str
    credential: Credential
    tokens: TokenSigner
    session_dir: Path
    arena_dir: Path
    socket_dir: Path
    fake_gpus: bool = False
    gpu_uuids: Mapping[int, str] = field(default_factory=dict)
    """Index of a GPU -> its uuid, where CUDA is not told the index: it finds a MIG slice by its uuid alone,
    and counts only the GPUs that it may open."""
    triton_dir: str = ""
    python: str = sys.executable

    @property
    def url(self) -> str:
        """Return the URL by which other nodes and this node's workers reach the nodelet."""
        return self.endpoint.url

    @property
    def log_dir(self) -> Path:
        return self.session_dir / "logs"

    def socket_path(self, worker_id: str) -> Path:
        """Return where a worker listens."""
        return self.socket_dir / f"{worker_id}.sock"

    def token_file(self, worker_id: str) -> Path:
        """Return where the driver of a submitted job, and what it starts, finds its token."""
        return self.session_dir / "tokens" / worker_id

    def worker_log(self, worker_id: str) -> Path:
        return self.log_dir / f"worker-{worker_id}.log"

    def driver_log(self, job_id: str, attempt: int) -> Path:
        return self.log_dir / (
            f"job-{job_id}.log" if attempt == 1 else f"job-{job_id}-attempt-{attempt}.log"
        )
