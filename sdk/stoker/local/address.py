"""Resolution of the cluster and its token: one order for drivers, the CLI and ``stoker.jobs``.

The arguments, then ``STOKER_ADDRESS`` and ``STOKER_TOKEN`` or ``STOKER_TOKEN_FILE``, then the newest
cluster of this machine. Reads files and the environment; starts nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from stoker.local.sessions import find_running, running_sessions, session_root, with_token
from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import (
    DeadlineExceededError,
    StartError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.auth import load_token
from stoker_wire.http.client.endpoints import checked_address, urls_of

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO = "auto"
"""As an address: the one of ``STOKER_ADDRESS``, else the newest cluster of this machine."""

_DEFAULT_TOKEN_FILE = "~/.stoker/token"
_PROBE_S = 0.5


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A gcs and the token that it takes, with the file that the token is from, if it is from one."""

    address: str
    token: str
    token_file: str = ""


def resolve(
    address: str | None = None,
    token: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    embedded: bool = True,
) -> Target:
    """Return the cluster to use; StartError, which names the fix, if there is none.

    ``"auto"`` is as if nothing was given. ``embedded`` says whether a cluster inside a driver of this
    machine counts.
    """
    environ = os.environ if environ is None else environ
    if not address or address == AUTO:
        address = environ.get("STOKER_ADDRESS") or AUTO
    if address != AUTO:
        url = checked_address(address)
        if token:
            return Target(address=url, token=token)
        found, path = _token_for(url, environ)
        return Target(address=url, token=found, token_file=path)
    info = find_running(session_root(environ), embedded=embedded)
    if info is None:
        raise StartError(
            "no running cluster was found on this machine\n"
            "start one with `stoker start --head`, or name one with --address or STOKER_ADDRESS"
        )
    if token:
        return Target(address=info.gcs_url, token=token)
    return Target(address=info.gcs_url, token=info.token, token_file=info.token_file)


def _token_for(url: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the token for a cluster, and the file that it is in."""
    own_job = environ.get("STOKER_JOB_ID") and environ.get("STOKER_TOKEN_FILE")
    if own_job and os.path.exists(own_job):
        return load_token(own_job), own_job  # STOKER_TOKEN is of the time when the job began
    if environ.get("STOKER_TOKEN"):
        return environ["STOKER_TOKEN"], ""
    path = environ.get("STOKER_TOKEN_FILE", "")
    if path:
        return load_token(path), path
    for info in running_sessions(session_root(environ)):
        if _is_same_url(info.gcs_url, url):
            return with_token(info).token, info.token_file
    try:
        return load_token(_DEFAULT_TOKEN_FILE), _DEFAULT_TOKEN_FILE
    except StartError:
        _check_reachable(url)
        raise


def token_file_of(address: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the file with the token of a cluster, as services that were started here read it."""
    environ = os.environ if environ is None else environ
    if environ.get("STOKER_TOKEN_FILE"):
        return environ["STOKER_TOKEN_FILE"]
    address = address or environ.get("STOKER_ADDRESS") or AUTO
    url = "" if address == AUTO else checked_address(address)
    for info in running_sessions(session_root(environ)):
        if info.role == "head" and (_is_same_url(info.gcs_url, url) if url else not info.embedded):
            return info.token_file
    return _DEFAULT_TOKEN_FILE


def _check_reachable(url: str) -> None:
    """Raise if nothing answers at ``url``: that must be fixed before a missing token."""
    try:
        HttpClient(url, token="").call("GET", "/healthz", timeout_s=_PROBE_S)
    except (UnavailableError, DeadlineExceededError):
        raise
    except StokerError:
        return


def _is_same_url(known: str, url: str) -> bool:
    return known in urls_of(url.replace("//localhost:", "//127.0.0.1:"))
