"""``stoker object``: values that a token holds by reference, as arguments and results of calls."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli.calls.client import gateway_client
from stoker.cli.options import cluster_options
from stoker.cli.output import ago, echo, nbytes, print_json, print_table

_WAIT_S = 3600.0
_POLL_S = 20.0


@click.group("object")
def object_group() -> None:
    """Put, get and free values by reference; they end with the token or their time."""


@object_group.command()
@cluster_options
@click.option("--json-value", is_flag=True, help="The file is JSON, and not bytes.")
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Keep it for so long. [default: 3600]",
)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
def put(
    file: str,
    json_value: bool,
    ttl_s: float | None,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Put a file (- is the input) and print its reference, an argument as '{"$ref": "o_..."}'."""
    from msgspec import Raw

    from stoker_wire.http.gateway.calls import REFS_PATH, HeldRef

    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    body = Raw(data) if json_value else data
    client = gateway_client(address, token)
    held = client.call("POST", REFS_PATH, body, query={"ttl_s": ttl_s}, reply=HeldRef)
    print_json(held) if as_json else echo(held.ref)


@object_group.command()
@cluster_options
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write it there.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0),
    default=_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for it.",
)
@click.argument("ref")
def get(
    ref: str,
    output: str | None,
    wait_s: float,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Print a value: JSON, or bytes as they are. With --json its state, and no value."""
    import time

    from stoker.runtime.net.http import Content
    from stoker_wire.http.gateway.calls import REFS_PATH, HeldRef

    client = gateway_client(address, token)
    path = f"{REFS_PATH}/{ref}"
    deadline_s = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, min(_POLL_S, deadline_s - time.monotonic()))
        held = client.call("GET", path, query={"wait_s": left_s}, reply=HeldRef)
        if held.state != "PENDING" or time.monotonic() >= deadline_s:
            break
    if as_json:
        print_json(held)
        return
    data = client.call("GET", f"{path}/value", reply=Content, timeout_s=_WAIT_S).data
    if output is not None:
        Path(output).write_bytes(data)
        return
    sys.stdout.buffer.write(data)
    if sys.stdout.isatty():
        echo()


@object_group.command()
@cluster_options
@click.argument("refs", nargs=-1, required=True)
def free(refs: tuple[str, ...], address: str | None, token: str | None, as_json: bool) -> None:
    """Free values; of calls that have not ended it cancels them."""
    from stoker_wire.http.gateway.calls import REFS_PATH

    client = gateway_client(address, token)
    for ref in refs:
        client.call("DELETE", f"{REFS_PATH}/{ref}")
    print_json({"freed": refs}) if as_json else echo(f"{len(refs)} freed")


@object_group.command("list")
@cluster_options
def list_(address: str | None, token: str | None, as_json: bool) -> None:
    """List what this token holds."""
    from msgspec import to_builtins

    from stoker_wire.http.gateway.calls import REFS_PATH, HeldRefs

    held = gateway_client(address, token).call("GET", REFS_PATH, reply=HeldRefs)
    if as_json:
        print_json(held.items)
        return
    print_table(
        [to_builtins(one) for one in held.items],
        {
            "REF": "ref",
            "STATE": "state",
            "OF": "name",
            "SIZE": lambda row: nbytes(row["nbytes"]),
            "AGE": lambda row: ago(row["created_at_s"]),
        },
        empty="no values",
    )
