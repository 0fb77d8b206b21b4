"""The parts of the dashboard, the owner of its routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.dashboard.assets import Assets
from stoker_gcs.dashboard.changes import StoredRecords
from stoker_gcs.dashboard.login_links import LoginLinks
from stoker_gcs.dashboard.overview import Overviews
from stoker_wire.http.dashboard.sessions import Sessions

if TYPE_CHECKING:
    from stoker_gcs.app import GcsApp
    from stoker_wire.http.server.service import Service


class Dashboard:
    """The owner of the dashboard's routes. Made, its service takes sessions for tokens."""

    def __init__(self, app: GcsApp, service: Service) -> None:
        self.app = app
        self.service = service
        self.guard = service.guard
        self.assets = Assets()
        self.links = LoginLinks(app.state)
        self.overviews = Overviews(app)
        self.records = StoredRecords(app.state.store, app.history, app.training)
        self.sessions = service.guard.sessions = Sessions(service.tokens)
