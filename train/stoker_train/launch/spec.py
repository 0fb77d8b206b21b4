"""Messages between the processes of ``stoker launch``: run, members, events. No torch, no IO."""

from __future__ import annotations

import msgspec

RENDEZVOUS = "rendezvous"
STORE = "torchrun"
"""What the keys of rendezvous and their stores begin with; the run id follows."""
KEPT_S = 30 * 86_400.0
"""After their last change the keys of a run are gone: no process of it can remove them for certain."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as its user wants it, from the command line to the driver and its agents.

    ``command`` is the script, module or program with its arguments. A node has ``nproc`` workers, each with a
    GPU if ``gpu`` (None: if the cluster has any), and ``cpus`` CPUs. ``cwd`` is the folder where they start.
    """

    command: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    nproc: int = 1
    gpu: bool | None = None
    cpus: float = 1.0
    resources: dict[str, float] = {}
    max_restarts: int = 0
    module: bool = False
    no_python: bool = False
    log_dir: str = ""
    role: str = "default"
    cwd: str = ""
    join_timeout_s: float = 600.0
    monitor_interval_s: float = 0.1
    label_selector: dict[str, str] = {}
    node_filter: str = ""

    @property
    def bundle(self) -> dict[str, float]:
        """Return what a node of the run needs of a node of the cluster."""
        needs = {"CPU": self.cpus * self.nproc, "GPU": float(self.nproc if self.gpu else 0)}
        return {name: amount for name, amount in (needs | self.resources).items() if amount}


class Members(msgspec.Struct, frozen=True):
    """A set of agents, by name, that form one rendezvous; each change has the next number.

    ``restarts`` counts the failures of workers before it.
    """

    number: int
    members: tuple[str, ...]
    restarts: int = 0


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The orders of one agent."""

    spec: Spec
    run_id: str
    member: str
    address: str
    token: str
    namespace: str
    local_addr: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a worker: ``exit_code`` is negative for a signal, ``cause`` a traceback or last lines.

    ``recorded``: it comes from an error file, as torch's ``@record`` writes it.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    at_s: float
    message: str
    cause: str = ""
    recorded: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An agent has imported all it needs, and waits for a set of members that it is in."""


class Formed(msgspec.Struct, frozen=True, tag=True):
    """An agent has met the others of set ``number``, and starts its workers."""

    number: int


class Lines(msgspec.Struct, frozen=True, tag=True):
    """Output of a node's workers, one line each, without its end."""

    stream: str
    lines: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Workers of an agent failed in set ``number``; it waits for the next."""

    number: int
    failures: tuple[Failure, ...]


class Succeeded(msgspec.Struct, frozen=True, tag=True):
    """All workers of an agent ended well in set ``number``; it waits for its end."""

    number: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The agent is no more: it ``left``, or broke, for the reason in ``message``."""

    left: bool
    message: str = ""


Event = Ready | Formed | Lines | Failed | Succeeded | Ended


def members_key(run_id: str, number: int) -> str:
    """Return the key of a set of members."""
    return f"launch/{run_id}/members/{number:08d}"
