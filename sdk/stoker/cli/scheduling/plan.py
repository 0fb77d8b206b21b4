"""``stoker plan``: where work would go and whom it would preempt, without starting it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.options import Amounts, cluster_options, http_client, pairs
from stoker.cli.output import echo, heading, plural, print_json, print_prose
from stoker.cli.scheduling.explain import TO_CHANGE, print_holders, print_verdicts

if TYPE_CHECKING:
    from stoker_wire.messages.groups import PlannedLease

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@click.command()
@cluster_options
@click.option(
    "--resources",
    type=Amounts(),
    default={"CPU": 1.0},
    help="What each needs: CPU=4,GPU=0.5,memory=8GiB. [default: CPU=1]",
)
@click.option("--count", type=click.IntRange(1, 1000), default=1, help="How many. [default: 1]")
@click.option(
    "--gang",
    type=click.Choice(STRATEGIES, case_sensitive=False),
    help="All together or none, as the bundles of a placement group of this strategy.",
)
@click.option("--label", multiple=True, metavar="K=V", help="Only nodes with this label.")
@click.option(
    "--strategy",
    type=click.Choice(["hybrid", "spread"]),
    default="hybrid",
    help="How each chooses among nodes, but for gangs. [default: hybrid]",
)
@click.option("--job", default="", metavar="ID", help="As work of this job.")
@click.option("--queue", default="", metavar="NAME", help="As work of a job in this queue.")
@click.option("--priority", type=int, default=0, help="Its priority. [default: 0]")
def plan(
    resources: dict[str, float],
    count: int,
    gang: str | None,
    label: tuple[str, ...],
    strategy: str,
    job: str,
    queue: str,
    priority: int,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Say where work would go, if it were asked for now, and whom it would preempt.

    The scheduler runs its own decision on a copy of its state: through the queue, its limits, fairness
    and reservations. Nothing starts, and nobody is preempted.
    """
    from stoker_wire.messages.cluster import Demand
    from stoker_wire.messages.common import SpreadPolicy, Strategy
    from stoker_wire.messages.groups import Bundle, GroupStrategy, PlanReply, PlanRequest

    if job and queue:
        raise click.UsageError("--queue is that of the job: give --job or --queue")
    if gang and strategy != "hybrid":
        raise click.UsageError(
            "--strategy is for work that is not a gang: --gang names that of a gang"
        )
    selector = pairs(label, "--label")
    if gang:
        bundle = Bundle(resources=resources, label_selector=selector)
        body = PlanRequest(
            bundles=(bundle,) * count,
            strategy=GroupStrategy(gang),
            job_id=job,
            queue=queue,
            priority=priority,
        )
    else:
        demand = Demand(
            job_id=job,
            resources=resources,
            label_selector=selector,
            strategy=Strategy(policy=SpreadPolicy(strategy)),
            priority=priority if job else 0,
        )
        body = PlanRequest(demands=(demand,) * count, job_id=job, queue=queue, priority=priority)
    reply = http_client(address, token).call("POST", "/v1/plan", body, reply=PlanReply)
    if as_json:
        print_json(reply)
        return
    for number, placement in enumerate(reply.placements, 1):
        title = f"gang of {count}" if gang else f"{number} of {count}"
        print_placement(title, placement)


def print_placement(title: str, planned: PlannedLease) -> None:
    """Print what would become of one request: where it goes, or why not, and whom it preempts."""
    where = f" on {planned.node_id}" if planned.node_id else ""
    if planned.bundles:
        where = f" on {plural(len({one.node_id for one in planned.bundles}), 'node')}"
    gpus = ", ".join(f"{index}" for index in planned.gpus)
    then = " once the leases below have ended, then starts" if planned.victims else ""
    echo(f"{heading(title)} {planned.outcome}{then}{where}" + (f" (GPU {gpus})" if gpus else ""))
    for one in planned.bundles:
        devices = f", GPU {', '.join(map(str, one.gpus))}" if one.gpus else ""
        echo(f"  bundle {one.bundle}: {one.node_id}{devices}")
    if planned.reason:
        print_prose(planned.reason)
    for remedy in planned.remedies:
        print_prose(remedy.text, label=TO_CHANGE)
    if planned.victims:
        print_holders(planned.victims)
    if planned.outcome in ("waits", "rejected") and planned.verdicts:
        print_verdicts(planned.verdicts)
