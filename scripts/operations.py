"""Makes ``docs/operations.md``: the operations of the HTTP API that people may call, by their names.

``tests/unit/test_docs.py`` fails when the page is not current, so that no name changes unseen: clients that
are made of the OpenAPI document call functions by these names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.gateway.calls.routes import DOCUMENT_ROUTES, calls_document
from stoker.gateway.calls.routes import ROUTES as CALLS
from stoker_gcs.api.routes import ROUTES as GCS
from stoker_nodelet.api import ROUTES as NODELET
from stoker_nodelet.profiles.api import ROUTES as PROFILES
from stoker_nodelet.transfer import ROUTES as TRANSFER
from stoker_scheduler.api import ROUTES as SCHEDULER
from stoker_wire.http.server.openapi.document import document
from stoker_wire.http.server.service import Service
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from stoker_wire.http.server.routes import Route, WebSocketRoute

OPERATIONS = Path(__file__).parents[1] / "docs/operations.md"
SERVICES: dict[str, tuple[Route | WebSocketRoute, ...]] = {
    "gcs": GCS,
    "gateway": (*CALLS, *DOCUMENT_ROUTES),
    "scheduler": SCHEDULER,
    "nodelet": (*NODELET, *PROFILES, *TRANSFER),
}
_FOR_PEOPLE = ("gcs", "gateway")
_HEAD = """\
# Operations of the HTTP API

<!-- Made by `make docs` from the route tables: change names of handlers and summaries there. -->

What people may call, as in `/openapi.json` of the gcs and `/v1/calls/openapi.json` of a gateway. A function
of a [client that is made of the document](http-clients.md) has the name of its operation.
[docs/roles.md](roles.md) says whose token may call it.
"""


def documents() -> dict[str, dict[str, Any]]:
    """Return the OpenAPI document of each service, with nothing behind it."""
    made = {}
    for name, table in SERVICES.items():
        service = Service(name, Settings(), token="none")
        service.add_routes(table, None)
        if name == "gateway":
            made[name] = calls_document(service)
        else:
            made[name] = document(name, service.version, service.routes)
    return made


def operations_page() -> str:
    """Return ``docs/operations.md``."""
    made = documents()
    return "\n".join([_HEAD, *(_service(name, made[name]) for name in _FOR_PEOPLE)])


def _service(name: str, made: dict[str, Any]) -> str:
    tables = [_table(tag, made) for tag in made["tags"]]
    return f"## {name}\n\n" + "\n".join(filter(None, tables))


def _table(tag: dict[str, str], made: dict[str, Any]) -> str:
    rows = [
        f"| `{one['operationId']}` | `{method.upper()} {path}` | {one['summary']} |\n"
        for path, ways in made["paths"].items()
        for method, one in ways.items()
        if one["tags"] == [tag["name"]] and "x-internal" not in one
    ]
    if not rows:
        return ""
    head = "| operation | route | does |\n|---|---|---|\n"
    return f"### {tag['name']}\n\n{tag['description']}\n\n{head}{''.join(rows)}"
