"""Principals: senders of requests, with the roles that decide which routes these may call.

A principal is what a token says, once its signature was checked (:mod:`stoker_wire.http.server.tokens`).
Route tables name the roles that may call each route (``Route.roles``); the dispatcher alone compares.
What of a route's records a principal may see is its namespaces' business, and the service's.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from stoker_wire.messages.common import ANY_NAMESPACE, Role
from stoker_wire.messages.control import Author

NOBODY: frozenset[Role] = frozenset()
EVERYONE = frozenset(Role)
"""The roles of a public route."""
NODES = frozenset({Role.NODE})
SCHEDULERS = frozenset({Role.SCHEDULER})
GCS = frozenset({Role.GCS})
SERVICES = NODES | SCHEDULERS | GCS
JOBS = frozenset({Role.JOB})
ADMINS = frozenset({Role.ADMIN})
USERS = frozenset({Role.ADMIN, Role.USER})
"""Those who start work and end it, from outside of the cluster."""
WORK = frozenset({Role.ADMIN, Role.USER, Role.JOB})
"""Those and the processes of jobs, which do the same for their own job."""
PEOPLE = USERS | {Role.VIEWER}
AUDITORS = SERVICES | {Role.ADMIN, Role.VIEWER}
"""Those who see what is of all users."""
JOINERS = frozenset({Role.JOIN})
READERS = frozenset(Role) - JOINERS
"""All that belong to the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whom a token belongs to. ``name`` is that of a user or a service, and the user of a job.

    ``job_id`` is set for processes of a job, ``worker_id`` for those of a node that have no job yet,
    ``actor_id`` for detached actors, which outlive theirs; ``origin_job_id`` is that job, once it is
    looked up. ``namespaces`` are those that it may use. ``token_id`` names a token that can be revoked.
    ``run_as`` is the Unix user of its jobs' processes.
    """

    roles: frozenset[Role]
    name: str = ""
    job_id: str = ""
    actor_id: str = ""
    origin_job_id: str = ""
    worker_id: str = ""
    namespaces: tuple[str, ...] = (ANY_NAMESPACE,)
    token_id: str = ""
    expires_at_s: float | None = None
    run_as: str = ""

    @property
    def role(self) -> Role:
        """The role for which its token was made; the cluster's secret counts as an admin's."""
        return Role.ADMIN if len(self.roles) != 1 else next(iter(self.roles))

    @property
    def sees_all(self) -> bool:
        """Whether the records of all users are its to see (not to change)."""
        return not self.roles.isdisjoint(_SEES_ALL)

    @property
    def owns_all(self) -> bool:
        """Whether the records of all users are its to change."""
        return not self.roles.isdisjoint(_OWNS_ALL)

    def may_use(self, namespace: str) -> bool:
        """Return whether what is named in ``namespace`` is its to use."""
        return self.owns_all or namespace in self.namespaces or ANY_NAMESPACE in self.namespaces

    def __str__(self) -> str:
        """Return it as messages name it: ``user alice``, ``job job_12``, ``node n_3``."""
        return f"{self.role} {self.job_id or self.worker_id or self.name}"


_SEES_ALL = SERVICES | ADMINS | {Role.VIEWER}
_OWNS_ALL = SERVICES | ADMINS

ROOT = Principal(roles=frozenset(Role), name="cluster")
"""Who has the cluster's secret, of which every token can be made."""
ANONYMOUS = Principal(roles=NOBODY, namespaces=())
"""Who sent no token, to a route that asks for none."""

_AUTHORS = PEOPLE | JOINERS
AUTHOR: ContextVar[Author | None] = ContextVar("AUTHOR", default=None)
"""The person for whom this task answers a request that changes something; None for all others."""


def author_of(principal: Principal, address: str | None) -> Author | None:
    """Return a person as the author of changes; None for services and jobs."""
    if principal.roles.isdisjoint(_AUTHORS):
        return None
    return Author(
        name=principal.name,
        role=principal.role,
        token_id=principal.token_id,
        address=address or "",
    )
