"""Routes of the dashboard: its page, the sessions of browsers, and what only the page asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker_gcs.dashboard.assets import INDEX
from stoker_gcs.dashboard.changes import changes
from stoker_gcs.dashboard.control_plane import control_plane
from stoker_gcs.dashboard.cost import cost_of
from stoker_gcs.dashboard.kernels import tuned_kernels
from stoker_gcs.dashboard.task_summary import summarize
from stoker_gcs.dashboard.timeline import timeline
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import UnauthorizedError
from stoker_wire.http import auth
from stoker_wire.http.codec import ANY
from stoker_wire.http.dashboard.control_plane import ControlPlane
from stoker_wire.http.dashboard.figures import (
    LOGIN_LINKS_PATH,
    SESSION_PATH,
    ChangesQuery,
    JobCost,
    LoginLink,
    Overview,
    Session,
    TaskSummary,
    TaskSummaryQuery,
    Timeline,
    TimelineQuery,
    Usage,
    UsageQuery,
)
from stoker_wire.http.dashboard.sessions import LOGIN_LIFETIME_S
from stoker_wire.http.principals import EVERYONE, PEOPLE, READERS
from stoker_wire.http.server.request import Reply
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import watch_response
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.kernels import TunedKernel
from stoker_wire.messages.queries import KernelsQuery

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_gcs.dashboard.parts import Dashboard
    from stoker_gcs.store.changes import Condition
    from stoker_wire.http.principals import Principal
    from stoker_wire.http.server.request import Request


async def get_page(dashboard: Dashboard, req: Request) -> web.Response:
    return dashboard.assets.respond(req.http, INDEX)


async def get_asset(dashboard: Dashboard, req: Request) -> web.Response:
    return dashboard.assets.respond(req.http, req.path["name"])


async def begin_session(dashboard: Dashboard, req: Request) -> Reply:
    """The token of the Authorization header, or of a login link, becomes a session's cookie."""
    token = auth.bearer(req.http.headers.get("Authorization"))
    if not token:
        raise UnauthorizedError(
            "there is no token to log in with\nsend 'Authorization: Bearer <token>'",
            field="Authorization",
        )
    sessions = dashboard.sessions
    of_link = sessions.of_link(token)
    principal = await dashboard.guard.resolve(of_link or sessions.of_bearer(token))
    if of_link is not None:
        await dashboard.links.use_up(token)
    session = sessions.begin(principal)
    return _with_cookie(dashboard, req, session.token, _shown(session.principal, session.csrf))


async def get_session(dashboard: Dashboard, req: Request) -> Session:
    """Of a request that came with a token instead, which needs no CSRF token, it says whose that is."""
    headers = req.http.headers
    session = None if "Authorization" in headers else dashboard.sessions.find(headers)
    return _shown(req.principal, "" if session is None else session.csrf)


async def end_session(dashboard: Dashboard, req: Request) -> Reply:
    return _with_cookie(dashboard, req, "", None)


async def create_login_link(dashboard: Dashboard, req: Request) -> LoginLink:
    """Whoever opens the link first, within a few minutes, has a session of the caller."""
    token = dashboard.sessions.login_token(req.principal)
    return LoginLink(path=f"/#login={token}", expires_in_s=LOGIN_LIFETIME_S)


async def watch_changes(dashboard: Dashboard, req: Request) -> web.StreamResponse:
    since = req.query.since
    given = req.http.headers.get("Last-Event-ID", "")
    if given.isascii() and given.isdecimal() and len(given) < 19:
        since = int(given)
    app = dashboard.app
    sees = await app.access.seen(req.principal, lambda _: True)
    begin = min(since, app.state.log.last)
    source = changes(app.state.log, dashboard.records, begin, sees)
    return await watch_response(req, source, since=max(since, 0))


async def get_overview(dashboard: Dashboard, req: Request) -> Overview:
    return await dashboard.overviews.of(req.principal)


async def get_control_plane(dashboard: Dashboard, req: Request) -> ControlPlane:
    """Settings are for admins: their values tell of the machines."""
    return await control_plane(
        dashboard.app, dashboard.service, with_settings=req.principal.owns_all
    )


async def list_kernels(dashboard: Dashboard, req: Request) -> Page[TunedKernel]:
    return await tuned_kernels(dashboard.app.state, req.query)


async def get_usage(dashboard: Dashboard, req: Request) -> Usage:
    return await dashboard.app.usage.read(req.query)


async def summarize_tasks(dashboard: Dashboard, req: Request) -> TaskSummary:
    query: TaskSummaryQuery = req.query
    app = dashboard.app
    asked: dict[str, Condition] = {"job_id": query.job_id, "name": query.name}
    where = await app.access.narrowed(req.principal, asked)
    return await summarize(app.state.store, where, query.limit, app.state.now())


