"""Events and commands of the generation machine: what it is told, and what it answers. Pure data.

Events come from replicas (by their reports), the scheduler (offers) and the controller's clock; each says
when it came. Commands are done by the controller, which decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_train.elastic.core.membership import Action, Membership, Order, Restore, Slot


@dataclass(frozen=True, slots=True)
class Offered:
    """The scheduler offers these slots, until ``by_s``. ``withdraws``: it takes some away."""

    at_s: float
    number: int
    slots: tuple[Slot, ...]
    withdraws: bool
    by_s: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An offer that is void."""

    at_s: float
    number: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The slots that the scheduler says the job has now: fewer after a node died, or a preemption."""

    at_s: float
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A replica has run its loop up to where it needs the others. ``code`` is the version of its code."""

    at_s: float
    worker: int
    actor_id: str
    node_id: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Wrote:
    """The membership of a generation stands in the gcs."""

    at_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another controller has written a later membership: this one is past."""

    at_s: float
    generation: int


@dataclass(frozen=True, slots=True)
class Joining:
    """A rank has left its old group at the boundary, and forms this generation."""

    at_s: float
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Formed:
    """A rank is in the group of this generation, has its state, and goes on."""

    at_s: float
    worker: int
    generation: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has left its group at the boundary of a resize or a suspension to this generation."""

    at_s: float
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A rank lost its group; it has commits in memory at the steps ``committed``."""

    at_s: float
    worker: int
    generation: int
    step: int
    committed: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Died:
    """A replica's process is gone, or was ended because it was silent."""

    at_s: float
    worker: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The loop of a replica raised. ``stage``: "start" before it was ready, else "loop"."""

    at_s: float
    worker: int
    why: str
    stage: str = "loop"


@dataclass(frozen=True, slots=True)
class Returned:
    """The loop of a rank has ended, after so many steps."""

    at_s: float
    worker: int
    generation: int
    step: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank has waited for the others for so many seconds, at a line of its loop."""

    at_s: float
    worker: int
    generation: int
    step: int
    waited_s: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A pass of ``local`` samples did not fit: the next has ``lower`` at most, None if that is too few."""

    at_s: float
    worker: int
    local: int
    lower: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody (the user, a policy) wants this done at the next boundary."""

    at_s: float
    action: Action


@dataclass(frozen=True, slots=True)
class Replaced:
    """Somebody wants another actor in the place of this one: the newcomer comes first."""

    at_s: float
    worker: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time, when nothing else happens."""

    at_s: float


Event = (
    Offered
    | Withdrawn
    | Granted
    | Ready
    | Wrote
    | Fenced
    | Joining
    | Formed
    | Left
    | Broken
    | Died
    | Failed
    | Returned
    | Waiting
    | OutOfMemory
    | Asked
    | Replaced
    | Tick
)


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a replica in a slot; it is told to rehearse its loop if others train meanwhile."""

    worker: int
    slot: Slot
    rehearse: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """End a replica's process."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class WriteMembership:
    """Write a membership over that of generation ``after``; answered by Wrote or Fenced."""

    membership: Membership
    after: int


@dataclass(frozen=True, slots=True)
class Send:
    """Give an order to these replicas."""

    order: Order
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Have replicas that wait form a generation, and begin it with this state.

    Its orders are numbered from ``after_order`` on.
    """

    membership: Membership
    restore: Restore
    workers: tuple[int, ...]
    after_order: int = 0


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Tell replicas that this generation, and all before it, will not go on."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accept:
    """Accept the offer of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Void:
    """Void the samples of steps from here on: the training goes back.

    What generations before this one still report does not count.
    """

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A transition of the machine, for the job's story."""

    at_s: float
    generation: int
    before: str
    after: str
    why: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End the job: with an error, or well where it is empty."""

    error: str
    kind: str = ""


Command = (
    Launch | Kill | WriteMembership | Send | Form | Interrupt | Accept | Void | Turn | Say | End
)
