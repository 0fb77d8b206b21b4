"""``stoker call``, ``cancel`` and ``kill``: functions and actors by name, from outside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.calls.client import gateway_client
from stoker.cli.ids import Id, resolve_id
from stoker.cli.options import cluster_options, http_client
from stoker.cli.output import echo, print_json, print_line

if TYPE_CHECKING:
    from stoker.runtime.net.http import Content, HttpClient
    from stoker_wire.messages.work import Actor

_MORE_S = 10.0
"""The client waits so much longer than the call may take."""


@click.command()
@cluster_options
@click.option("--actor", metavar="NAME", help="Call a method of this actor: its name or id.")
@click.option("--version", default="", help="[default: the version registered last]")
@click.option("--namespace", help="[default: the one named like the token's user]")
@click.option("--kwarg", "-k", "kwargs", multiple=True, metavar="K=V", help="Repeatable.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Cancel it then. [default: 60, none with --async]",
)
@click.option("--async", "is_async", is_flag=True, help="Print a reference at once, and go on.")
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="With --async: keep the result for so long.",
)
@click.argument("name", metavar="FUNCTION|METHOD")
@click.argument("args", nargs=-1)
def call(
    actor: str | None,
    version: str,
    namespace: str | None,
    kwargs: tuple[str, ...],
    timeout_s: float | None,
    is_async: bool,
    ttl_s: float | None,
    name: str,
    args: tuple[str, ...],
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """Call a registered function, or a method of an actor, and print its result as JSON.

    Arguments are JSON, or texts where they are none: `stoker call square 3`, `stoker call greet Ada`,
    `stoker call --actor counter add 2`.
    """
    from stoker.cli.options import pairs
    from stoker.runtime.net.http import Content
    from stoker_wire.http.gateway.calls import CALL_S, CALLS_PATH, HeldRef

    target = {"actor": actor, "method": name} if actor else {"function": name}
    body: dict[str, Any] = {
        **target,
        "version": version,
        "namespace": namespace,
        "args": [_value_of(text) for text in args],
        "kwargs": {key: _value_of(text) for key, text in pairs(kwargs, "--kwarg").items()},
        "async": is_async,
        "ttl_s": ttl_s,
        "timeout_s": timeout_s,
    }
    client = gateway_client(address, token)
    if is_async:
        held = client.call("POST", CALLS_PATH, body, reply=HeldRef)
        print_json(held) if as_json else echo(held.ref)
        return
    wait_s = (CALL_S if timeout_s is None else timeout_s) + _MORE_S
    content = client.call("POST", CALLS_PATH, body, reply=Content, timeout_s=wait_s)
    _print_result(content, as_json=as_json)


def _value_of(text: str) -> Any:
    """Return an argument: JSON, else the text itself."""
    import msgspec

    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text


def _print_result(content: Content, *, as_json: bool) -> None:
    from stoker_wire.http.codec import JSON

    if content.media_type != JSON:
        sys.stdout.buffer.write(content.data)  # the function returned bytes
        return
    import msgspec

    answer = msgspec.json.decode(content.data)
    print_json(answer) if as_json else print_line(answer["result"])


@click.command()
@cluster_options
@click.option("--force", is_flag=True, help="End its worker, if it does not stop by itself.")
@click.argument("call_id", metavar="REF|TASK")
def cancel(
    call_id: str, force: bool, address: str | None, token: str | None, as_json: bool
) -> None:
    """Cancel a call that was made with this token, by its reference or the id of its task.

    What a program has submitted ends with its job (`stoker job stop`) or its actor (`stoker kill`).
    """
    from stoker_wire.http.gateway.calls import CALLS_PATH, CancelCall, HeldRef

    client = gateway_client(address, token)
    if call_id.startswith("t_"):
        body = CancelCall(task_id=call_id, force=force)
    else:
        body = CancelCall(ref=call_id, force=force)
    held = client.call("POST", f"{CALLS_PATH}/cancel", body, reply=HeldRef)
    if as_json:
        print_json(held)
    elif held.state == "PENDING":
        echo(f"{held.ref} is told to stop")
    else:
        echo(f"{held.ref} had ended: {held.state}")


@click.command()
@cluster_options
@click.option("--namespace", help="That of an actor's name.")
@click.option("--restart", is_flag=True, help="Let it restart, if restarts are left.")
@click.argument("actor", metavar="ID|NAME", type=Id("actor"))
def kill(
    actor: str,
    namespace: str | None,
    restart: bool,
    address: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    """End an actor at once, by its id, or by its name with --namespace."""
    from stoker_wire.messages.work import Actor, KillActor

    client = http_client(address, token)
    actor_id = _named(client, actor, namespace).actor_id if namespace else resolve_id(client, actor)
    body = KillActor(no_restart=not restart, reason="killed by stoker kill")
    record = client.call("POST", f"/v1/actors/{actor_id}/kill", body, reply=Actor)
    if as_json:
        print_json(record)
    else:
        echo(f"{record.actor_id} is {record.state}")


def _named(client: HttpClient, name: str, namespace: str) -> Actor:
    from urllib.parse import quote

    from stoker_wire.messages.work import Actor

    path = f"/v1/named-actors/{quote(namespace, safe='')}/{quote(name, safe='')}"
    return client.call("GET", path, reply=Actor)
