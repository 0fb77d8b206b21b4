"""Phases of an elastic job's generations, which may follow which, and the state that the machine steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_train.elastic.core.events import Offered
from stoker_train.elastic.core.membership import Action, Membership, Restore, Slot


class Phase(StrEnum):
    """The state of the one generation that a job has."""

    FORMING = "FORMING"
    """None trains: replicas start, and begin from a checkpoint, or anew."""
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    """The next generation stands in the gcs; ranks train on to the next batch boundary."""
    RESIZING = "RESIZING"
    """Ranks have reached the boundary, and form the next generation."""
    RESTORING = "RESTORING"
    """A rank was lost: survivors go back to their last commit in memory."""
    FAILED = "FAILED"
    FINISHED = "FINISHED"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.RESTORING, Phase.FINISHED, Phase.FAILED}),
    Phase.RUNNING: frozenset(
        {Phase.DRAINING, Phase.RESTORING, Phase.FORMING, Phase.FINISHED, Phase.FAILED}
    ),
    Phase.DRAINING: frozenset(
        {
            Phase.RESIZING,
            Phase.RUNNING,
            Phase.RESTORING,
            Phase.FORMING,
            Phase.FINISHED,
            Phase.FAILED,
        }
    ),
    Phase.RESIZING: frozenset(
        {Phase.RUNNING, Phase.RESTORING, Phase.FORMING, Phase.FINISHED, Phase.FAILED}
    ),
    Phase.RESTORING: frozenset({Phase.RUNNING, Phase.FORMING, Phase.FINISHED, Phase.FAILED}),
    Phase.FAILED: frozenset(),
    Phase.FINISHED: frozenset(),
}
"""Each phase, and those that may follow it: there are no others."""

OVER = frozenset({Phase.FAILED, Phase.FINISHED})


class Life(StrEnum):
    """The standing of one replica process."""

    STARTING = "STARTING"
    READY = "READY"
    """It waits to be taken into a generation."""
    MEMBER = "MEMBER"
    BROKEN = "BROKEN"
    """It lost its group, and waits with its commits."""
    LEFT = "LEFT"
    RETURNED = "RETURNED"


@dataclass(frozen=True, slots=True)
class Limits:
    """The times and numbers by which the machine decides, in seconds where they end in ``_s``."""

    min_replicas: int = 1
    max_replicas: int = 1 << 20
    start_s: float = 120.0
    """A replica that is not ready by then is ended, and started again."""
    gather_s: float = 5.0
    """The longest that one newcomer which is ready waits for others that start."""
    settle_s: float = 60.0
    """The longest wait for a survivor's word that its group is broken."""
    form_s: float = 60.0
    """The longest that a generation takes to form, once its ranks are at the boundary."""
    waiting_s: float = 2.0
    """A rank that waits so long for one whose loop has returned waits for ever."""
    replace_s: float = 120.0
    """The longest that a rank which is to be replaced waits for a place for its newcomer."""
    max_start_failures: int = 2
    max_chances: int = 5
    """How often a slot comes out of quarantine without which the job cannot train, and never has."""
    longest_pause_s: float = 60.0
    """The longest that a slot without which the job cannot train stays in quarantine."""
    max_breaks: int = 5
    """A generation that breaks so often at one commit will always: the job fails with why."""
    retry_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A replica process as the machine knows it."""

    number: int
    slot: Slot
    life: Life
    since_s: float
    actor_id: str = ""
    node_id: str = ""
    committed: tuple[int, ...] = ()
    has_state: bool = False
    """It has been in a generation: it has something to survive with."""
    last_rank: int = -1


@dataclass(slots=True)
class State:
    """All that the machine knows. :func:`stoker_train.elastic.core.machine.step` alone changes it."""

    job_id: str
    limits: Limits
    phase: Phase = Phase.FORMING
    generation: int = 0
    """The last number given: of ``membership``, or of ``pending``."""
    membership: Membership | None = None
    """The generation that trains, or trained last."""
    pending: Membership | None = None
    """The one that is to form next."""
    written: bool = False
    written_s: float = 0.0
    pending_restore: Restore = field(default_factory=Restore)
    formed: frozenset[int] = frozenset()
    workers: dict[int, Worker] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    offer: Offered | None = None
    """An open offer that takes slots away: accepted once they are left."""
    next_worker: int = 1
    next_order: int = 1
    since_s: float = 0.0
    """The time of the last change of phase."""
    failures: dict[Slot, tuple[int, float, str]] = field(default_factory=dict)
    """Replicas that did not start in a slot: how many, when last, why."""
    quarantined: dict[Slot, str] = field(default_factory=dict)
    chances: dict[Slot, int] = field(default_factory=dict)
    """How often slots came out of quarantine."""
    given_up: frozenset[Slot] = frozenset()
    """Slots of ranks that were replaced: they go back to the scheduler."""
    replaced: dict[int, float] = field(default_factory=dict)
    """Ranks that are to be replaced, and since when."""
    share: int = 0
    """The slots that the job had when the first of them was: those that come are for newcomers."""
    swapped: frozenset[int] = frozenset()
    """Those of them that leave with the pending generation, as their newcomers are in it."""
    asked: tuple[Action, ...] = ()
    suspending: bool = False
    stopping: str | None = None
    code: str = ""
    returned: dict[int, int] = field(default_factory=dict)
    """Ranks of this generation whose loop has ended, by the steps after which."""
    has_trained: bool = False
    said_waiting: bool = False
    local: int | None = None
    """The most samples of a pass, once memory ran out with more."""
    decided: tuple[Action, ...] = ()
    """The newest of each kind of decision that was sent: it holds also where the training goes back."""
    false_starts: int = 0
    """How many generations in turn could not begin, while none trains."""
    breaks: int = 0
    """How often the group broke since the last commit that was not gone back to before."""
    broke_at: int = -1
    why_broken: str = ""
    error: str = ""
