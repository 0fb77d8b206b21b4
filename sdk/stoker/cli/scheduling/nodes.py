"""``stoker node``: what an operator does to a node. ``stoker list nodes`` and ``stoker get`` show them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient
    from stoker_wire.messages.cluster import DrainStatus, Node


_POLL_S = 0.2


@click.group()
def node() -> None:
    """Take nodes out of use and back: cordon, taint, drain; put GPUs back to use."""


@node.command("cordon")
@cluster_options
@click.argument("node_id", metavar="NODE", type=Id("node"))
@click.option("--reason", default="", help="Why, for people; `stoker explain` shows it.")
def cordon(
    node_id: str, reason: str, address: str | None, token: str | None, as_json: bool
) -> None:
    """Place nothing more on a node. What runs there goes on."""
    from stoker_wire.messages.cluster import CordonNode

    client = http_client(address, token)
    record = _post(client, node_id, "cordon", CordonNode(reason=reason))
    assert record.cordon is not None
    _show(record, record.cordon.text, as_json)


@node.command("uncordon")
@cluster_options
@click.argument("node_id", metavar="NODE", type=Id("node"))
def uncordon(node_id: str, address: str | None, token: str | None, as_json: bool) -> None:
    """Place work on a node again."""
    record = _post(http_client(address, token), node_id, "uncordon", None)
    _show(record, "open to new work", as_json)


@node.command("drain")
@cluster_options
@click.argument("node_id", metavar="NODE", type=Id("node"))
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="End then what has not finished.",
)
@click.option("--reason", default="", help="Why, for people; `stoker explain` shows it.")
@click.option("--wait", is_flag=True, help="Return when the node has left.")
def drain(
    node_id: str,
    deadline_s: float,
    reason: str,
    wait: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Empty a node: what runs finishes or is moved, then the node leaves.

    Actors are started elsewhere once their running calls have finished, objects are taken over by another
    node, tasks that the deadline ends run again. `stoker explain NODE` says what is left; `uncordon` cancels.
    """
    from stoker_wire.messages.cluster import DrainNode

    client = http_client(address, token)
    record = _post(client, node_id, "drain", DrainNode(deadline_s=deadline_s, reason=reason))
    assert record.drain is not None
    if not wait:
        _show(record, record.drain.text, as_json)
        return
    status = _wait_for_drain(client, record.node_id, quiet=as_json)
    if as_json:
        print_json(status)
    else:
        echo(status.summary)
    if status.state != "DRAINED":
        raise SystemExit(1)


def _wait_for_drain(client: HttpClient, node_id: str, *, quiet: bool) -> DrainStatus:
    from stoker_wire.messages.cluster import DrainStatus

    shown = ""
    while True:
        status = client.call("GET", f"/v1/nodes/{node_id}/drain", reply=DrainStatus)
        if status.state != "DRAINING":
            return status
        if status.summary != shown and not quiet:
            shown = status.summary
            echo(shown)
        time.sleep(_POLL_S)


@node.command("taint")
@cluster_options
@click.argument("node_id", metavar="NODE", type=Id("node"))
@click.argument("taints", metavar="KEY=VALUE:EFFECT|KEY-", nargs=-1, required=True)
def taint(
    node_id: str, taints: tuple[str, ...], address: str | None, token: str | None, as_json: bool
) -> None:
    """Keep work away from a node that does not tolerate its taints, as in Kubernetes.

    EFFECT is NoSchedule, PreferNoSchedule or NoExecute, which also ends what is there. `KEY-` and
    `KEY:EFFECT-` remove taints.
    """
    from stoker_wire.messages.cluster import ChangeTaints

    removed = tuple(text for text in taints if text.endswith("-"))
    added = tuple(text for text in taints if not text.endswith("-"))
    body = ChangeTaints(add=added, remove=removed)
    record = _post(http_client(address, token), node_id, "taints", body)
    _show(record, f"has {', '.join(one.text for one in record.taints) or 'no taints'}", as_json)


@node.command("release-gpu")
@cluster_options
@click.argument("node_id", metavar="NODE", type=Id("node"))
@click.argument("index", type=click.IntRange(0))
def release_gpu(
    node_id: str, index: int, address: str | None, token: str | None, as_json: bool
) -> None:
    """Put a GPU back to use that was quarantined (`stoker get NODE` says why).

    One whose memory was not free comes back by itself once it is; after an error of the GPU it is for you to
    say. Processes that still have memory on it no longer count.
    """
    client = http_client(address, token)
    node_id = resolve_id(client, node_id)
    client.call("POST", f"/v1/nodes/{node_id}/gpus/{index}/release")
    if as_json:
        print_json({"node_id": node_id, "index": index})
    else:
        echo(f"GPU {index} of {node_id} is back in use")


def _post(client: HttpClient, node_id: str, what: str, body: object) -> Node:
    from stoker_wire.messages.cluster import Node

    path = f"/v1/nodes/{resolve_id(client, node_id)}/{what}"
    return client.call("POST", path, body, reply=Node)


def _show(record: Node, text: str, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        echo(f"{record.node_id} ({record.hostname}): {text}")
