"""``stoker queue``: divide the cluster among tenants, and see what each has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options import Amounts, cluster_options, http_client
from stoker.cli.output import echo, print_json, print_table, resources
from stoker_wire.amounts import parse_amount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.runtime.net.http import HttpClient

_LIMITS = ("quota", "limit", "user_limit", "job_limit")


@click.group("queue")
def queue() -> None:
    """Divide the cluster among tenants: queues with weights, quotas and limits.

    Jobs name theirs: stoker job submit --queue NAME, stoker.init(queue=NAME).
    """


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a queue's settings; what is not given is None."""
    for option in reversed(
        [
            click.option("--parent", metavar="QUEUE", help="The queue that it is a part of."),
            click.option(
                "--weight",
                type=click.FloatRange(0, min_open=True),
                help="Its part, beside queues of the same parent, of what quotas leave. [default: 1]",
            ),
            click.option(
                "--quota",
                type=Amounts(),
                help="What it can count on; others borrow it meanwhile: GPU=8,memory=64GiB.",
            ),
            click.option(
                "--limit", type=Amounts(), help="The most that it may have, borrowed included."
            ),
            click.option("--user-limit", type=Amounts(), help="The most of it for one user."),
            click.option("--job-limit", type=Amounts(), help="The most of it for one job."),
            click.option(
                "--rate-limit",
                type=click.FloatRange(0),
                help="Leases a second that start for one user; 0 for any number.",
            ),
            click.option(
                "--policy",
                metavar="NAME",
                help="The order of its requests: priority, fifo, fair, smallest, or an installed one.",
            ),
            click.option(
                "--node-filter",
                metavar="CONDITION",
                help="A condition on the nodes for all of it: \"labels.rack != 'r7'\"; '' for none.",
            ),
            click.option(
                "--force", is_flag=True, help="Promise quotas that the cluster does not have yet."
            ),
        ]
    ):
        command = option(command)
    return command


@queue.command("create")
@cluster_options
@click.argument("name")
@_settings
def create(
    name: str, address: str | None, token: str | None, as_json: bool, **settings: Any
) -> None:
    """Create a queue; jobs can be submitted to it at once."""
    from stoker_wire.messages.queues import CreateQueue, Queue

    given = {field: value for field, value in settings.items() if value is not None}
    client = http_client(address, token)
    _print(client.call("POST", "/v1/queues", CreateQueue(name=name, **given), reply=Queue), as_json)


@queue.command("set")
@cluster_options
@click.argument("name")
@_settings
def set_(name: str, address: str | None, token: str | None, as_json: bool, **settings: Any) -> None:
    """Change a queue, for all that starts from now on; what is not given stays.

    '' takes all amounts of a quota or limit away: --limit ''.
    """
    _change(http_client(address, token), name, as_json, **settings)


