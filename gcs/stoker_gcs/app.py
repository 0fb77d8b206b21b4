"""Everything a gcs process is made of, wired once; the HTTP API and the service share it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_gcs.controllers.leader_election import Leaders
from stoker_gcs.controllers.lease_requests import Releases
from stoker_gcs.controllers.reconcile import Reconciler
from stoker_gcs.ephemeral.fallback import FallbackHot
from stoker_gcs.peer_clients import Links
from stoker_gcs.registry.actors.ownership import Ownership
from stoker_gcs.registry.actors.placement import ActorPlacement
from stoker_gcs.registry.actors.registry import ActorRegistry
from stoker_gcs.registry.jobs.launch import Launcher
from stoker_gcs.registry.jobs.registry import JobLedger
from stoker_gcs.registry.jobs.sessions import Sessions
from stoker_gcs.registry.kv import Blobs, KeyValues
from stoker_gcs.registry.nodes.registry import NodeRegistry
from stoker_gcs.registry.tasks.history import TaskHistory
from stoker_gcs.registry.tokens import Tokens
from stoker_gcs.state.event_log import EventLog
from stoker_gcs.state.records import Truth
from stoker_gcs.store.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.ephemeral.protocol import HotStore
    from stoker_gcs.store.protocol import Store
    from stoker_wire.messages.control import Event
    from stoker_wire.process.background import Background
    from stoker_wire.settings import Settings

COMPACT_EVERY_S = 60.0
KEEP_EVENTS = 200_000


@dataclass(slots=True)
class Parts:
    """See the module."""

    truth: Truth
    hot: FallbackHot
    nodes: NodeRegistry
    leaders: Leaders
    links: Links
    kv: KeyValues
    blobs: Blobs
    tokens: Tokens
    ledger: JobLedger
    sessions: Sessions
    actors: ActorRegistry
    history: TaskHistory
    reconciler: Reconciler
    replica_id: str
    observed: int = 0
    """The sequence number up to which the views are in step with the log."""

    async def load(self) -> None:
        """Read what is kept in memory from SQL, at a known point of the log."""
        await self.truth.log.start()
        self.observed = self.truth.log.last
        await self.leaders.load()
        await self.nodes.load()
        await self.ledger.load()

    async def observe(self) -> None:
        """Keep the views in step with the log, forever."""
        async for events in self.truth.log.follow(self.observed):
            for event in events:
                self.nodes.observe(event)
                self.leaders.observe(event)
                self.ledger.observe(event)
                self.tokens.observe(event)
            self.observed = events[-1].seq


def assemble(
    store: Store, hot: HotStore, settings: Settings, token: str, background: Background
) -> Parts:
    """Wire the parts over a store and a hot store."""
    log: EventLog

    def committed(events: Sequence[Event]) -> None:
        log.committed(events)

    journal = Journal(store, committed)
    with_fallback = FallbackHot(hot, store, journal)
    log = EventLog(store, with_fallback.announce, lambda: with_fallback.hears)
    truth = Truth(store, journal, log, with_fallback)
    leaders = Leaders(truth)
    nodes = NodeRegistry(truth, settings)
    links = Links(leaders, lambda: nodes.view, settings, token)
    releases = Releases(truth, links, background)
    ledger = JobLedger(truth)
    actors = ActorRegistry(truth, ledger, releases)
    history = TaskHistory(truth, ledger)
    reconciler = Reconciler(
        truth,
        nodes=nodes,
        ledger=ledger,
        launcher=Launcher(truth, links, ledger, releases),
        actors=actors,
        ownership=Ownership(truth, actors),
        placement=ActorPlacement(
            truth, links, actors, releases, restart_grace_s=settings.infeasible_grace_s
        ),
        releases=releases,
        history=history,
    )
    return Parts(
        truth=truth,
        hot=with_fallback,
        nodes=nodes,
        leaders=leaders,
        links=links,
        kv=KeyValues(truth),
        blobs=Blobs(truth),
        tokens=Tokens(truth, token),
        ledger=ledger,
        sessions=Sessions(truth, ledger, settings),
        actors=actors,
        history=history,
        reconciler=reconciler,
        replica_id=f"gcs_{os.urandom(6).hex()}",
    )
