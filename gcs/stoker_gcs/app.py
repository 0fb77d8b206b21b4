"""The parts of a gcs process, built once by :func:`build_app`; the HTTP API and the service share them.

Each part gets its collaborators by constructor, so the order of :func:`build_app` is the order of the
floors: store, writer and log, then the registries, then the loops above them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_gcs.controllers.audit import Audit
from stoker_gcs.controllers.drains import Drains
from stoker_gcs.controllers.leader_election import LeaderElection
from stoker_gcs.controllers.objects import ObjectController
from stoker_gcs.controllers.presence import Presence
from stoker_gcs.controllers.reconcile import Reconciler
from stoker_gcs.controllers.retention import Retention, use_step_s
from stoker_gcs.controllers.schedules import ScheduleController
from stoker_gcs.controllers.usage import UsageRecorder
from stoker_gcs.ephemeral.fallback import FallbackEphemeralStore
from stoker_gcs.explain.explain import Explainer
from stoker_gcs.explain.id_prefixes import IdFinder
from stoker_gcs.explain.targets import TargetFinder
from stoker_gcs.history.past import TimeMachine
from stoker_gcs.history.snapshots import Snapshots
from stoker_gcs.history.story import Storyteller
from stoker_gcs.peer_clients import PeerClients
from stoker_gcs.registry.access import Access
from stoker_gcs.registry.actors.placement import ActorPlacement
from stoker_gcs.registry.actors.registry import ActorRegistry
from stoker_gcs.registry.groups.placement import GroupPlacement
from stoker_gcs.registry.groups.registry import GroupRegistry
from stoker_gcs.registry.jobs.arrays import JobArrays
from stoker_gcs.registry.jobs.attempts import JobWork
from stoker_gcs.registry.jobs.driver_processes import DriverProcesses
from stoker_gcs.registry.jobs.driver_tokens import DriverTokens
from stoker_gcs.registry.jobs.elastic import ElasticRegistry
from stoker_gcs.registry.jobs.placement import DriverPlacement
from stoker_gcs.registry.jobs.registry import JobRegistry
from stoker_gcs.registry.jobs.sessions import DriverSessions
from stoker_gcs.registry.jobs.training import TrainingRuns
from stoker_gcs.registry.kv.blobs import Blobs
from stoker_gcs.registry.kv.registry import KeyValues
from stoker_gcs.registry.leases import LeaseReleaser
from stoker_gcs.registry.nodes.probes import NodeProbes
from stoker_gcs.registry.nodes.registry import NodeRegistry
from stoker_gcs.registry.objects.copies import ObjectCopies
from stoker_gcs.registry.objects.registry import DetachedObjects
from stoker_gcs.registry.ownership import Ownership
from stoker_gcs.registry.queues.registry import QueueRegistry
from stoker_gcs.registry.schedules.registry import ScheduleRegistry
from stoker_gcs.registry.task_history import TaskHistory
from stoker_gcs.registry.tokens import Tokens
from stoker_gcs.registry.worker_exits import WorkerExits
from stoker_gcs.state.event_log import EventLog
from stoker_gcs.state.records import StateStore
from stoker_gcs.store.group_commit import GroupCommitWriter
from stoker_wire.messages.common import Role
from stoker_wire.tls.files import files_of

if TYPE_CHECKING:
    from stoker_gcs.ephemeral.protocol import EphemeralStore
    from stoker_gcs.store.protocol import Store
    from stoker_wire.http.server.tokens import TokenSigner
    from stoker_wire.process.background import Background
    from stoker_wire.process.pauses import Pauses
    from stoker_wire.settings import Settings


@dataclass(slots=True)
class GcsApp:
    """Every part of one gcs; the owner of the table of routes."""

    state: StateStore
    ephemeral: FallbackEphemeralStore
    nodes: NodeRegistry
    election: LeaderElection
    presence: Presence
    peers: PeerClients
    kv: KeyValues
    blobs: Blobs
    tokens: Tokens
    access: Access
    jobs: JobRegistry
    elastic: ElasticRegistry
    sessions: DriverSessions
    probes: NodeProbes
    drains: Drains
    actors: ActorRegistry
    groups: GroupRegistry
    objects: DetachedObjects
    copies: ObjectCopies
    object_controller: ObjectController
    queues: QueueRegistry
    schedules: ScheduleRegistry
    schedule_controller: ScheduleController
    worker_exits: WorkerExits
    history: TaskHistory
    training: TrainingRuns
    reconciler: Reconciler
    audit: Audit
    retention: Retention
    snapshots: Snapshots
    time_machine: TimeMachine
    storyteller: Storyteller
    explainer: Explainer
    id_finder: IdFinder
    usage: UsageRecorder
    targets: TargetFinder
    replica_id: str
    url: str = ""
    """The URL at which this replica is reached, once it listens."""
    applied_seq: int = 0
    """The sequence number up to which the views are in step with the log."""

    async def load(self) -> None:
        """Fill the views from SQL, at a known point of the log."""
        await self.state.log.start()
        self.applied_seq = self.state.log.last
        await self.election.load()
        await self.nodes.load()
        await self.jobs.load()
        await self.schedules.load()
        await self.objects.load()

    async def follow_log(self) -> None:
        """Keep the views in step with the log, until cancelled."""
        async for events in self.state.log.follow(self.applied_seq):
            for event in events:
                self.nodes.apply_event(event)
                self.election.apply_event(event)
                self.jobs.apply_event(event)
                self.schedules.apply_event(event)
                self.objects.apply_event(event)
                self.tokens.apply_event(event)
            self.applied_seq = events[-1].seq


def build_app(
    store: Store,
    ephemeral_store: EphemeralStore,
    settings: Settings,
    tokens: TokenSigner,
    background: Background,
    pauses: Pauses | None = None,
) -> GcsApp:
    """Build the parts over a store and an ephemeral store; nothing runs yet."""
    log = EventLog(store, ephemeral_store)
    writer = GroupCommitWriter(store, log.committed, pauses)
    ephemeral = FallbackEphemeralStore(ephemeral_store, store, writer)
    state = StateStore(store, writer, log, ephemeral)
    replica_id = f"gcs_{os.urandom(6).hex()}"
    election = LeaderElection(state, files_of(settings))
    nodes = NodeRegistry(state, settings)
    credential = tokens.service_credential(Role.GCS, replica_id)
    peers = PeerClients(election, nodes.view, settings, credential)
    releaser = LeaseReleaser(state, peers, background)
    jobs = JobRegistry(state)
    actors = ActorRegistry(state, jobs, releaser)
    groups = GroupRegistry(state, jobs)
    history = TaskHistory(state, jobs)
    training = TrainingRuns(state, jobs)
    job_work = JobWork(
        state, peers, actors=actors, groups=groups, releaser=releaser, history=history
    )
    queues = QueueRegistry(state, nodes, jobs)
    schedules = ScheduleRegistry(state, jobs, queues)
    objects = DetachedObjects(state, jobs, settings)
    copies = ObjectCopies(objects, peers, nodes.view)
    blobs = Blobs(state, settings, use_step_s(settings))
    snapshots = Snapshots(state, settings)
    driver_placement = DriverPlacement(state, peers, jobs, job_work, releaser)
    people = Tokens(state, tokens)
    reconciler = Reconciler(
        state,
        nodes=nodes,
        jobs=jobs,
        job_work=job_work,
        driver_placement=driver_placement,
        arrays=JobArrays(state, peers, jobs, driver_placement),
        actors=actors,
        ownership=Ownership(state, actors, groups),
        groups=groups,
        group_placement=GroupPlacement(state, peers, groups),
        actor_placement=ActorPlacement(
            state, peers, actors, releaser, restart_grace_s=settings.infeasible_grace_s
        ),
        releaser=releaser,
        history=history,
        tokens=people,
    )
    access, id_finder = Access(state, jobs, people), IdFinder(state, peers)
    return GcsApp(
        state=state,
        ephemeral=ephemeral,
        nodes=nodes,
        election=election,
        presence=Presence(ephemeral),
        peers=peers,
        kv=KeyValues(state, settings),
        blobs=blobs,
        tokens=people,
        access=access,
        jobs=jobs,
        probes=NodeProbes(nodes, settings),
        drains=Drains(state, peers, nodes=nodes, actors=actors, groups=groups),
        elastic=ElasticRegistry(state),
        sessions=DriverSessions(
            state, jobs, DriverProcesses(peers), DriverTokens(tokens), settings, replica_id
        ),
        actors=actors,
        groups=groups,
        objects=objects,
        copies=copies,
        object_controller=ObjectController(objects, actors, copies, nodes.view),
        queues=queues,
        schedules=schedules,
        schedule_controller=ScheduleController(state, schedules),
        worker_exits=WorkerExits(state, (actors, jobs)),
        history=history,
        training=training,
        reconciler=reconciler,
        audit=Audit(state),
        retention=Retention(
            state, settings, nodes=nodes, jobs=jobs, schedules=schedules, blobs=blobs
        ),
        snapshots=snapshots,
        time_machine=TimeMachine(state, snapshots),
        storyteller=Storyteller(state, history),
        explainer=Explainer(state, peers, jobs=jobs, actors=actors, history=history),
        id_finder=id_finder,
        usage=UsageRecorder(state, peers, nodes),
        targets=TargetFinder(state, peers, access, history, id_finder),
        replica_id=replica_id,
    )