@queue.command("stop")
@cluster_options
@click.argument("name")
def stop(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Let nothing more start from a queue; what runs goes on."""
    _change(http_client(address, token), name, as_json, stopped=True)


@queue.command("start")
@cluster_options
@click.argument("name")
def start(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Let work start again from a queue that was stopped."""
    _change(http_client(address, token), name, as_json, stopped=False)


def _change(client: HttpClient, name: str, as_json: bool, **settings: Any) -> None:
    from stoker_wire.messages.queues import ChangeQueue, Queue

    body = ChangeQueue(**settings)
    _print(client.call("PATCH", _path(name), body, reply=Queue), as_json)


@queue.command("delete")
@cluster_options
@click.argument("name")
def delete(name: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Remove a queue that nothing is in; `default` is reset."""
    from stoker_wire.messages.queues import Queue

    client = http_client(address, token)
    removed = client.call("DELETE", _path(name), reply=Queue)
    if as_json:
        _print(removed, as_json)
    else:
        echo(f"queue {removed.name} is removed")


@queue.command("apply")
@cluster_options
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--force", is_flag=True, help="Promise quotas that the cluster does not have yet.")
def apply(file: str, force: bool, address: str | None, token: str | None, as_json: bool) -> None:
    """Make the queues be those of a TOML file, all at once: others are removed.

    \b
    [queues.research]
    weight = 3
    quota = {GPU = 8, memory = "64GiB"}
    """
    from stoker_wire.messages.queues import SetQueues, SetQueuesReply

    body = SetQueues(queues=tuple(read_queues(file)), force=force)
    reply = http_client(address, token).call("PUT", "/v1/queues", body, reply=SetQueuesReply)
    if as_json:
        print_json(reply)
        return
    for verb in ("created", "changed", "removed"):
        for name in getattr(reply, verb):
            echo(f"queue {name} is {verb}")


def read_queues(file: str) -> list[Any]:
    """Return the queues of a TOML file; a usage error names the part that cannot be read."""
    import tomllib

    import msgspec

    from stoker_wire.messages.queues import CreateQueue

    with open(file, "rb") as stream:
        try:
            content = tomllib.load(stream)
        except tomllib.TOMLDecodeError as error:
            raise click.BadParameter(f"{file}: {error}", param_hint="FILE") from None
    unknown = [name for name in content if name != "queues"]
    tables = content.get("queues")
    if unknown or not isinstance(tables, dict):
        raise click.BadParameter(
            f"{file}: {f'{unknown[0]!r} is unknown' if unknown else 'there is no queue'}; "
            "write a table for each: [queues.NAME]",
            param_hint="FILE",
        )
    made = []
    for name, table in tables.items():
        try:
            made.append(msgspec.convert({"name": name, **_amounts(table)}, CreateQueue))
        except (AttributeError, TypeError, ValueError) as error:
            raise click.BadParameter(
                f"{file}: queue {name!r}: {error}", param_hint="FILE"
            ) from None
    return made


def _amounts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a queue's table with its amounts as numbers: they may be written as 64GiB."""
    return {
        field: {name: parse_amount(written) for name, written in value.items()}
        if field in _LIMITS
        else value
        for field, value in table.items()
    }


@queue.command("list")
@cluster_options
def list_(address: str | None, token: str | None, as_json: bool) -> None:
    """List queues: what each may have, has and waits for."""
    from stoker.cli.tables import Column
    from stoker_wire.messages.control import Page
    from stoker_wire.messages.queues import DEFAULT_QUEUE, Queue, QueueUsage

    client = http_client(address, token)
    query = {"limit": 1000}
    queues = client.call("GET", "/v1/queues", reply=Page[Queue], query=query).items
    usages = client.call("GET", "/v1/queue-usage", reply=Page[QueueUsage], query=query).items
    known = {one.name: one for one in queues}
    known.setdefault(DEFAULT_QUEUE, Queue(name=DEFAULT_QUEUE))
    used = {one.name: one for one in usages}
    rows = []
    for name in _by_parent(known):
        usage = used.get(name, QueueUsage(name=name))
        rows.append(
            {
                "name": name,
                "parent": known[name].parent,
                "weight": known[name].weight,
                "quota": known[name].quota,
                "limit": known[name].limit,
                "stopped": known[name].stopped,
                "node_filter": known[name].node_filter,
                "used": usage.used,
                "share": usage.share,
                "entitled": usage.entitled,
                "leases": usage.leases,
                "waiting": usage.waiting,
                "held": usage.held,
            }
        )
    if as_json:
        print_json(rows)
        return
    columns = (
        Column("queue", lambda row: f"{row['name']}{' (stopped)' if row['stopped'] else ''}"),
        Column("parent", "parent", drop=6),
        Column("weight", lambda row: f"{row['weight']:g}", drop=5),
        Column("quota", lambda row: resources(row["quota"]), drop=4, shrink=12),
        Column("limit", lambda row: resources(row["limit"]), drop=3, shrink=12),
        Column("used", lambda row: resources(row["used"]), drop=2, shrink=12),
        Column("share", lambda row: f"{row['share']:.0%} of {row['entitled']:.0%}"),
        Column("leases", "leases", drop=7),
        Column("waiting", "waiting"),
        Column("held", "held", drop=1, shrink=20),
    )
    print_table(rows, columns, empty="no queues")


def _by_parent(queues: Mapping[str, Any]) -> list[str]:
    """Return the names so that each queue comes right before those below it."""
    ordered: list[str] = []
    waiting = sorted(name for name, one in queues.items() if not one.parent)[::-1]
    while waiting:
        name = waiting.pop()
        ordered.append(name)
        waiting += sorted(below for below, one in queues.items() if one.parent == name)[::-1]
    return ordered


def _path(name: str) -> str:
    from urllib.parse import quote

    return f"/v1/queues/{quote(name, safe='')}"


def _print(made: Any, as_json: bool) -> None:
    if as_json:
        print_json(made)
    else:
        echo(f"queue {made.name}" + (" is stopped" if made.stopped else ""))
