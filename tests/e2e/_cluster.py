"""Clusters for end-to-end tests: an embedded one for a module, a head of its own, drivers as processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from stoker.launch import LocalCluster, spawn_local
from stoker.runtime.net.http import HttpClient
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 40.0


@contextlib.contextmanager
def session_root(folder: Path) -> Iterator[None]:
    """All sessions made inside lie in ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SESSION_ROOT", str(folder))
        yield


@contextlib.contextmanager
def embedded(folder: Path, **offer: Any) -> Iterator[stoker.api.init.ClusterInfo]:
    """This process is the driver of a cluster of its own."""
    with session_root(folder):
        info = stoker.init(log_to_driver=False, **offer)
        try:
            yield info
        finally:
            stoker.shutdown()


@contextlib.contextmanager
def head(folder: Path, **offer: Any) -> Iterator[LocalCluster]:
    """A cluster that drivers join and leave, as ``stoker start --head`` makes it."""
    with session_root(folder):
        cluster = spawn_local(embedded=False, num_gpus=offer.pop("num_gpus", 0), **offer)
        try:
            cluster.wait_ready()
            yield cluster
        finally:
            cluster.stop()


def http(cluster: LocalCluster) -> HttpClient:
    """A client of the cluster's gcs."""
    return HttpClient(cluster.info.gcs_url, token=cluster.info.token)


def environment(cluster: LocalCluster, **more: str) -> dict[str, str]:
    """What a process needs to be a driver or a client of the cluster."""
    own = {"STOKER_ADDRESS": cluster.info.gcs_url, "STOKER_TOKEN": cluster.info.token}
    return {**os.environ, **own, **more}


def run_driver(
    cluster: LocalCluster, program: str, *, timeout_s: float = 90.0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a driver to its end."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment(cluster, **more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def cli(cluster: LocalCluster, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``stoker`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", *args],
        env=environment(cluster, **more),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@contextlib.contextmanager
def driver(cluster: LocalCluster, program: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A driver that runs meanwhile; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(program)],
        env=environment(cluster, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str], start: str) -> str:
    """The rest of the first line of output that starts so; fails with all output if none does."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
        said.append(line)
    raise AssertionError(f"the driver ended without {start!r}:\n{''.join(said)}")


def actor_record(actor_id: str) -> dict[str, Any]:
    """An actor as the HTTP API of this driver's cluster shows it."""
    found: dict[str, Any] = stoker.runtime.current.runtime().job.http.call(
        "GET", f"/v1/actors/{actor_id}", reply=dict[str, Any]
    )
    return found


def until_state(actor_id: str, state: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
    """The actor's record once it is in ``state``."""

    def there() -> dict[str, Any] | None:
        found = actor_record(actor_id)
        return found if found["state"] == state else None

    found = until(there, timeout_s, f"actor {actor_id} is {state}", interval_s=0.03)
    assert found is not None
    return found


def caught(call: Callable[[], Any], kind: type[BaseException] = Exception) -> Any:
    """The exception that ``call`` raises."""
    with pytest.raises(kind) as raised:
        call()
    return raised.value


def waits_for(ref: Any) -> str:
    """What a get that passes its timeout says about the ref."""
    return str(caught(lambda: stoker.get(ref, timeout=0.01), exceptions.GetTimeoutError))
