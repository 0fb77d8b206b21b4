"""A cluster to fuzz, with one thing of each kind in it, so that requests meet more than "there is none".

What ends is made again before each operation is fuzzed. No request of a case may start a program, install a
package or have a service connect elsewhere: :func:`harmless` changes what would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e._cluster import head
from tests.e2e.http._http_api import Api

if TYPE_CHECKING:
    from collections.abc import Iterator

NOWHERE = "http://127.0.0.1:9"
NAMESPACE = "fuzz"
NEVER = "never"
"""A resource that no node has: what asks for it waits for ever, and never starts."""
BLOB = b"the content of a package and of a function"
BLOB_HASH = hashlib.sha256(BLOB).hexdigest()
FAKE_NODE = "n_0000000000000001"
DRIVER_S = 120.0
_DRIVER = f"""
import stoker
stoker.init(namespace={NAMESPACE!r})

@stoker.remote
class Counter:
    def add(self): return 1

@stoker.remote
def square(x):
    print("squared")
    return x * x

counter = Counter.options(name="counter", lifetime="detached", num_cpus=0).remote()
assert stoker.get(counter.add.remote(), timeout=60) == 1
assert stoker.get(square.remote(3), timeout=60) == 9
stoker.put(b"x" * 200_000, lifetime="detached", name="object")
"""


@dataclass
class World:
    """The three services, and values of path parameters that name something."""

    services: dict[str, Api]
    folder: Path
    known: dict[str, list[str]] = field(default_factory=dict)

    def trace(self, request_id: str) -> str:
        """Return the end of the trace that a service has logged for a request; '' for none."""
        for path in self.folder.rglob("*.log"):
            for line in path.read_text(errors="replace").splitlines():
                if request_id in line and '"exception"' in line:
                    trace: str = json.loads(line)["exception"]
                    return "\n".join(trace.splitlines()[-8:])
        return ""

    def prepare(self) -> None:
        """Make again what an operation may have ended."""
        gcs = self.services["gcs"]
        job = {"entrypoint": "true", "namespace": NAMESPACE, "resources": {NEVER: 1}}
        for method, path, body in (
            ("POST", "/v1/queues", {"name": "fuzz"}),
            ("POST", "/v1/schedules", {"name": "fuzz", "cron": "0 0 1 1 *", "job": job}),
            ("POST", "/v1/jobs", {**job, "job_id": "job_fuzz"}),
            ("PUT", "/v1/jobs/job_fuzz/scaling", {"base_batch": 8, "max_local_batch": 8}),
            ("PUT", f"/v1/kv/{NAMESPACE}/key", b"12"),
            ("PUT", f"/v1/functions/{BLOB_HASH}", BLOB),
            ("PUT", f"/v1/packages/{BLOB_HASH}", BLOB),
            ("POST", "/v1/nodes", fake_node()),
            ("POST", "/v1/placement-groups", {
                "group_id": "pg_fuzz", "job_id": "job_fuzz", "namespace": NAMESPACE, "name": "group",
                "bundles": [{"resources": {NEVER: 1}}], "strategy": "PACK",
            }),
        ):  # fmt: skip
            gcs(method, path, body)

    def learn(self) -> None:
        """Find out what there is."""
        gcs, nodelet = self.services["gcs"], self.services["nodelet"]
        names = {
            "/v1/jobs": "job_id", "/v1/tasks": "task_id", "/v1/actors": "actor_id",
            "/v1/workers": "worker_id", "/v1/leases": "lease_id", "/v1/detached-objects": "object_id",
        }  # fmt: skip
        found = {name: [one[name] for one in gcs.items(path)] for path, name in names.items()}
        here = [one["worker_id"] for one in nodelet.items("/v1/workers")]
        self.known = {
            **found,
            "node_id": [FAKE_NODE],
            "group_id": ["pg_fuzz"],
            "namespace": [NAMESPACE],
            "name": ["fuzz", "counter", "group", "default"],
            "key": ["key"],
            "hash": [BLOB_HASH],
            "index": ["0"],
            "pid": [str(os.getpid())],
            "owner_id": ["p_1"],
            "id": [*here, *found["object_id"], *found["task_id"], *found["job_id"]],
            "token_id": ["tk_1"],
        }


def fake_node() -> dict[str, Any]:
    """Return the registration of a node that nothing runs."""
    return {
        "node_id": FAKE_NODE, "url": NOWHERE, "unix": "", "hostname": "h", "host_id": "h", "pid": 1,
        "resources": {"CPU": 1},
    }  # fmt: skip


def harmless(value: Any, at: str = "") -> Any:
    """Return a body in which nothing would be started, installed or connected to, and no leader be fenced."""
    if isinstance(value, dict):
        changed = {name: harmless(one, name) for name, one in value.items()}
        if isinstance(changed.get("resources"), dict) and len(changed["resources"]) < 256:
            changed["resources"] = {**changed["resources"], NEVER: 1}
        return changed
    if isinstance(value, list):
        return [] if at == "pip" else [harmless(one, at) for one in value]
    if isinstance(value, str) and at.endswith("url"):
        return NOWHERE
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(
            value
        )  # to JSON Schema 1.0 is an integer; the document says that here it is none
    if at == "epoch" and isinstance(value, int) and not isinstance(value, bool):
        return min(value, 0)
    return value


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Start a cluster, and have a driver leave something of each kind there."""
    with head(folder, num_cpus=2) as cluster:
        gcs = Api(cluster.info.gcs_url, cluster.info.token)
        (node,) = gcs.items("/v1/nodes")
        environ = {"STOKER_ADDRESS": cluster.info.gcs_url, "STOKER_TOKEN": cluster.info.token}
        subprocess.run(
            [sys.executable, "-c", _DRIVER],
            env={**os.environ, **environ}, check=True, timeout=DRIVER_S, capture_output=True,
        )  # fmt: skip
        made = World(
            {
                "gcs": gcs,
                "scheduler": Api(gcs("GET", "/v1/leaders/scheduler").json["url"], gcs.token),
                "nodelet": Api(node["url"], gcs.token),
            },
            folder,
        )
        made.prepare()
        made.learn()
        yield made
