"""Messages about the processes of the control plane: their versions, settings and health."""

from __future__ import annotations

from stoker_wire.messages.common import Record
from stoker_wire.process.setting_values import SettingInfo

PROCESS_PATH = "/v1/process"
"""The route of every service that answers with :class:`ProcessStatus`."""


class ProcessStatus(Record):
    """A service as it says of itself.

    ``loop_lag_s`` is by how much its event loop was late, at most in the last seconds. ``settings`` are those
    that are not the default; secrets in them are masked.
    """

    service: str
    version: str
    url: str
    hostname: str
    pid: int
    started_at_s: float
    loop_lag_s: float
    settings: tuple[SettingInfo, ...] = ()


class ControlProcess(Record):
    """A process of the control plane: a gcs, a scheduler or a nodelet, by its id.

    ``leads`` says whether it has the term of ``epoch``. ``status`` is absent where ``problem`` says why it
    could not be asked.
    """

    service: str
    id: str
    url: str
    leads: bool = False
    epoch: int = 0
    status: ProcessStatus | None = None
    problem: str = ""


class DatabaseHealth(Record):
    """The database of a gcs: its kind, the revision of its schema, its size if that is known.

    ``read_s`` is how long the read of one row took just now.
    """

    kind: str
    revision: str
    read_s: float
    nbytes: int | None = None


class EphemeralHealth(Record):
    """The place of entries that may be lost: ``redis``, or the gcs's own ``memory``.

    ``up`` is false while Redis is set and does not answer; ``shared`` says whether other replicas see them.
    """

    kind: str
    up: bool
    shared: bool


class EventLogHealth(Record):
    """The event log as a gcs has it: its last number, and that up to which its views are in step."""

    last: int
    applied: int
    compacted: int
    watchers: int


class ControlPlane(Record):
    """The processes of the control plane and their health, as the gcs that answers sees them.

    ``settings`` are all those of this gcs; they, and those of the processes, are shown to admins only.
    ``nodes_left_out`` is how many living nodes were not asked.
    """

    at_s: float
    answers: str
    database: DatabaseHealth
    ephemeral: EphemeralHealth
    events: EventLogHealth
    processes: tuple[ControlProcess, ...]
    settings: tuple[SettingInfo, ...] = ()
    nodes_left_out: int = 0
