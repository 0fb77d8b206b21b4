"""Writes what of ``docs/`` and ``deploy/`` is made of the code, for ``make docs``.

``tests/unit/sdk/options/test_options.py``, ``tests/unit/test_roles.py``, ``tests/unit/test_docs.py`` and
``tests/unit/test_monitoring.py`` fail when it is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.gateway.calls.routes import DOCUMENT_ROUTES
from stoker.gateway.calls.routes import ROUTES as CALL_ROUTES
from stoker.runtime.options.actor_options import ActorOptions, MethodOptions
from stoker.runtime.options.documentation import Option, options_of
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.options.strategies import NodeAffinity, PlacementGroupSchedulingStrategy
from stoker_gcs.api.routes import ROUTES as GCS_ROUTES
from stoker_gcs.dashboard.routes import ROUTES as DASHBOARD_ROUTES
from stoker_nodelet.api import ROUTES as NODELET_ROUTES
from stoker_nodelet.profiles.api import ROUTES as PROFILE_ROUTES
from stoker_nodelet.transfer import ROUTES as TRANSFER_ROUTES
from stoker_scheduler.api import ROUTES as SCHEDULER_ROUTES
from stoker_wire.messages.common import Role

if TYPE_CHECKING:
    from stoker_wire.http.server.routes import Route, WebSocketRoute

OPTIONS = Path(__file__).parents[1] / "docs/options.md"
ROLES = Path(__file__).parents[1] / "docs/roles.md"
SERVICE_ROUTES: dict[str, tuple[Route | WebSocketRoute, ...]] = {
    "gcs": (*GCS_ROUTES, *DASHBOARD_ROUTES),
    "scheduler": tuple(SCHEDULER_ROUTES),
    "nodelet": (*NODELET_ROUTES, *PROFILE_ROUTES, *TRANSFER_ROUTES),
    "gateway": (*CALL_ROUTES, *DOCUMENT_ROUTES),
}
_HEAD = """\
# Options

<!-- Made by `make docs` from sdk/stoker/runtime/options/options.py: change the text there. -->

What `@stoker.remote` takes for a function or a class, and `@stoker.method` for a method of a class.
Each may also be given to `.options(...)`, for some calls or actors only:

<!-- first:
x = 1
-->
```python
@stoker.remote(num_cpus=2, max_retries=0)
def step(x): ...


step.options(num_cpus=4, timeout=60).remote(x)
```

A wrong value and an unknown name are errors at that place; the error names the option, and the nearest
right one. Times are seconds, memory is bytes. `help(stoker.remote)` and `help(stoker.method)` show the same.

*Enforced by* says which process acts on an option. The *caller* is the one that calls `.remote()`: a
driver, a task or an actor. The others are as in [ARCHITECTURE.md](../ARCHITECTURE.md).
"""


_ROLES_HEAD = """\
# Roles

<!-- Made by `make docs` from the route tables: change the roles there. -->

Every request carries a token, and every token has a role. A route takes the roles that are marked here; any
other gets 403 with the roles that it needs. The cluster's secret has all roles. Within a route that it may
call, a `user` reaches its own jobs and what these made, and what is in the namespaces of its token; a `job`
sees what its user does, and changes what is its own; an `admin` reaches all, a `viewer` sees all; with a
`join` token a machine gets the secret, and nothing else ([SECURITY.md](../SECURITY.md)). Every service
answers `GET /v1/secret` (the names of its secrets) for services and admins. `/healthz`, `/readyz`,
`/errors/CODE` and what a browser loads of the dashboard take no token; nor do `/metrics` and
`/openapi.json` on loopback. Elsewhere all roles but `join` may read `/metrics`, which names functions
and jobs to those alone that see all ([metrics](metrics.md)).
"""


def roles_page() -> str:
    """Return ``docs/roles.md``: per service a table of routes and roles."""
    parts = [_ROLES_HEAD]
    head = f"| route | {' | '.join(Role)} |\n|---|{'---|' * len(Role)}\n"
    for name, table in SERVICE_ROUTES.items():
        rows = (
            f"| `{getattr(route, 'method', 'GET')} {route.path}` | "
            + " | ".join("✓" if role in route.roles else "" for role in Role)
            + " |\n"
            for route in table
        )
        parts.append(f"## {name}\n\n{head}{''.join(rows)}")
    return "\n".join(parts)


def options_page() -> str:
    """Return ``docs/options.md``."""
    tasks, actors = options_of(TaskOptions), options_of(ActorOptions)
    common = {name: option for name, option in tasks.items() if actors.get(name) == option}
    parts = [
        _HEAD,
        _section("Tasks and actors", common, "@stoker.remote({})"),
        _section("Tasks", _without(tasks, common), "@stoker.remote({})"),
        _section("Actors", _without(actors, common), "@stoker.remote({})"),
        _section("Methods of actors", options_of(MethodOptions), "@stoker.method({})"),
        _section("NodeAffinity", options_of(NodeAffinity), "scheduling_strategy={}"),
        _section(
            "PlacementGroupSchedulingStrategy",
            options_of(PlacementGroupSchedulingStrategy),
            "scheduling_strategy={}",
        ),
    ]
    return "\n".join(parts)


def _without(options: dict[str, Option], others: dict[str, Option]) -> dict[str, Option]:
    return {name: option for name, option in options.items() if name not in others}


def _section(title: str, options: dict[str, Option], written: str) -> str:
    entries = "\n".join(_entry(name, option, written) for name, option in options.items())
    return f"## {title}\n\n{entries}"


def _entry(name: str, option: Option, written: str) -> str:
    unit = f"- **unit**: {option.unit}\n" if option.unit else ""
    return (
        f"### `{name}`\n\n{option.meaning}\n\n"
        f"- **takes**: {option.takes}\n- **default**: {option.default}\n{unit}"
        f"- **enforced by**: {option.by}\n- **example**: `{written.format(option.example)}`\n"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    from scripts import python_api, reference
    from scripts.alerts import RULES, rules_text
    from scripts.dashboard import DASHBOARD, dashboard_text
    from scripts.limits import LIMITS, limits_page
    from scripts.metrics_page import METRICS_PAGE, metrics_page
    from scripts.operations import OPERATIONS, operations_page

    OPTIONS.write_text(options_page())
    ROLES.write_text(roles_page())
    LIMITS.write_text(limits_page())
    OPERATIONS.write_text(operations_page())
    METRICS_PAGE.write_text(metrics_page())
    RULES.write_text(rules_text())
    DASHBOARD.write_text(dashboard_text())
    made = {**reference.kept_pages(), **reference.site_pages(), **python_api.pages()}
    for page, text in made.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
