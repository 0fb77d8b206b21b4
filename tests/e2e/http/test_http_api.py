"""The HTTP API of a real cluster, as its documents promise it: schemas, pages, watches, effects."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import TYPE_CHECKING, Any
from urllib import parse

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import stoker
from stoker.jobs import JobSubmissionClient
from stoker_wire.messages.kernels import TUNING_NAMESPACE, TunedKernel, tuning_key
from tests.e2e._cluster import WAIT_S, embedded
from tests.e2e.http import _http_api as shared
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.http.server.request import BoundRoute

LISTS = [pair for pair in shared.ROUTES if shared.is_page(pair[1])]
KEYS = {
    "/v1/nodes": "node_id", "/v1/workers": "worker_id", "/v1/jobs": "job_id",
    "/v1/actors": "actor_id", "/v1/tasks": "task_id attempt", "/v1/events": "seq",
    "/v1/tasks/{task_id}/attempts": "task_id attempt", "/v1/kv/{namespace}": "key",
    "/v1/tokens": "token_id", "/v1/objects": "object_id node_id", "/v1/leases": "lease_id",
    "/v1/queue": "position", "/v1/placement-groups": "group_id", "/v1/queues": "name",
    "/v1/queue-usage": "name", "/v1/schedules": "name",
    "/v1/detached-objects": "object_id", "/v1/activity": "number",
    "/v1/nodes/{node_id}/activity": "number", "/v1/training-runs": "job_id run",
    "/v1/kernels": "kernel device",
}  # fmt: skip
"""What tells the items of a list apart."""
AT_LEAST = {
    "/v1/workers": 2, "/v1/jobs": 4, "/v1/actors": 3, "/v1/tasks": 5, "/v1/events": 20,
    "/v1/kv/{namespace}": 3, "/v1/tokens": 3, "/v1/objects": 3, "/v1/leases": 2, "/v1/queue": 2,
    "/v1/placement-groups": 2, "/v1/queues": 2, "/v1/queue-usage": 3, "/v1/schedules": 2,
    "/v1/detached-objects": 2, "/v1/training-runs": 3, "/v1/kernels": 3,
}  # fmt: skip
"""So that the walk over pages of one has pages to walk."""


class World:
    """The services, and ids of things that exist."""

    def __init__(self, info: Any) -> None:
        self.gcs = shared.Api(info.address, info.token)
        leader = self.gcs("GET", "/v1/leaders/scheduler").json
        (node,) = self.gcs.items("/v1/nodes")
        self.of = {
            "gcs": self.gcs,
            "scheduler": shared.Api(leader["url"], info.token),
            "nodelet": shared.Api(node["url"], info.token),
        }
        self.known = {"node_id": node["node_id"], "job_id": info.job_id, "namespace": "api"}


@stoker.remote
def double(x: int) -> int:
    return 2 * x


@stoker.remote(num_cpus=0)
class Keeper:
    def ping(self) -> int:
        return 1


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A cluster with something in every list."""
    with embedded(tmp_path_factory.mktemp("s"), num_cpus=2, num_gpus=0) as info:
        made = World(info)
        gcs, known = made.gcs, made.known
        jobs = JobSubmissionClient(info.address, info.token)
        ended = [jobs.submit_job(entrypoint=f"echo {i}") for i in range(3)]
        keepers = [Keeper.options(name=f"k{i}", namespace="api").remote() for i in range(3)]
        assert stoker.get([k.ping.remote() for k in keepers], timeout=WAIT_S) == [1, 1, 1]
        assert stoker.get([double.remote(i) for i in range(5)], timeout=WAIT_S) == [0, 2, 4, 6, 8]
        detached = [stoker.put(i, lifetime="detached") for i in range(3)]
        kept = [stoker.put(bytes(300_000)) for _ in range(3)]
        wide = double.options(num_cpus=64, on_infeasible="wait")
        waiting = [wide.options(resources={f"r{i}": 1}).remote(i) for i in range(2)]
        for i in range(3):
            assert gcs("PUT", f"/v1/kv/api/k{i}", b"v").status == 200
            assert gcs("POST", "/v1/tokens", {"name": f"t{i}"}).status == 200
            body = {"name": f"q{i}", "parent": f"q{i - 1}" if i else ""}
            assert gcs("POST", "/v1/queues", body).status == 200
            jobs.create_schedule(f"k{i}", cron="0 0 1 1 *", entrypoint="true")
            stoker.train.report(0, run=f"k{i}", loss=1.0)
            tuned = TunedKernel(kernel=f"k{i}", key={}, config={}, device="H100", seconds=1.0)
            key = parse.quote(tuning_key("H100", f"k{i}", {}), safe="")
            path = f"/v1/kv/{TUNING_NAMESPACE}/{key}"
            assert gcs("PUT", path, msgspec.json.encode(tuned)).status == 200
        groups = [
            stoker.placement_group([{"CPU": 0.1}], name=f"k{i}", namespace="api") for i in range(2)
        ]
        assert all(group.wait(WAIT_S) for group in groups)
        known.update(group_id=groups[0].id, run="k0")
        blob = b"some bytes"
        assert gcs("PUT", "/api/packages/gcs/k0", blob).status == 200
        known["submission_id"] = ended[0]
        known["hash"] = hashlib.blake2b(blob, digest_size=32).hexdigest()
        for job_id in ended:
            jobs.wait(job_id, timeout_s=WAIT_S)
        until(lambda: len(gcs.items("/v1/tasks")) >= 5, WAIT_S, "the history has the tasks")
        until(lambda: len(gcs.items("/v1/training-runs")) >= 3, WAIT_S, "the reports are there")
        until(lambda: len(gcs.items("/v1/queue")) >= 2, WAIT_S, "two demands wait")
        first = gcs.items("/v1/tasks")[0]
        (actor,) = gcs.items("/v1/actors", name="k0")
        known.update(
            task_id=first["task_id"], actor_id=actor["actor_id"], name="k0", key="k0",
            id=actor["worker_id"],  # of the pool one may leave meanwhile
            object=kept[0].id, detached=detached[0].id,
        )  # fmt: skip
        yield made
        for ref in waiting:
            stoker.cancel(ref)
        stoker.free(detached)
        del kept, keepers, detached


