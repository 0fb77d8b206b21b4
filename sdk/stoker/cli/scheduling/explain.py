"""``stoker explain``: why something waits and what would have to change, or what became of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import (
    ago,
    clock,
    duration,
    echo,
    heading,
    plural,
    print_json,
    print_prose,
    print_table,
    resources,
    state,
)
from stoker.cli.tables import Column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_wire.messages.cluster import DrainStatus
    from stoker_wire.messages.control import Explanation, Holder, Verdict, WaitingGroup
    from stoker_wire.messages.queues import QueueExplanation

TO_CHANGE = "to change that:"
VERDICTS = (
    Column("node", "node"),
    Column("verdict", "verdict"),
    Column("rule", "rule", drop=1),
    Column("detail", "detail", prose=True),
)
HOLDERS = (
    Column("lease", "lease", drop=2),
    Column("what", "what"),
    Column("job", "job"),
    Column("node", "node", drop=1),
    Column("has", "has"),
    Column("since", "since", drop=3),
    Column("until", "until", prose=True),
)
WAITERS = (
    Column("position", "position"),
    Column("what", "what"),
    Column("job", "job"),
    Column("user", "user", drop=2),
    Column("resources", "resources"),
    Column("count", "count"),
    Column("priority", "priority", drop=1),
    Column("waited", "waited"),
    Column("held by", "held", prose=True),
)
LEFT = (
    Column("kind", "kind"),
    Column("id", "id"),
    Column("name", "name", drop=1),
    Column("why", "why", prose=True),
)
_LIKE_AN_ID = re.compile(r"^[a-z]{1,4}_[0-9a-f.]*$")
"""What looks so is meant as an id, whether there are such or not."""


@click.command()
@cluster_options
@click.argument(
    "id_", metavar="ID|QUEUE", type=Id("job", "actor", "task", "placement group", "node")
)
def explain(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Say why a task (t_), actor (a_), job (job_) or placement group (pg_) waits.

    First what binds it, then the least that would let it start, who holds what it wants, and what each
    node says. Of what has ended, it says what became of it. Of a job, also what of it waits, by cause.
    The beginning of an id will do if no other begins so.

    Of a queue, named as it is: what it has, borrows and lends, who waits in it, and which limit binds.
    Of a node (n_): whether it takes new work, and if it is drained, what is left there and why.
    """
    from stoker.cli.lists import KINDS, path_of
    from stoker_wire.messages.cluster import DrainStatus
    from stoker_wire.messages.control import Explanation
    from stoker_wire.messages.queues import QueueExplanation

    is_id = _LIKE_AN_ID.match(id_) or id_.partition("_")[0] in KINDS
    if is_id:
        path_of(id_)
    client = http_client(address, token)
    if not is_id:
        path = f"/v1/queues/{id_}/explain"
        of_queue = client.call("GET", path, reply=QueueExplanation)
        print_json(of_queue) if as_json else print_queue(of_queue)
        return
    id_ = resolve_id(client, id_)
    if id_.startswith("n_"):
        status = client.call("GET", f"{path_of(id_)}/drain", reply=DrainStatus)
        print_json(status) if as_json else print_drain(status)
        return
    explanation = client.call("GET", f"{path_of(id_)}/explain", reply=Explanation)
    if as_json:
        print_json(explanation)
    else:
        print_explanation(id_, explanation)


def print_drain(status: DrainStatus) -> None:
    """Print how a node's drain goes, and what is left there."""
    print_prose(status.summary)
    if status.left:
        rows = [{"kind": o.kind, "id": o.id, "name": o.name, "why": o.why} for o in status.left]
        print_table(rows, LEFT, empty="")


