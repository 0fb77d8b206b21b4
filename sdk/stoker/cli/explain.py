"""``stoker explain``: why something waits and what would have to change, or what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import clock, duration, heading, print_json, print_table, resources, state

if TYPE_CHECKING:
    from stoker_wire.messages.control import Explanation


@click.command()
@cluster_options
@click.argument("id_", metavar="ID")
def explain(id_: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Say why a task (t_), actor (a_) or job (job_) waits, or what became of it."""
    from stoker.cli.lists import path_of
    from stoker_wire.errors import BadRequestError
    from stoker_wire.messages.control import Explanation

    if id_.startswith("n_"):
        raise BadRequestError("nodes wait for nothing; see `stoker get` for what a node is")
    client = http_client(address, token)
    told = client.call("GET", f"{path_of(id_)}/explain", reply=Explanation)
    if as_json:
        print_json(told)
    else:
        print_explanation(id_, told)


def print_explanation(id_: str, told: Explanation) -> None:
    """Print the story, then each node's verdict, then the events."""
    waited = f" for {duration(told.waited_s)}" if told.waited_s else ""
    click.echo(f"{heading(id_)} is {state(told.state)}{waited}")
    # Of what has ended the summary may say no more than the line above.
    if told.summary and told.summary != f"job {told.subject} is {told.state}":
        click.echo(f"  {told.summary}")
    if told.demand is not None:
        click.echo(f"  asks for {resources(told.demand.resources)}")
    if told.queue_position is not None:
        click.echo(f"  {told.queue_position} ahead of it in the queue")
    if told.remedy:
        click.echo(f"  {click.style('to change that:', fg='cyan')} {told.remedy}")
    if told.verdicts:
        click.echo()
        columns = {"node": "node", "verdict": "verdict", "rule": "rule", "detail": "detail"}
        rows = [
            {"node": v.node_id, "verdict": v.fit.value, "rule": v.rule, "detail": v.detail}
            for v in told.verdicts
        ]
        print_table(rows, columns, empty="")
    if told.events:
        click.echo()
        for event in told.events:
            click.echo(f"  {clock(event.at_s)}  {event.kind:<20} {event.subject}")
