"""The control plane as one replica of the gcs sees it: its processes, their settings and their health."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker_gcs.controllers.leader_election import GCS
from stoker_gcs.state import schema
from stoker_gcs.state.schema import SCHEDULER
from stoker_wire.errors import StokerError
from stoker_wire.http.dashboard.control_plane import (
    PROCESS_PATH,
    ControlPlane,
    ControlProcess,
    DatabaseHealth,
    EphemeralHealth,
    EventLogHealth,
    ProcessStatus,
)

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.service import Service

NODES = 100
"""Nodelets that are asked."""
ASK_S = 2.0
NODELET = "nodelet"


async def control_plane(app: GcsApp, service: Service, *, with_settings: bool) -> ControlPlane:
    """Return it; processes that do not answer in time are there with the reason."""
    database, processes = await asyncio.gather(_database(app), _processes(app, service))
    living = len(app.peers.live_nodes())
    if not with_settings:
        processes = [_without_settings(one) for one in processes]
    return ControlPlane(
        at_s=app.state.now(),
        answers=app.replica_id,
        database=database,
        ephemeral=EphemeralHealth(
            kind=app.ephemeral.kind, up=not app.ephemeral.degraded, shared=app.ephemeral.shared
        ),
        events=EventLogHealth(
            last=app.state.log.last,
            applied=app.applied_seq,
            compacted=app.state.log.compacted,
            watchers=app.state.log.watchers,
        ),
        processes=tuple(processes),
        settings=tuple(service.settings.describe()) if with_settings else (),
        nodes_left_out=max(0, living - NODES),
    )


async def _database(app: GcsApp) -> DatabaseHealth:
    store = app.state.store
    began_s = time.perf_counter()
    await store.get(schema.LEADERS, {"name": SCHEDULER})
    read_s = time.perf_counter() - began_s
    return DatabaseHealth(
        kind=store.kind, revision=schema.REVISION, read_s=read_s, nbytes=await store.nbytes()
    )


async def _processes(app: GcsApp, service: Service) -> list[ControlProcess]:
    nodes = sorted(app.peers.live_nodes(), key=lambda node: node.node_id)[:NODES]
    found = [_with_term(app, *one) for one in await app.presence.all()]
    found += [ControlProcess(service=NODELET, id=node.node_id, url=node.url) for node in nodes]
    slots = asyncio.Semaphore(32)

    async def ask(one: ControlProcess) -> ControlProcess:
        if one.id == app.replica_id:
            return replace(one, status=service.status())
        async with slots:
            return await _ask(app, one)

    return list(await asyncio.gather(*(ask(one) for one in found)))


def _with_term(app: GcsApp, service: str, id_: str, url: str) -> ControlProcess:
    leader = app.election.last_known(service)
    if service == GCS and not app.state.store.shared:
        return ControlProcess(service=service, id=id_, url=url, leads=True)
    leads = leader is not None and leader.holder == id_ and leader.expires_at_s > schema.RESIGNED
    epoch = leader.epoch if leads and leader is not None else 0
    return ControlProcess(service=service, id=id_, url=url, leads=leads, epoch=epoch)


async def _ask(app: GcsApp, one: ControlProcess) -> ControlProcess:
    try:
        async with asyncio.timeout(ASK_S):
            status = await app.peers.client(one.url).call(
                "GET", PROCESS_PATH, reply=ProcessStatus, timeout_s=ASK_S, retry=False
            )
    except TimeoutError:
        return replace(one, problem=f"no answer within {ASK_S:g} s")
    except StokerError as error:
        return replace(one, problem=error.one_line)
    return replace(one, status=status)


def _without_settings(one: ControlProcess) -> ControlProcess:
    return one if one.status is None else replace(one, status=replace(one.status, settings=()))