def print_explanation(id_: str, explanation: Explanation) -> None:
    """Print what binds, what would help, who holds what is wanted, each node's verdict, the events."""
    waited = f" for {duration(explanation.waited_s)}" if explanation.waited_s else ""
    phase = f" ({explanation.phase})" if explanation.phase else ""
    echo(f"{heading(id_)} is {state(explanation.state)}{waited}{phase}")
    if explanation.constraint is not None:
        print_prose(explanation.constraint.text, label=f"{explanation.constraint.kind}:")
    # Of what has ended the summary may say no more than the line above.
    if (
        explanation.summary
        and explanation.summary != f"job {explanation.subject} is {explanation.state}"
    ):
        print_prose(explanation.summary)
    if explanation.demand is not None and explanation.demand.resources:
        echo(f"  asks for {resources(explanation.demand.resources)}")
    if explanation.queue_position is not None and "ahead in the queue" not in explanation.summary:
        echo(f"  {explanation.queue_position} ahead of it in the queue")
    for remedy in explanation.remedies:
        print_prose(remedy.text, label=TO_CHANGE)
    if explanation.remedy and not explanation.remedies:
        print_prose(explanation.remedy, label=TO_CHANGE)
    if explanation.holders:
        echo(f"\n{heading('Who holds what it wants')}")
        print_holders(explanation.holders)
    if explanation.waiting:
        echo(f"\n{heading('Waiting')}")
        print_groups(explanation.waiting)
    if explanation.verdicts:
        echo()
        print_verdicts(explanation.verdicts)
    if explanation.events:
        echo()
        for event in explanation.events:
            echo(f"  {clock(event.at_s)}  {event.kind:<20} {event.subject}")


def print_verdicts(verdicts: Iterable[Verdict]) -> None:
    """Print one line per node."""
    rows = [
        {"node": v.node_id, "verdict": v.fit.value, "rule": v.rule, "detail": v.detail or "-"}
        for v in verdicts
    ]
    print_table(rows, VERDICTS, empty="")


def print_holders(holders: Iterable[Holder]) -> None:
    """Print one line per lease, with when it ends as far as that is known."""
    rows = [
        {
            "lease": one.lease_id,
            "what": f"{one.kind} {one.actor_id or one.group_id or one.name}".rstrip(),
            "job": one.job_id,
            "node": one.node_id,
            "has": resources(one.resources),
            "since": ago(one.since_s),
            "until": _until(one),
        }
        for one in holders
    ]
    print_table(rows, HOLDERS, empty="")


def _until(holder: Holder) -> str:
    if holder.until_s is None:
        return holder.until or "not known"
    return f"{clock(holder.until_s)}, {holder.until}"


def print_queue(queue: QueueExplanation) -> None:
    """Print what a queue has and what binds it, then who waits in it."""
    usage = queue.usage
    echo(f"queue {heading(queue.name)}" + (" is stopped" if queue.stopped else ""))
    for limit in queue.limits:
        print_prose(limit, label="binding:")
    share = f"{usage.share:.0%} of the cluster, can claim {usage.entitled:.0%}"
    echo(f"  has {resources(usage.used)} in {plural(usage.leases, 'lease')} ({share})")
    for label, amounts in (
        ("quota", queue.quota),
        ("limit", queue.limit),
        ("borrowed", queue.borrowed),
        ("lent", queue.lent),
    ):
        if amounts:
            echo(f"  {label}: {resources(amounts)}")
    echo(f"\n{heading('Waiting')}: {plural(queue.waiting_count, 'request')}")
    rows = [
        {
            "position": str(one.position),
            "what": one.name or one.request_id,
            "job": one.job_id,
            "user": one.user,
            "resources": resources(one.resources),
            "count": str(one.count),
            "priority": str(one.priority),
            "waited": duration(one.waited_s),
            "held": one.held or "-",
        }
        for one in queue.waiting
    ]
    if rows:
        print_table(rows, WAITERS, empty="")


def print_groups(groups: Iterable[WaitingGroup]) -> None:
    """Print one line per cause, with one of those that wait, and each remedy once."""
    shown = set()
    for group in groups:
        count = f"{group.count}{'' if group.count_exact else '+'}"
        never = "can never run: " if group.infeasible else ""
        kind = "" if group.kind == "task" else f"{group.kind} "
        print_prose(f"{never}{group.cause}", label=f"{count} x {kind}{group.name}:")
        if group.remedy and group.remedy not in shown:
            shown.add(group.remedy)
            print_prose(group.remedy, label=TO_CHANGE, indent="      ")
        if group.example_id:
            echo(f"      more: stoker explain {group.example_id}")
