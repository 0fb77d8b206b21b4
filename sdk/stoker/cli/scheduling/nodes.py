"""``stoker node``: what an operator does to a node. ``stoker list nodes`` and ``stoker get`` show them."""

from __future__ import annotations

import click

from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client


@click.group()
def node() -> None:
    """Put GPUs of a node back to use."""


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
    from stoker.cli.output import print_json

    client = http_client(address, token)
    node_id = resolve_id(client, node_id)
    client.call("POST", f"/v1/nodes/{node_id}/gpus/{index}/release")
    if as_json:
        print_json({"node_id": node_id, "index": index})
    else:
        click.echo(f"GPU {index} of {node_id} is back in use")
