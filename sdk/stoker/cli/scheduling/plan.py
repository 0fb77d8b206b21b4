"""``stoker plan``: where work would go and whom it would preempt, without starting it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from stoker.cli.options import Amounts, cluster_options, http_client, pairs
from stoker.cli.output import echo, heading, plural, print_json, print_prose, print_table
from stoker.cli.scheduling.explain import TO_CHANGE, print_holders, print_verdicts
from stoker.cli.tables import Column, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_wire.messages.elastic import PlannedScaling
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
@click.option(
    "--elastic",
    is_flag=True,
    help="The next round of elastic jobs instead: what each would get, and what replicas are worth.",
)
def plan(
    resources: dict[str, float],
    count: int,
    gang: str | None,
    label: tuple[str, ...],
    strategy: str,
    job: str,
    queue: str,
    priority: int,
    elastic: bool,
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

    if elastic:
        if gang or label or job or queue:
            raise click.UsageError("--elastic plans all elastic jobs: leave the other options out")
        plan_elastic(address, token, as_json)
        return
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


def plan_elastic(address: str | None, token: str | None, as_json: bool) -> None:
    """Print the next round of elastic jobs, by pools that share the same room."""
    from stoker_wire.messages.elastic import ElasticPlan

    reply = http_client(address, token).call("GET", "/v1/elastic-plan", reply=ElasticPlan)
    if as_json:
        print_json(reply)
        return
    if not reply.pools:
        echo("no elastic job runs")
    for pool in reply.pools:
        rooms = sum(pool.rooms.values())
        nodes = plural(len(pool.rooms), "node")
        echo(f"{heading(f'queue {pool.queue}')} room for {rooms} replicas on {nodes}")
        if pool.error:
            print_prose(pool.error, label="all keep what they have: ")
        rows = [_row(one) for one in pool.jobs]
        print_table(rows, ELASTIC_COLUMNS, empty="none", indent="  ")
        if pool.node_more is not None:
            echo(f"  one more node would add {_worth(pool.node_more)} to the sum of values")
        if pool.node_less:
            least = min(pool.node_less, key=lambda name: (pool.node_less[name], name))
            echo(f"  without {least} it would lose {_worth(pool.node_less[least])}")


ELASTIC_COLUMNS = (
    Column("JOB", "job"),
    Column("NOW", "now"),
    Column("NEXT ROUND", "then"),
    Column("SPEEDUP", "speedup", drop=3),
    Column("COULD USE", "more", drop=2),
    Column("WORTH EACH", "worth"),
    Column("ITS LAST", "last", drop=1),
)


def _row(one: PlannedScaling) -> Row:
    return {
        "job": one.job_id,
        "now": _allocation(one.present),
        "then": "the same" if one.target == one.present else _allocation(one.target),
        "speedup": "" if one.speedup is None else f"{one.speedup:.2f}",
        "more": "" if one.more is None else str(one.more),
        "worth": _worth(one.more_worth),
        "last": _worth(one.less_worth),
    }


def _allocation(by_node: Mapping[str, int]) -> str:
    total = sum(by_node.values())
    return f"{total} on {plural(len(by_node), 'node')}" if total else "none"


def _worth(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


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
