"""Elastic jobs: what a training job says of itself, the replicas that it has, and those that it is offered.

A job states its limits (:class:`Scaling`) once and its hints (:class:`Hints`) as it learns. The scheduler
answers with offers. A *generation* is one set of replicas; it begins when the job accepts the offer of it, at
a boundary between two batches, and ends the one before: of each job one generation lives at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from stoker_wire.constraints.taints import Tolerations
from stoker_wire.messages.cluster import GraceS
from stoker_wire.messages.common import (
    Asked,
    Count,
    Finite,
    Message,
    NodeFilterText,
    Record,
    Selector,
    Text,
    stated,
)

MAX_REPLICAS = 1_000
"""Replicas of one job: they are bundles of placement groups."""
MAX_BATCH = 2**40

Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
Measured = Finite | None
"""A measured number; null stands for one that is none (NaN, infinity), as JSON has it."""


class Scaling(Message):
    """The limits of an elastic job. Each replica has ``resources``, with one GPU or none.

    ``base_batch`` is M0, the batch in samples for which its user tuned it, and ``max_batch`` the most;
    ``min_local_batch`` to ``max_local_batch`` are those of one replica in one pass. A job that does not
    answer an offer with fewer replicas within ``grace_s`` loses all it has, and goes on from its last commit.
    """

    base_batch: Samples
    max_local_batch: Samples
    max_batch: Samples | None = None
    min_local_batch: Samples = 1
    min_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = MAX_REPLICAS
    resources: Annotated[Asked, stated(minProperties=1)] = msgspec.field(
        default_factory=lambda: {"GPU": 1.0}
    )
    label_selector: Selector = {}
    node_filter: NodeFilterText = ""
    tolerations: Tolerations = ()
    grace_s: GraceS = 30.0

    @property
    def most_in_batch(self) -> int:
        """The largest batch, in samples: M0 where none was given."""
        return self.base_batch if self.max_batch is None else self.max_batch


class StepTimeParams(Message):
    """Theta: the seven parameters of the time of a step, in seconds (``stoker_goodput.throughput``)."""

    alpha_c: Measured
    beta_c: Measured
    alpha_n: Measured
    beta_n: Measured
    alpha_r: Measured
    beta_r: Measured
    gamma: Measured


class Replica(Message):
    """The place of a replica: a bundle of a placement group, on a node."""

    group_id: str
    bundle: Count
    node_id: str


Replicas = Annotated[tuple[Replica, ...], msgspec.Meta(max_length=MAX_REPLICAS)]


class Hints(Message):
    """The word of a job on itself. What it has not measured it leaves out.

    ``params`` is theta, and ``params_error`` the relative error of its step times; ``grad_sqr`` and
    ``grad_var`` are the squared norm of the gradient, and the variance of that of a batch of M0 samples;
    ``profiled_replicas`` is the most that it ever ran with, ``restart_s`` the seconds that a change of its
    replicas takes. ``progress`` is in samples of M0's worth, ``done_fraction`` of all that it is to do, where
    it knows that. The rest says how it runs: the batch M of a step, b of a replica in a pass, s passes that
    accumulate, the factor on its learning rate, samples of M0's worth per second, statistical efficiency.

    ``spares`` are places more than its share that it asks for, within ``max_replicas`` and where there is
    room: for newcomers of replicas that it replaces. ``unwanted`` are places of it that it gives back.
    """

    params: StepTimeParams | None = None
    params_error: Measured = None
    grad_sqr: Measured = None
    grad_var: Measured = None
    profiled_replicas: Count = 0
    restart_s: Measured = None
    progress: Measured = None
    done_fraction: Measured = None
    batch: Count = 0
    local_batch: Count = 0
    accumulated: Count = 0
    lr_scale: Measured = None
    goodput: Measured = None
    efficiency: Measured = None
    spares: Count = 0
    unwanted: Replicas = ()


def by_node(replicas: Iterable[Replica]) -> dict[str, int]:
    """Return how many replicas each node has, in the order of their ranks."""
    return dict(Counter(replica.node_id for replica in replicas))


class Offer(Record):
    """The replicas of the next generation, all reserved, in the order of their ranks.

    ``withdraws``: it has fewer of the present replicas, so that no answer until ``answer_by_s`` costs all of
    them; of an offer of more, nothing comes then.
    """

    generation: int
    replicas: tuple[Replica, ...]
    withdraws: bool
    made_at_s: float
    answer_by_s: float
    reason: str = ""


class ElasticState(Record):
    """An elastic job as it stands: what the gcs has of its limits, hints, replicas and the open offer.

    ``version`` counts the changes of its replicas and offers. ``generation`` is the one that lives, 0 before
    the first; ``numbered`` the last number given. Its replicas are as since ``since_s``, with ``service_s``
    replica-seconds before. ``lost`` counts replicas that the generation has lost with their nodes,
    ``unanswered`` offers that it let pass, ``hints_dropped`` hints that were no numbers, or negative: why,
    of the last, ``hints_problem`` says. ``speedup`` is that over one replica which the scheduler expects,
    and ``phi`` the noise scale in samples.
    """

    scaling: Scaling
    version: int = 1
    generation: int = 0
    numbered: int = 0
    replicas: tuple[Replica, ...] = ()
    offer: Offer | None = None
    since_s: float = 0.0
    service_s: float = 0.0
    restarts: int = 0
    preemptions: int = 0
    lost: int = 0
    unanswered: int = 0
    hints: Hints | None = None
    hints_at_s: float | None = None
    hints_dropped: int = 0
    hints_problem: str = ""
    speedup: float | None = None
    noise_scale: float | None = None

    def allocation(self) -> dict[str, int]:
        """Return the replicas by node, in the order of their ranks."""
        return by_node(self.replicas)


class ElasticQuery(Message):
    """A wait until the state has another ``version`` than the caller has ``seen``, ``wait_s`` at most."""

    seen: Count = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class MakeOffer(Message):
    """Offer of the scheduler, to a job whose state has this ``version``, and the speedup that it expects."""

    version: Count
    replicas: Replicas
    answer_within_s: GraceS
    reason: Text = ""
    speedup: Measured = None


class AnswerOffer(Message):
    """Answer of a job to the offer of a generation: that it begins, with what the job has committed."""

    generation: Count


class WithdrawReplicas(Message):
    """Order of the scheduler for a job whose state has this ``version``: the offer is void, or replicas are.

    Without ``replicas`` it is the open offer; with some, these are gone, and with all the job is preempted.
    ``returned``: the job gave them back, so that they do not count as lost.
    """

    version: Count
    replicas: Replicas = ()
    preempted: bool = False
    returned: bool = False
    reason: Text = ""


class PlannedScaling(Record):
    """An elastic job in a round: its replicas by node now and after it, and the worth of the next ones.

    A worth is per replica, in seconds by which a second of work on one GPU comes sooner (docs/elastic.md);
    null where the policy does not say it, or there is no such step. ``more`` is the next larger number that
    the job could use, and ``more_speedup`` that over one replica which it would bring; ``held_by`` the job to
    whom a replica is worth least, which is ``held_worth``.
    """

    job_id: str
    queue: str
    present: dict[str, int]
    target: dict[str, int]
    speedup: float | None = None
    more: int | None = None
    more_worth: float | None = None
    more_speedup: float | None = None
    less_worth: float | None = None
    held_by: str = ""
    held_worth: float | None = None


class PoolPlan(Record):
    """A round for jobs of a queue whose replicas may be on the same nodes, and the worth of nodes to them.

    ``rooms`` are the replicas for which each node has room. ``node_more`` is what all would gain by one more
    node like these, ``node_less`` what they would lose by each: for an autoscaler.
    """

    queue: str
    rooms: dict[str, int]
    jobs: tuple[PlannedScaling, ...]
    node_more: float | None = None
    node_less: dict[str, float] = {}
    error: str = ""


class ElasticPlan(Record):
    """A round of elastic jobs, as it would be now: nothing is offered by it."""

    at_s: float
    pools: tuple[PoolPlan, ...] = ()


class ReportGenerationTurn(Message):
    """Report of an elastic trainer's controller that its generations took a turn, for the job's story.

    ``before`` and ``after`` are phases (FORMING, RUNNING, DRAINING, RESIZING, RESTORING, FAILED, FINISHED) of
    ``generation``, which has ``replicas``; the same one where ``why`` says what happens in it.
    """

    generation: Count
    before: Text
    after: Text
    why: Text = ""
    replicas: Count = 0


class GenerationTurn(Record):
    """A turn of an elastic trainer's generations as it was reported, with the same fields."""

    job_id: str
    generation: int
    before: str
    after: str
    why: str = ""
    replicas: int = 0
