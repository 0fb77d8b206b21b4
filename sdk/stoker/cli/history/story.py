"""``stoker story``: what happened to one thing and to what it touched, in order, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import clock, duration, echo, heading, print_json, print_prose, state
from stoker.runtime.process.terminal import printable

if TYPE_CHECKING:
    from stoker_wire.messages.events import Story

BECAUSE = "why:"


@click.command()
@click.argument("id_", metavar="ID", type=Id("task", "actor", "node", "job", "placement group"))
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=200, show_default=True,
    help="Lines shown at most, the newest.",
)  # fmt: skip
@cluster_options
def story(id_: str, limit: int, address: str | None, token: str | None, as_json: bool) -> None:
    """Tell what happened to a task (t_), actor (a_), node (n_) or job (job_), and why, in order.

    Also what happened to what it touched, as long as it did: its attempts, its worker, its node, its actor,
    its owner, its job. Of what has left by retention the events tell, while they are kept. The beginning of
    an id will do if no other begins so.
    """
    from stoker_wire.messages.events import Story

    client = http_client(address, token)
    id_ = resolve_id(client, id_)
    told = client.call("GET", f"/v1/story/{id_}", reply=Story, query={"limit": limit})
    if as_json:
        print_json(told)
    else:
        print_story(told)


def print_story(told: Story) -> None:
    """Print each line with its time and how long after the one before it came."""
    name = f" ({printable(told.name)})" if told.name else ""
    echo(f"{told.kind} {heading(told.id)}{name} is {state(told.state)}")
    if told.since_s is not None:
        echo(f"  events before {clock(told.since_s)} have left by retention")
    if told.more:
        echo("  older lines are left out: see more with --limit")
    day, before_s = "", None
    for line in told.lines:
        date, at = clock(line.at_s).split()
        if date != day:
            day = date
            echo(f"  {date}")
        passed = "" if before_s is None else f"+{duration(max(0.0, line.at_s - before_s))}"
        before_s = line.at_s
        print_prose(line.text, label=f"{at}.{_milliseconds(line.at_s)} {passed:>8}")
        if line.why:
            print_prose(line.why, label=BECAUSE, indent=" " * 10)
    if not told.lines:
        echo("  nothing is known of it any more")


def _milliseconds(at_s: float) -> str:
    return f"{int(at_s % 1 * 1000):03}"
