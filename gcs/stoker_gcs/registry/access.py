"""Access: the principal of a token at this moment, and the records that are its to see or to change.

The signature of a token was checked before. Here its claims meet the state: a token may be revoked, and a
job's dies with the job. Admins and services own all; viewers see all. A user owns the jobs submitted with
tokens of that name, and what these made. A job sees what its user does, and changes what is its own or of
jobs that it submitted. What has a name belongs to all who may use its namespace.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.jobs.rules import Submitter
from stoker_gcs.registry.objects.rules import OBJECTS
from stoker_gcs.registry.schedules.rules import SCHEDULES
from stoker_gcs.state import schema
from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http.auth import channel_proof
from stoker_wire.http.principals import ANONYMOUS, ROOT, Principal
from stoker_wire.messages.common import ANY_NAMESPACE, Role
from stoker_wire.messages.control import IdMatches
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.kernels import TUNING_NAMESPACE
from stoker_wire.messages.objects import ACTOR_NAMESPACE, CACHE_NAMESPACE
from stoker_wire.messages.work import DETACHED_JOB, ActorState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.registry.tokens import Tokens
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition
    from stoker_wire.messages.control import Event, Page, ReviewChannel
    from stoker_wire.messages.work import Job

R = TypeVar("R")

GRACE_S = 60.0
"""The processes of a job that has ended may report and read for so long."""
MAX_JOBS = 10_000
"""Jobs of one user that its lists look through, the newest."""
_MAX_RESOLVED = 1_000
_READS = frozenset({"GET", "HEAD"})
_READING_POSTS = ("/locate", "/worker-logs")
"""The ends of paths of a POST that changes nothing."""
_OF_ALL = ("node.", "gpu.", "queue.", "leader.")
"""Kinds of events that are nobody's own."""


class Owned(NamedTuple):
    """Whose a record is: the user of its job, and whoever may use the namespace in which it has a name.

    What a detached actor has made is of the job that made that actor.
    """

    what: str
    job_id: str = ""
    namespace: str = ""
    user: str = ""


