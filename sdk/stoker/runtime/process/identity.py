"""The identity of a process to the others, fixed before it opens a connection."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from stoker_wire.http.auth import Credential


class LocalNode(NamedTuple):
    """The nodelet whose shared memory this process can see.

    A worker that runs as another user than it sees none: ``arena_dir`` and ``session_dir`` are empty.
    """

    node_id: str
    url: str
    arena_dir: str
    session_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process's own id, the cluster that it talks to, and where it listens.

    ``credential`` holds the token of its job, once it has one. ``node`` is the nodelet with which it
    shares memory, if there is one on its machine. With ``gateway_url`` it is outside of the cluster's
    network, and reaches it by that alone. One that ``is_foreign`` runs as another user than the services of
    its machine: no file and no socket there is for it, as if it were on another. What it listens on at
    ``socket_path`` may be open already, as ``socket_fd``.
    """

    peer_id: str
    gcs_url: str
    credential: Credential
    host_id: str
    node: LocalNode | None
    socket_path: str
    tcp_host: str | None = None
    gateway_url: str = ""
    is_worker: bool = False
    is_foreign: bool = False
    socket_fd: int = -1

    @property
    def token(self) -> str:
        """The token that it shows to others now."""
        return self.credential.token

    def renew_token(self, token: str) -> None:
        """Go on with another token of the same job; what this process starts from now on has it too."""
        if os.environ.get("STOKER_TOKEN") == self.credential.token:
            os.environ["STOKER_TOKEN"] = token
        self.credential.replace(token)
