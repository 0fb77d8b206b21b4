"""Every route of the gcs, as one table for :meth:`stoker_wire.http.server.service.Service.add_routes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.api import (
    actors,
    control,
    events,
    jobs,
    nodes,
)
from stoker_gcs.api.history import past, tasks, training
from stoker_gcs.api.processes import logs, profiles
from stoker_gcs.api.ray_jobs import routes as ray_jobs
from stoker_gcs.api.scheduling import elastic, groups, proxy, queues
from stoker_gcs.api.storage import kv, objects, outputs

if TYPE_CHECKING:
    from stoker_wire.http.server.routes import Route, WebSocketRoute

ROUTES: tuple[Route | WebSocketRoute, ...] = (
    *nodes.ROUTES,
    *jobs.ROUTES,
    *elastic.ROUTES,
    *actors.ROUTES,
    *groups.ROUTES,
    *queues.ROUTES,
    *tasks.ROUTES,
    *training.ROUTES,
    *past.ROUTES,
    *events.ROUTES,
    *control.ROUTES,
    *kv.ROUTES,
    *objects.ROUTES,
    *proxy.ROUTES,
    *logs.ROUTES,
    *profiles.ROUTES,
    *outputs.ROUTES,
    *ray_jobs.ROUTES,
)
