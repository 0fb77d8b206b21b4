"""``stoker explain``: why something waits and what would have to change, or what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import (
    clock,
    duration,
    heading,
    print_json,
    print_prose,
    print_table,
    resources,
    state,
)
from stoker.cli.tables import Column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_wire.messages.control import Explanation, WaitingGroup

TO_CHANGE = "to change that:"
VERDICTS = (
    Column("node", "node"),
    Column("verdict", "verdict"),
    Column("rule", "rule", drop=1),
    Column("detail", "detail", prose=True),
)


@click.command()
@cluster_options
@click.argument("id_", metavar="ID", type=Id("job", "actor", "task"))
def explain(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Say why a task (t_), actor (a_) or job (job_) waits, or what became of it.

    Of a job, also what of it waits, by cause. The beginning of an id will do if no other begins so.
    """
    from stoker.cli.lists import path_of
    from stoker_wire.errors import BadRequestError
    from stoker_wire.messages.control import Explanation

    if id_.startswith("n_"):
        raise BadRequestError("nodes wait for nothing\nsee `stoker get` for what a node is")
    path_of(id_)
    client = http_client(address, token)
    id_ = resolve_id(client, id_)
    explanation = client.call("GET", f"{path_of(id_)}/explain", reply=Explanation)
    if as_json:
        print_json(explanation)
    else:
        print_explanation(id_, explanation)


def print_explanation(id_: str, explanation: Explanation) -> None:
    """Print the summary, what waits by cause, then each node's verdict, then the events."""
    waited = f" for {duration(explanation.waited_s)}" if explanation.waited_s else ""
    click.echo(f"{heading(id_)} is {state(explanation.state)}{waited}")
    # Of what has ended the summary may say no more than the line above.
    if (
        explanation.summary
        and explanation.summary != f"job {explanation.subject} is {explanation.state}"
    ):
        print_prose(explanation.summary)
    if explanation.demand is not None and explanation.demand.resources:
        click.echo(f"  asks for {resources(explanation.demand.resources)}")
    if explanation.queue_position is not None and "ahead in the queue" not in explanation.summary:
        click.echo(f"  {explanation.queue_position} ahead of it in the queue")
    if explanation.remedy:
        print_prose(explanation.remedy, label=TO_CHANGE)
    if explanation.waiting:
        click.echo(f"\n{heading('Waiting')}")
        print_groups(explanation.waiting)
    if explanation.verdicts:
        click.echo()
        rows = [
            {"node": v.node_id, "verdict": v.fit.value, "rule": v.rule, "detail": v.detail or "-"}
            for v in explanation.verdicts
        ]
        print_table(rows, VERDICTS, empty="")
    if explanation.events:
        click.echo()
        for event in explanation.events:
            click.echo(f"  {clock(event.at_s)}  {event.kind:<20} {event.subject}")


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
            click.echo(f"      more: stoker explain {group.example_id}")
