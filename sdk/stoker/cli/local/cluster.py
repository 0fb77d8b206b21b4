"""``stoker start`` and ``stoker stop``: clusters and nodes on this machine that outlive a command."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options import (
    cluster_spec,
    given_token,
    given_token_file,
    json_option,
    node_options,
    token_options,
)
from stoker.cli.output import echo, print_json

if TYPE_CHECKING:
    from stoker.local.cluster import LocalCluster
    from stoker.local.sessions import LocalInfo

DEFAULT_PORT = 7600
_POLL_S = 0.02


@click.command()
@click.option("--head", is_flag=True, help="Start a new cluster: control plane and one node.")
@click.option("--address", metavar="URL", help="Join the cluster at URL with one more node.")
@token_options
@click.option("--join-token-file", metavar="FILE", type=click.Path(dir_okay=False),
              help="File with a join token (`stoker token create NAME --role join`): the cluster's secret "
              "is fetched by it, into STOKER_TOKEN_FILE or ~/.stoker/token.")  # fmt: skip
@click.option("--ca-cert-hash", metavar="HASH",
              help="Check STOKER_TLS_CA against this before anything is sent.")  # fmt: skip
@node_options
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65535),
    help="With --head: also a gateway on this port, for people who reach no node. 0: a free one.",
)
@click.option("--block", is_flag=True, help="Stay in the foreground; Ctrl-C stops it.")
@click.option("--timeout", "timeout_s", type=float, default=30.0, show_default=True,
              help="Seconds after which a start that is not done has failed.")  # fmt: skip
@json_option
def start(
    head: bool,
    address: str | None,
    token: str | None,
    gateway_port: int | None,
    join_token_file: str | None,
    ca_cert_hash: str | None,
    block: bool,
    timeout_s: float,
    as_json: bool,
    **node: Any,
) -> None:
    """Start a cluster on this machine (--head), or join one (--address URL).

    It listens on loopback unless --host says otherwise; beyond loopback a token must be given by
    STOKER_TOKEN or STOKER_TOKEN_FILE, the same on every node.
    """
    from stoker.local.cluster import secret_variables, spawn_local, spawn_node
    from stoker_wire.errors import PortInUseError
    from stoker_wire.http.auth import load_token
    from stoker_wire.settings import Settings

    if head == bool(address):
        both = ", not both" if head else ""
        raise click.UsageError(
            f"give --head for a new cluster, or --address URL to join one{both}",
            ctx=click.get_current_context(),
        )
    token = given_token(token)
    if join_token_file and (head or token):
        raise click.UsageError("--join-token-file goes with --address, and with no other token")
    if ca_cert_hash and not join_token_file:
        raise click.UsageError("--ca-cert-hash goes with --join-token-file")
    if node["port"] is None:
        node["port"] = Settings.from_env().port or (DEFAULT_PORT if head else 0)
    spec = cluster_spec(**node)
    if gateway_port is not None:
        if address:
            raise click.UsageError("--gateway-port is for --head: nodes have no gateway")
        spec["gateway_port"] = gateway_port
    if address:
        from stoker.local.address import resolve

        if join_token_file:
            from stoker.local.joining import join

            own = Settings.from_env().token_file
            path = str(join(address, join_token_file, own, ca_hash=ca_cert_hash or ""))
            target = resolve(address, load_token(path))
        else:
            target = resolve(address, token)
            path = given_token_file() or target.token_file
        cluster = spawn_node(target.address, token=target.token, token_file=path, **spec)
    else:
        environ = secret_variables(token, given_token_file()) if token else None
        cluster = spawn_local(environ=environ, embedded=False, **spec)
    try:
        info = cluster.wait_ready(timeout_s)
    except PortInUseError as error:
        raise PortInUseError(_who_listens(spec["host"], spec["port"]) or str(error)) from None
    _print_started(info, as_json)
    if block:
        _stay(cluster)
    else:
        cluster.detach()


def _who_listens(host: str | None, port: int) -> str:
    """Return what to do about the Stoker that listens on a port; nothing if it is no Stoker."""
    from stoker.local.sessions import running_sessions
    from stoker.runtime.net.http import HttpClient
    from stoker_wire.errors import StokerError
    from stoker_wire.tls.files import files_of_env

    other = "or start another on a port of its own: --port 0 takes a free one"
    for info in running_sessions():
        urls = (info.gcs_url, info.scheduler_url) if info.role == "head" else ()
        if f":{port}" not in {url[url.rfind(":") :] for url in (*urls, info.nodelet_url)}:
            continue
        if info.embedded:
            return (
                f"port {port} belongs to the Stoker cluster of a running program (its head is pid "
                f"{info.pid}) and ends with that\nwait for it, {other}"
            )
        what = "a Stoker cluster" if info.role == "head" else "a Stoker node"
        return (
            f"{what} of yours listens on port {port} already (pid {info.pid}, session "
            f"{info.session_dir})\nuse it as it is (`stoker status`), end it with `stoker stop`, "
            f"{other}"
        )
    scheme = "https" if files_of_env().is_on else "http"
    url = f"{scheme}://{'127.0.0.1' if host in (None, '0.0.0.0') else host}:{port}"
    try:
        health = HttpClient(url, token="").call("GET", "/healthz", reply=dict, timeout_s=0.5)
    except (StokerError, ValueError):
        return ""
    service = health.get("service")
    if service is None:
        return ""
    return (
        f"port {port} belongs to the {service} of a Stoker cluster of another user or container\n"
        f"join it with --address {url}, {other}"
    )


def _print_started(info: LocalInfo, as_json: bool) -> None:
    if as_json:
        import msgspec

        print_json(msgspec.structs.replace(info, token=""))
        return
    what = "a cluster" if info.role == "head" else "a node of"
    echo(f"Started {what} {'at ' if info.role == 'head' else ''}{info.gcs_url}")
    echo(f"  node       {info.node_id}")
    echo(f"  logs       {os.path.join(info.session_dir, 'logs')}")
    echo(f"  token      in {info.token_file}")
    if info.role == "head":
        echo(f"  dashboard  {info.gcs_url}/ (log in with `stoker dashboard`)")
        echo("\nOn this machine `stoker status`, `stoker job submit` and")
        echo('`stoker.init(address="auto")` find it by themselves. Elsewhere:')
        echo(f"  export STOKER_ADDRESS={info.gcs_url}")
        echo(f"  export STOKER_TOKEN=$(head -n1 {info.token_file})")
        if info.gcs_url.startswith("https:"):
            echo("and STOKER_TLS_CA, STOKER_TLS_CERT, STOKER_TLS_KEY (docs/tls.md).")
        if info.gateway_url:
            echo(
                "\nFrom outside of its network, where this port alone is reached (docs/gateway.md):"
            )
            echo(f"  export STOKER_ADDRESS={info.gateway_url}")
        echo("\nStop it with `stoker stop`.")


def _stay(cluster: LocalCluster) -> None:
    try:
        while cluster.is_alive():
            time.sleep(0.2)
    except KeyboardInterrupt:
        echo("stopping", err=True)
        cluster.stop()
        return
    raise click.ClickException(f"the process ended by itself; see {cluster.log_path}")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also clusters inside running drivers.")
@click.option("--timeout", "timeout_s", type=float, default=10.0, show_default=True,
              help="Seconds after which what still runs is killed.")  # fmt: skip
@json_option
def stop(everything: bool, timeout_s: float, as_json: bool) -> None:
    """Stop the clusters and nodes that `stoker start` started on this machine."""
    from stoker.local.sessions import is_alive, running_sessions

    infos = [info for info in running_sessions() if everything or not info.embedded]
    infos.sort(key=lambda info: info.role == "head")  # nodes leave before their head goes
    for info in infos:
        _signal(info, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    killed = []
    for info in infos:
        while is_alive(info) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if is_alive(info):
            _signal(info, signal.SIGKILL)
            killed.append(info.pid)
    if as_json:
        print_json([{"pid": i.pid, "address": i.gcs_url, "killed": i.pid in killed} for i in infos])
        return
    for info in infos:
        how = f" (killed: it did not end within {timeout_s:g} s)" if info.pid in killed else ""
        what = "cluster" if info.role == "head" else "node of"
        echo(f"Stopped the {what} {info.gcs_url}{how}")
    if not infos:
        echo("Nothing runs on this machine that `stoker start` started.")


def _signal(info: LocalInfo, signum: int) -> None:
    try:
        os.kill(info.pid, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise click.ClickException(
            f"process {info.pid} belongs to another user; stop it as that user"
        ) from None