class Access:
    """The authority of the gcs over tokens, and the rules of ownership."""

    def __init__(self, state: StateStore, jobs: JobRegistry, tokens: Tokens) -> None:
        self._state = state
        self._jobs = jobs
        self._tokens = tokens
        self._resolved: dict[str, tuple[Principal, Job, Principal]] = {}
        """Job id -> what the last token of the job says, the record it was resolved with, and the outcome."""

    # -- who it is ------------------------------------------------------------------------------

    async def resolve(self, principal: Principal) -> Principal:
        """Return the principal as the state has it; UnauthorizedError if its token is not valid any more."""
        if principal.token_id:
            await self._tokens.check_valid(principal)
        elif Role.JOB in principal.roles and not principal.owns_all:
            return await self._of_job(principal)
        return principal

    async def _of_job(self, principal: Principal) -> Principal:
        job_id, namespace = principal.job_id, ""
        if job_id == DETACHED_JOB:
            actor = await self._state.find(ACTORS, principal.actor_id)
            if actor is None or actor.record.state is ActorState.DEAD:
                raise _refused(f"actor {principal.actor_id or 'unknown'} has ended")
            job_id = actor.record.origin_job_id or actor.record.job_id
            namespace = actor.record.namespace
            if job_id == DETACHED_JOB:  # made by hand, by whoever has the cluster's secret
                return replace(principal, name=ROOT.name, namespaces=(namespace, ANY_NAMESPACE))
        job = await self._job(job_id)
        if job is None:
            raise _refused(f"there is no job {job_id or 'yet'}")
        over = job.ended_at_s is not None and job.ended_at_s + GRACE_S < self._state.now()
        if over and principal.job_id != DETACHED_JOB:
            raise _refused(f"{principal} has ended")
        token, record, resolved = self._resolved.get(job_id, (None, None, ANONYMOUS))
        if token is not principal or record is not job:
            resolved = Principal(
                roles=principal.roles,
                name=job.user,
                job_id=principal.job_id,
                actor_id=principal.actor_id,
                origin_job_id=job_id,
                namespaces=(namespace or job.namespace, *job.namespaces),
                run_as=job.run_as,
            )
            if len(self._resolved) >= _MAX_RESOLVED:
                self._resolved.clear()
            self._resolved[job_id] = principal, job, resolved
        return resolved

    async def _job(self, job_id: str) -> Job | None:
        return self._jobs.live.get(job_id) or await self._jobs.find(job_id)

    async def may_open_channel(self, principal: Principal, review: ReviewChannel) -> bool:
        """Return whether the bearer of a proof may open a channel to the processes of ``principal``.

        Jobs of one user may, and those whose user may use the namespace of the other's.
        """
        # While the secret is rotated one process may have a token of the former, another of the next.
        for token in self._tokens.signer.job_tokens(review.job_id, review.actor_id):
            proof = channel_proof(token, review.peer_id)
            if hmac.compare_digest(proof.encode(), review.proof.encode()):
                break
        else:
            return False
        try:
            other = await self.resolve(self._tokens.signer.verify(token))
        except UnauthorizedError:
            return False
        same_user = bool(other.name) and other.name == principal.name
        return same_user or other.may_use(principal.namespaces[0])

    # -- what is its own ------------------------------------------------------------------------

    async def admit(
        self, principal: Principal, method: str, path: str, params: Mapping[str, str]
    ) -> None:
        """Raise ForbiddenError if what a request names is not the principal's.

        ``path`` is that of the route, ``params`` what its parts in braces are. A record that there is not
        is the handler's business.
        """
        changes = method not in _READS and not path.endswith(_READING_POSTS)
        if not params or principal.owns_all or (principal.sees_all and not changes):
            return
        if "namespace" in params and _may_use(principal, params["namespace"]):
            return
        owned = await self._owned(path.split("/")[2], params)
        if owned is not None and not await self._owns(principal, owned, changes=changes):
            raise ForbiddenError(
                f"{owned.what} is not {principal}'s\n"
                + (
                    f"its token may use the namespaces {', '.join(principal.namespaces)}"
                    if owned.namespace
                    else f"it is of user {owned.user or 'unknown'}; an admin may do this"
                ),
                field="Authorization",
            )

    async def _owned(self, kind: str, params: Mapping[str, str]) -> Owned | None:
        if "namespace" in params:
            name = params["namespace"]  # that of a job is its id, unless it was given another
            job_id = name if name.startswith("job_") else ""
            return Owned(f"namespace {name!r}", job_id, name)
        if kind == "story":
            kind = _KINDS.get(params["id"].partition("_")[0], "")
        id_ = next(iter(params.values()))
        if kind in ("jobs", "training-runs"):
            return await self._owned_job(id_)
        if kind == "tasks":
            rows = await self._state.store.select(
                schema.TASKS, {"task_id": id_}, limit=1, columns=("job_id",)
            )
            return Owned(f"task {id_}", job_id=rows[0]["job_id"]) if rows else None
        if kind == "schedules":
            schedule = await self._state.find(SCHEDULES, id_)
            return Owned(f"schedule {id_}", user=schedule.record.user) if schedule else None
        for name, table in (
            ("actors", ACTORS),
            ("placement-groups", GROUPS),
            ("detached-objects", OBJECTS),
        ):
            if kind == name:
                found: Any = await self._state.find(table, id_)
                what = f"{table.label} {id_}"
                if found is None:
                    return None
                record = found.record
                job_id = getattr(record, "origin_job_id", "") or record.job_id
                return Owned(what, job_id, record.namespace)
        return None

    async def _owned_job(self, job_id: str) -> Owned | None:
        job = await self._job(job_id)
        return Owned(f"job {job_id}", job_id, user=job.user) if job else None

    async def _owns(self, principal: Principal, owned: Owned, *, changes: bool) -> bool:
        if owned.namespace and _may_use(principal, owned.namespace):
            return True
        parent, user = "", owned.user
        if owned.job_id:
            if owned.job_id == principal.origin_job_id:
                return True
            job = await self._job(owned.job_id)
            if job is None:
                return False
            parent, user = job.parent_job_id, job.user
        if user != principal.name or not user:
            return False
        of_job = Role.JOB in principal.roles
        return not (of_job and changes and owned.job_id) or parent == principal.origin_job_id

    async def runs_for(self, principal: Principal, job_id: str) -> bool:
        """Return whether what runs for a job is the principal's own, or it is an admin."""
        if principal.owns_all:
            return True
        owned = await self._owned_job(job_id) if job_id else None
        return owned is not None and await self._owns(principal, owned, changes=True)

    async def check_runs(self, principal: Principal, job_id: str, what: str) -> None:
        """Raise ForbiddenError unless a principal may look into what runs for a job."""
        if not await self.runs_for(principal, job_id):
            raise ForbiddenError(
                f"{what} is not {principal}'s\nits owner may look into it, and an admin",
                field="Authorization",
            )

    async def check_new(
        self, principal: Principal, *, job_id: str = "", namespace: str | None = None
    ) -> None:
        """Raise ForbiddenError unless the principal may make something of this job, in this namespace."""
        if principal.owns_all:
            return
        if namespace and not _may_use(principal, namespace) and namespace != ACTOR_NAMESPACE:
            own_job = job_id and (await self._job(job_id))
            if not own_job or own_job.namespace != namespace:
                raise ForbiddenError(
                    f"namespace: {principal} may not use {namespace!r}\n"
                    f"its token is for {', '.join(principal.namespaces)}",
                    field="namespace",
                )
        if job_id == DETACHED_JOB:
            if principal.job_id != DETACHED_JOB:
                raise ForbiddenError(
                    f"{principal} may make nothing of {DETACHED_JOB}, which is for detached actors\n"
                    "name a job of yours",
                    field="job_id",
                )
        elif job_id:
            owned = await self._owned_job(job_id)
            if owned is not None and not await self._owns(principal, owned, changes=True):
                raise ForbiddenError(f"job {job_id} is not {principal}'s", field="job_id")

    def submitter(self, principal: Principal) -> Submitter:
        """Return who submits a job by a request."""
        namespaces = (ANY_NAMESPACE,) if principal.owns_all else principal.namespaces
        return Submitter(
            principal.name,
            namespaces,
            principal.token_id,
            principal.origin_job_id,
            principal.run_as,
        )

    # -- what it sees ---------------------------------------------------------------------------

    async def job_ids(self, principal: Principal) -> frozenset[str]:
        """Return the ids of the jobs that a principal sees."""
        rows = await self._state.store.select(
            schema.JOBS,
            {"owner": principal.name},
            limit=MAX_JOBS,
            columns=("job_id",),
            arrival=True,
            descending=True,
        )
        return frozenset({principal.origin_job_id, *(row["job_id"] for row in rows)} - {""})

    async def visible(self, principal: Principal, page: Page[R]) -> Page[R]:
        """Return a page of what jobs have, without what is of jobs that a principal does not see."""
        if principal.sees_all:
            return page
        seen = await self.job_ids(principal)
        items = tuple(item for item in page.items if getattr(item, "job_id", "") in seen)
        return msgspec.structs.replace(page, items=items, total=None)

    async def visible_ids(self, principal: Principal, found: IdMatches) -> IdMatches:
        """Return the ids of those found that a principal sees; nodes are nobody's own."""
        if principal.sees_all:
            return found
        matches = []
        for match in found.matches:
            kind = _KINDS.get(match.id.partition("_")[0], "")
            owned = await self._owned(kind, {"id": match.id}) if kind else None
            if match.kind == "node" or (
                owned is not None and await self._owns(principal, owned, changes=False)
            ):
                matches.append(match)
        return IdMatches(matches=tuple(matches), more=found.more)

    async def narrowed(
        self, principal: Principal, where: dict[str, Condition]
    ) -> dict[str, Condition]:
        """Return the filters of a list by job with which it has only what the principal sees."""
        namespace = where.get("namespace")
        named = isinstance(namespace, str) and namespace != ""
        if principal.sees_all or (named and _may_use(principal, str(namespace))):
            return where
        seen = await self.job_ids(principal)
        asked = where.get("job_id")
        if asked:
            seen &= {str(asked)}
        return {**where, "job_id": tuple(sorted(seen)) or _NONE}

    def shown(self, principal: Principal, event: Event) -> Event:
        """Return an event as a principal may see it: of other people users learn nothing."""
        if event.kind == EventKind.TASK_SLOW and not principal.owns_all:
            own = Role.VIEWER not in principal.roles  # of others' it sees no event at all
            event = event if own else _without_stack(event)
        if principal.sees_all or event.by is None or event.by.name == principal.name:
            return event
        return msgspec.structs.replace(event, by=None)

    async def seen(
        self, principal: Principal, matches: Callable[[Event], bool]
    ) -> Callable[[Event], bool]:
        """Return which of the events that match a principal sees, also of jobs that are submitted later."""
        if principal.sees_all:
            return matches
        jobs = set(await self.job_ids(principal))

        def sees(event: Event) -> bool:
            if not matches(event):
                return False
            if event.kind.startswith(_OF_ALL):
                return True
            payload = event.payload
            job_id, namespace = payload.get("job_id", ""), payload.get("namespace", "")
            if event.kind.startswith(("job.", "schedule.")):
                mine = payload.get("user") == principal.name
                if mine and job_id:
                    jobs.add(job_id)
                return mine
            return job_id in jobs or bool(namespace and _may_use(principal, namespace))

        return sees


_KINDS = {
    "job": "jobs",
    "a": "actors",
    "t": "tasks",
    "pg": "placement-groups",
    "o": "detached-objects",
}
"""The kind of what an id names, by its prefix; nodes are nobody's own."""
_NONE = ("",)
"""A condition that nothing meets."""


def _may_use(principal: Principal, namespace: str) -> bool:
    """Return whether names in a namespace are the principal's; all share what was measured of kernels."""
    own_cache = f"{CACHE_NAMESPACE}/{principal.name}"
    return principal.may_use(namespace) or namespace in (TUNING_NAMESPACE, own_cache)


def _without_stack(event: Event) -> Event:
    """Return the event of a slow task for one who may not look into programs."""
    payload = {name: value for name, value in event.payload.items() if name != "stack"}
    return msgspec.structs.replace(event, payload={**payload, "stack": ""})


def _refused(why: str) -> UnauthorizedError:
    return UnauthorizedError(f"this token is not valid any more\n{why}", field="Authorization")
