"""The rules of a tree of queues, pure and over records (called by ``queues.registry``).

A queue has a parent that is there and not below it; its ``quota`` is within its own ``limit``; the quotas
of the queues below one fit in that one's, those at the top in the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable
from stoker_wire import policies
from stoker_wire.amounts import check_parts
from stoker_wire.constraints import node_filters
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.queues import DEFAULT_QUEUE, ChangeQueue, CreateQueue, Queue
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import Node

QUEUES: RecordTable[Queue] = RecordTable(
    schema.QUEUES,
    Queue,
    lambda queue: {"name": queue.name, "parent": queue.parent},
    label="queue",
)
_LIMITS = ("quota", "limit", "user_limit", "job_limit")


def created(body: CreateQueue, now_s: float) -> Queue:
    """Return the queue that a request creates."""
    settings = {name: getattr(body, name) for name in body.__struct_fields__ if name != "force"}
    return Queue(**settings, created_at_s=now_s)


def changed(queue: Queue, body: ChangeQueue) -> Queue:
    """Return the queue as it is after a change."""
    given = {name: getattr(body, name) for name in body.__struct_fields__ if name != "force"}
    return msgspec.structs.replace(queue, **{n: v for n, v in given.items() if v is not None})


def default_queue() -> Queue:
    """Return the default queue as it is while nobody has changed it."""
    return Queue(name=DEFAULT_QUEUE)


def total_of(nodes: Iterable[Node]) -> dict[str, float]:
    """Return the sum of what nodes have."""
    total: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.resources.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def check(queue: Queue, others: Mapping[str, Queue], total: Mapping[str, float] | None) -> None:
    """Raise BadRequestError, which names the field, for a queue that does not go with the ``others``.

    ``total`` is what the cluster has; None if quotas are not to be compared with it.
    """
    tree = {**others, queue.name: queue}
    check_tree(queue, tree)
    for field in _LIMITS:
        check_parts(getattr(queue, field), field)
        for name, amount in getattr(queue, field).items():
            if not name or not math.isfinite(amount):
                raise BadRequestError(
                    f"{field}: {name!r}={amount} is no amount of a resource",
                    field=f"{field}.{name}",
                )
    _check_policy(queue.policy)
    node_filters.check(queue.node_filter)
    for name, amount in queue.quota.items():
        limit = queue.limit.get(name, math.inf)
        if amount > limit:
            raise BadRequestError(
                f"quota: {name}={amount:g} is more than the queue's limit of {limit:g}\n"
                "lower the quota, or raise the limit",
                field=f"quota.{name}",
            )
    _check_sums(queue, tree, total)


def _check_policy(name: str) -> None:
    if name in ("", *policies.BUILT_IN) or name in policies.known():
        return
    raise BadRequestError(
        f"policy: {name!r} is none\n{suggestion(name, policies.known())}", field="policy"
    )


def check_tree(queue: Queue, tree: Mapping[str, Queue]) -> None:
    """Raise BadRequestError unless the queues above ``queue`` are there, and it is not one of them."""
    above = [queue.name]
    parent = queue.parent
    while parent:
        if parent not in tree:
            raise BadRequestError(
                f"parent: there is no queue {parent!r}\n{suggestion(parent, tree)}", field="parent"
            )
        if parent in above:
            way = " -> ".join([*above, parent])
            raise BadRequestError(
                f"parent: a queue cannot be below itself\nit would be {way}; choose another parent",
                field="parent",
            )
        above.append(parent)
        parent = tree[parent].parent


def _check_sums(queue: Queue, tree: Mapping[str, Queue], total: Mapping[str, float] | None) -> None:
    """Check the sums of quotas that the queue is part of: beside it, and below it."""
    parent = tree.get(queue.parent)
    if parent is not None:
        promised: Mapping[str, float] | None = parent.quota
        whose = f"the quota of queue {parent.name!r}"
    else:
        promised = None if total is None else {n: total.get(n, 0.0) for n in queue.quota}
        whose = "all that the cluster has"
    beside = [one for one in tree.values() if one.parent == queue.parent]
    _check_sum(beside, promised, whose, "or pass force to promise it before nodes join")
    below = [one for one in tree.values() if one.parent == queue.name]
    _check_sum(below, queue.quota, f"the quota of queue {queue.name!r}", "or raise that one")


def _check_sum(
    queues: list[Queue], promised: Mapping[str, float] | None, whose: str, fix: str
) -> None:
    for name, most in (promised or {}).items():
        together = sum(queue.quota.get(name, 0.0) for queue in queues)
        if together > most * (1 + 1e-9):
            names = ", ".join(queue.name for queue in queues if queue.quota.get(name))
            raise BadRequestError(
                f"quota: {together:g} {name} for {names} is more than {whose}, {most:g}\n"
                f"lower quotas, {fix}",
                field=f"quota.{name}",
            )