async def get_job_cost(dashboard: Dashboard, req: Request) -> JobCost:
    app = dashboard.app
    job = await app.state.get(JOBS, req.path["job_id"])
    return await cost_of(app.state.store, job, app.state.now())


async def get_timeline(dashboard: Dashboard, req: Request) -> Timeline:
    query: TimelineQuery = req.query
    app = dashboard.app
    asked: dict[str, Condition] = {
        "job_id": query.job_id,
        "actor_id": query.actor_id,
        "node_id": query.node_id,
    }
    where = await app.access.narrowed(req.principal, asked)
    job = await app.jobs.find(query.job_id) if query.job_id else None
    found = await timeline(
        app.state.store,
        where,
        query,
        now_s=app.state.now(),
        ended_at_s=None if job is None else job.ended_at_s,
    )
    nodes = app.nodes.view
    ids = {lane.node_id for lane in found.lanes} & nodes.keys()
    return replace(found, hostnames={node_id: nodes[node_id].hostname for node_id in ids})


def _shown(principal: Principal, csrf: str) -> Session:
    return Session(
        user=principal.name,
        role=principal.role,
        csrf=csrf,
        expires_at_s=principal.expires_at_s,
        namespaces=principal.namespaces,
    )


def _with_cookie(dashboard: Dashboard, req: Request, token: str, value: object) -> Reply:
    encrypted = req.http.transport is not None and req.http.transport.get_extra_info("ssl_object")
    cookie = dashboard.sessions.cookie(token, secure=bool(encrypted))
    return Reply(value, headers={"Set-Cookie": cookie, "Cache-Control": "no-store"})


ROUTES = (
    Route(
        "GET",
        "/",
        get_page,
        public=True,
        media_type="text/html",
        roles=EVERYONE,
        summary="Get dashboard",
    ),
    Route(
        "GET",
        "/assets/{name:.+}",
        get_asset,
        public=True,
        media_type=ANY,
        roles=EVERYONE,
        summary="Get file of dashboard",
    ),
    Route(
        "POST",
        SESSION_PATH,
        begin_session,
        public=True,
        reply=Session,
        # The reply has what a store of replies must not hold.
        idempotency=False,
        roles=EVERYONE,
        summary="Begin session of browser with a token",
    ),
    Route(
        "GET",
        SESSION_PATH,
        get_session,
        reply=Session,
        roles=PEOPLE,
        summary="Get session of browser",
    ),
    Route("DELETE", SESSION_PATH, end_session, roles=PEOPLE, summary="End session of browser"),
    Route(
        "POST",
        LOGIN_LINKS_PATH,
        create_login_link,
        reply=LoginLink,
        idempotency=False,
        roles=PEOPLE,
        summary="Create link that begins one session, within the next minutes",
    ),
    Route(
        "GET",
        "/v1/changes",
        watch_changes,
        stream=True,
        query=ChangesQuery,
        reply=Event,
        roles=PEOPLE,
        summary="Watch how much changes, by kind",
    ),
    Route(
        "GET",
        "/v1/overview",
        get_overview,
        reply=Overview,
        roles=READERS,
        summary="Get cluster at a glance",
    ),
    Route(
        "GET",
        "/v1/control-plane",
        get_control_plane,
        cost="expensive",
        reply=ControlPlane,
        roles=PEOPLE,
        summary="Get processes of the control plane, their settings and health",
    ),
    Route(
        "GET",
        "/v1/kernels",
        list_kernels,
        query=KernelsQuery,
        reply=Page[TunedKernel],
        roles=READERS,
        summary="List measured configurations of kernels",
    ),
    Route(
        "GET",
        "/v1/usage",
        get_usage,
        query=UsageQuery,
        reply=Usage,
        roles=READERS,
        summary="Get how cluster was used over time",
    ),
    Route(
        "GET",
        "/v1/tasks/summary",
        summarize_tasks,
        query=TaskSummaryQuery,
        reply=TaskSummary,
        roles=READERS,
        summary="Summarize tasks by function",
    ),
    Route(
        "GET",
        "/v1/jobs/{job_id}/cost",
        get_job_cost,
        reply=JobCost,
        roles=READERS,
        summary="Get CPU and GPU seconds that a job held",
    ),
    Route(
        "GET",
        "/v1/tasks/timeline",
        get_timeline,
        query=TimelineQuery,
        reply=Timeline,
        roles=READERS,
        summary="Get what workers ran when",
    ),
)
