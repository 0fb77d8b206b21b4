"""Builds of environments for a job, told on stderr while somebody follows the job."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import msgspec

from stoker.cli.output import duration, echo
from stoker_wire.errors import StokerError
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stoker.runtime.net.http import HttpClient

_PATH = "/v1/events"
_KIND = "environment."
_MOST = 100


def follow_builds(client: HttpClient, job_id: str) -> None:
    """Tell from now on what nodes install for a job; the thread that does ends with the process."""
    threading.Thread(
        target=_follow, args=(client, job_id), name="stoker-builds", daemon=True
    ).start()


def _follow(client: HttpClient, job_id: str) -> None:
    # Whoever follows the job hears of what is wrong with the cluster.
    with contextlib.suppress(StokerError):
        query = {"kind": _KIND, "subject": job_id}
        newest = {**query, "order": "desc", "limit": _MOST}
        page = client.call("GET", _PATH, reply=Page[Event], query=newest)
        latest = {(one.node_id, one.key): one for one in builds_of(reversed(page.items))}
        for build in latest.values():
            if build.state is BuildState.INSTALLING:
                _tell(build)
        watched = {**query, "watch": True, "since": page.seq}
        for build in builds_of(client.lines(_PATH, item=Event, query=watched)):
            _tell(build)


def builds_of(events: Iterable[Event]) -> Iterator[EnvironmentBuild]:
    """Yield what the events tell of builds; others, and those of other versions, are passed over."""
    for event in events:
        if event.kind.startswith(_KIND):
            with contextlib.suppress(msgspec.ValidationError):
                yield msgspec.convert(event.payload, EnvironmentBuild)


def _tell(build: EnvironmentBuild) -> None:
    echo(f"stoker: {text_of(build)}", err=True)


def text_of(build: EnvironmentBuild) -> str:
    """Return in a line what a node does, or did."""
    if build.state is BuildState.READY:
        return f"node {build.node_id} installed {build.what} in {duration(build.took_s)}"
    if build.state is BuildState.FAILED:
        why = build.message.partition("\n")[0]
        return f"node {build.node_id} could not install {build.what}: {why}"
    return f"node {build.node_id} installs {build.what}"