@pytest.fixture(params=("gcs", "scheduler", "nodelet"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The document


def test_the_document_and_the_router_hold_the_same_routes(world: World, name: str) -> None:
    document = world.of[name]("GET", "/openapi.json").json
    told = {(m.upper(), path) for path, ways in document["paths"].items() for m in ways}
    routed = {
        (route.method, route.resource.canonical)
        for route in shared.SERVICES[name]._app.router.routes()
        if route.resource is not None
    }
    assert told == routed


def test_the_document_is_whole(world: World, name: str) -> None:
    document = world.of[name]("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    assert document["info"]["title"] == f"Stoker {name}"
    for reference in shared.references(document):
        shared.resolve(reference, document)
    seen = set()
    for path, ways in document["paths"].items():
        for method, operation in ways.items():
            assert operation["summary"], (method, path)
            assert operation["responses"], (method, path)
            seen.add(operation["operationId"])
            places = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert places == {p.strip("{}") for p in path.split("/") if p.startswith("{")}
            assert ("requestBody" in operation) <= (method in ("post", "put", "patch"))
    assert len(seen) == sum(map(len, document["paths"].values())), "operation ids are unique"


@pytest.mark.parametrize("pair", LISTS, ids=shared.label)
def test_a_list_is_as_declared_and_pages_show_each_item_once(
    world: World, pair: tuple[str, BoundRoute]
) -> None:
    name, route = pair
    api, path = world.of[name], shared.filled(route.path, world.known)
    document = api("GET", "/openapi.json").json
    answer = api("GET", path)
    operation = document["paths"][route.path]["get"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert not list(shared.faults(answer.json, schema, document))
    page = msgspec.json.decode(answer.raw, type=route.reply)
    assert len(page.items) >= AT_LEAST.get(route.path, 1)
    assert answer.raw == msgspec.json.encode(page), "nothing is sent that is not in the type"
    if route.query is None:
        return

    def keys(limit: int) -> list[tuple[Any, ...]]:
        found = api.items(path, limit)
        return [tuple(item[key] for key in KEYS[route.path].split()) for item in found]

    before, walked, after = keys(1000), keys(1), keys(1000)
    assert len(set(walked)) == len(walked)
    # Workers and leases come and go meanwhile; what was there all the time is shown, in order.
    stayed = [key for key in before if key in set(after)]
    assert [key for key in walked if key in set(stayed)] == stayed


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in shared.ROUTES
        if pair[1].method == "GET" and pair[1].reply and not pair[1].stream and pair not in LISTS
    ],
    ids=shared.label,
)
def test_one_record_is_as_declared(world: World, pair: tuple[str, BoundRoute]) -> None:
    name, route = pair
    values = dict(world.known)
    if "leaders" in route.path:
        values["name"] = "scheduler"
    if "objects" in route.path:
        values["id"] = values["object"]
    if "detached" in route.path:
        values["id"] = values["detached"]
    if "queues" in route.path:
        values["name"] = "q0"
    if "story" in route.path:
        values["id"] = values["actor_id"]
    if "processes" in route.path:
        values["pid"] = str(os.getpid())
    api = world.of[name]
    document = api("GET", "/openapi.json").json
    if route.path.endswith("/exit"):  # Of a worker that lives: there is none yet.
        assert api("GET", shared.filled(route.path, values)).status == 504
        return
    if route.path.endswith("/elastic"):
        scaling = {"base_batch": 8, "max_local_batch": 8, "resources": {"GPU": 1}}
        path = f"/v1/jobs/{world.known['job_id']}/scaling"
        assert api("PUT", path, scaling).status == 200
    query = {"target": world.known["job_id"]} if route.path == "/v1/stacks" else {}
    answer = api("GET", shared.filled(route.path, values), **query)
    assert answer.status == 200
    responses = document["paths"][route.path]["get"]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    assert not list(shared.faults(answer.json, schema, document))
    msgspec.json.decode(answer.raw, type=route.reply)


# What every service has


def test_probes_are_open_and_say_who_answers(world: World, name: str) -> None:
    for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
        answer = world.of[name]("GET", path, token="")
        assert (answer.status, answer.json["service"]) == (200, name)
        assert answer.json["status"] == status


def test_metrics_can_be_read_by_prometheus(world: World, name: str) -> None:
    answer = world.of[name]("GET", "/metrics", token="")
    families = {f.name: f for f in text_string_to_metric_families(answer.raw.decode())}
    assert "stoker_http_requests" in families
    assert all(f.documentation for f in families.values())


# Watches


def watched(world: World, path: str, last: int, accept: str = "") -> list[dict[str, Any]]:
    """The events of a watch up to the sequence number ``last``."""
    found = []
    with world.gcs.open("GET", path, headers={"Accept": accept}) as reply:
        assert reply.status == 200
        while True:
            line = reply.readline().decode().strip()
            text = line.removeprefix("data: ") if accept else line
            if not text.startswith("{"):
                continue
            event = json.loads(text)
            found.append(event)
            if event["seq"] >= last:
                return found


@pytest.mark.parametrize("accept", ["", "text/event-stream"])
def test_a_watch_gives_each_event_once_and_in_order(world: World, accept: str) -> None:
    before = world.gcs.items("/v1/events")
    since = before[4]["seq"]
    new = world.gcs("POST", "/v1/jobs", {"entrypoint": "true"}).json["job_id"]
    until(
        lambda: world.gcs("GET", f"/v1/jobs/{new}", wait_s=10).json["state"] == "SUCCEEDED",
        WAIT_S, "the job ends",
    )  # fmt: skip
    expected = [event for event in world.gcs.items("/v1/events") if event["seq"] > since]
    last = expected[-1]["seq"]
    assert watched(world, f"/v1/events?watch=1&since={since}", last, accept) == expected
    of_jobs = [event for event in expected if event["kind"].startswith("job.")]
    last = of_jobs[-1]["seq"]
    assert watched(world, f"/v1/jobs?watch=1&since={since}", last, accept) == of_jobs


# Sent twice, done once


def twice(world: World, name: str, path: str, body: Any, key: str | None = None) -> Any:
    """The one answer of two equal requests with one key."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    answers = [world.of[name]("POST", path, body, headers=headers) for _ in range(2)]
    first, second = ((answer.status, answer.raw) for answer in answers)
    assert first == second
    assert answers[0].status < 300, answers[0].raw
    return answers[0].json if answers[0].raw else None


def test_a_job_submitted_twice_with_one_key_is_one_job(world: World) -> None:
    before = len(world.gcs.items("/v1/jobs"))
    job = twice(world, "gcs", "/v1/jobs", {"entrypoint": "sleep 60"}, key="k-1")
    other = world.gcs(
        "POST", "/v1/jobs", {"entrypoint": "true"}, headers={"Idempotency-Key": "k-1"}
    )
    assert (other.status, other.json["code"]) == (409, "idempotency_mismatch")
    assert len(world.gcs.items("/v1/jobs")) == before + 1
    stopped = twice(world, "gcs", f"/v1/jobs/{job['job_id']}/stop", None)
    assert stopped["state"] == "STOPPED"
    ends = [
        event
        for event in world.gcs.items("/v1/events", subject=job["job_id"])
        if event["kind"] == "job.finished"
    ]
    assert len(ends) == 1


def test_a_driver_that_attaches_twice_with_one_key_is_one_job(world: World) -> None:
    before = len(world.gcs.items("/v1/jobs"))
    job = twice(world, "gcs", "/v1/jobs/attach", {"entrypoint": "x"})
    assert len(world.gcs.items("/v1/jobs")) == before + 1
    ended = twice(world, "gcs", f"/v1/jobs/{job['job_id']}/finish", {"state": "SUCCEEDED"})
    assert ended["state"] == "SUCCEEDED"


def test_a_token_made_twice_with_one_key_is_one_token(world: World) -> None:
    before = len(world.gcs.items("/v1/tokens"))
    token = twice(world, "gcs", "/v1/tokens", {"name": "twice"})
    assert len(world.gcs.items("/v1/tokens")) == before + 1
    mine = world.gcs("GET", "/v1/nodes", token=token["secret"])
    assert mine.status == 200
    assert world.gcs("DELETE", f"/v1/tokens/{token['token_id']}").status == 200
    assert world.gcs("GET", "/v1/nodes", token=token["secret"]).status == 401


def test_an_actor_killed_twice_with_one_key_dies_once(world: World) -> None:
    keeper = Keeper.remote()
    assert stoker.get(keeper.ping.remote(), timeout=WAIT_S) == 1
    actor_id = keeper.actor_id
    killed = twice(world, "gcs", f"/v1/actors/{actor_id}/kill", {"no_restart": True})
    assert killed["actor_id"] == actor_id
    deaths = [
        event
        for event in world.gcs.items("/v1/events", subject=actor_id)
        if event["kind"] == "actor.died"
    ]
    assert len(deaths) == 1
