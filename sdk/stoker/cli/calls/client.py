"""The client of commands that need a gateway: that of the local cluster, or the one that is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.cli.options import given_token

if TYPE_CHECKING:
    from stoker.runtime.net.http import HttpClient


def gateway_client(address: str | None, token: str | None) -> HttpClient:
    """Return a client of the gateway of the cluster that is meant; a gcs without one says how to start it."""
    from stoker.local.address import resolve
    from stoker.local.sessions import running_sessions, session_root
    from stoker.runtime.net.http import HttpClient

    target = resolve(address, given_token(token))
    url = target.address
    for info in running_sessions(session_root()):
        if info.gcs_url == url and info.gateway_url:
            url = info.gateway_url
    return HttpClient(url, token=target.token)
