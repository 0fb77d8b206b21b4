"""Lists over real HTTP: their order, totals and filters; ids by their beginning; a job's causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Demand, WorkerExit, WorkersExited
from stoker_wire.messages.control import Event, Explanation, IdMatches, Page
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup, PlacementGroup
from stoker_wire.messages.work import (
    Actor,
    CreateActor,
    Job,
    ReportTasks,
    SubmitJob,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from tests.contract.gcs_support import attach, eventually, register

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client
    from tests.contract.gcs_support import FakeScheduler

NEWEST: dict[str, object] = {"sort": "created", "order": "desc"}


async def page(client: Client, path: str, item: Any = dict[str, Any], **query: object) -> Page[Any]:
    return await client.call("GET", path, reply=Page[item], query=query)


async def every(client: Client, path: str, **query: object) -> list[dict[str, Any]]:
    """All items, page by page."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        got = await page(client, path, **query, cursor=cursor)
        found += got.items
        cursor = got.next_cursor
        if not cursor:
            return found


async def submit(client: Client, job_id: str) -> str:
    body = SubmitJob(entrypoint="true", job_id=job_id)
    return (await client.call("POST", "/v1/jobs", body, reply=Job)).job_id


async def report(client: Client, job_id: str, *task_ids: str, **facts: Any) -> None:
    facts = {"state": TaskState.RUNNING, "name": "f", "attempt": 0, **facts}
    records = tuple(TaskRecord(task_id=task_id, job_id=job_id, **facts) for task_id in task_ids)
    body = ReportTasks(records=records)
    await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)


async def test_the_newest_items_come_first_on_pages_that_stay_right(stored: Client) -> None:
    job_id = (await attach(stored)).job_id
    names = ["t_c", "t_a", "t_d", "t_b"]
    for name in names:
        await report(stored, job_id, name)
    first = await page(stored, "/v1/tasks", **NEWEST, limit=2, count=1)
    assert [task["task_id"] for task in first.items] == ["t_b", "t_d"]
    assert (first.total, first.total_exact) == (4, True)
    await report(stored, job_id, "t_new")
    await report(stored, job_id, "t_b", state=TaskState.FINISHED)
    rest = await page(stored, "/v1/tasks", **NEWEST, limit=2, cursor=first.next_cursor)
    assert [task["task_id"] for task in rest.items] == ["t_a", "t_c"]
    assert (rest.next_cursor, rest.total) == ("", None), "it is counted only when asked"
    oldest = await every(stored, "/v1/tasks", sort="created", limit=2)
    assert [task["task_id"] for task in oldest] == [*names, "t_new"]
    by_id = await every(stored, "/v1/tasks", order="desc", limit=3)
    assert [task["task_id"] for task in by_id] == ["t_new", "t_d", "t_c", "t_b", "t_a"]
    done = await page(stored, "/v1/tasks", state="FINISHED,FAILED", count=1)
    assert (done.total, [task["task_id"] for task in done.items]) == (1, ["t_b"])


async def test_jobs_nodes_and_events_have_the_same_order(stored: Client) -> None:
    jobs = [await submit(stored, f"job_{i}") for i in (2, 3, 1)]
    found = await page(stored, "/v1/jobs", **NEWEST, limit=2, count=1)
    assert ([job["job_id"] for job in found.items], found.total) == (["job_1", "job_3"], 3)
    for node_id in ("n_2", "n_3", "n_1", "n_2"):
        await register(stored, node_id)
    nodes = await every(stored, "/v1/nodes", **NEWEST, limit=1)
    assert [node["node_id"] for node in nodes] == ["n_1", "n_3", "n_2"]

    forth = await every(stored, "/v1/events", limit=2)
    top = forth[-1]["seq"]  # jobs go on meanwhile, which makes events

    async def backwards(**query: object) -> list[dict[str, Any]]:
        found = await every(stored, "/v1/events", order="desc", **query)
        return [event for event in found if event["seq"] <= top]

    back = await backwards(limit=2)
    assert back == forth[::-1] and len(back) >= 7
    newest = await page(stored, "/v1/events", Event, order="desc", limit=2, count=1)
    assert newest.items[0].seq == newest.seq > newest.items[1].seq
    assert newest.total is not None and newest.total >= len(back)
    of_jobs = await backwards(limit=1, kind="job.", subject="job_")
    assert [event["subject"] for event in of_jobs if event["kind"] == "job.submitted"] == jobs[::-1]
    since = await backwards(limit=2, since=forth[2]["seq"])
    assert since == back[: len(back) - 3]


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("/v1/tasks", {"state": "FINISHEDX"}, "state: 'FINISHEDX' is none.\ndid you mean 'FINISHED'?"),
        ("/v1/jobs", {"state": "RUNNING,DONE"}, "state: 'DONE' is none.\nknown: FAILED, PENDING"),
        ("/v1/nodes", {"state": "dead"}, "did you mean 'DEAD'?"),
        ("/v1/actors", {"state": "ALIV"}, "did you mean 'ALIVE'?"),
        ("/v1/tasks", {"names": "f"}, "unknown query field 'names'.\ndid you mean 'name'?"),
        ("/v1/tasks", {**NEWEST, "cursor": "t_1"}, "cursor: 't_1' is none of this list"),
        ("/v1/tasks", {"cursor": "t_1"}, "cursor"),
        ("/v1/jobs", {**NEWEST, "cursor": "9" * 30}, "cursor"),
        ("/v1/events", {"cursor": "x"}, "cursor"),
        ("/v1/events", {"cursor": "9" * 30}, "cursor"),
        ("/v1/events", {"cursor": "9" * 5000}, "cursor"),
        ("/v1/nodes", {"cursor": "9" * 5000}, "cursor"),
        ("/v1/workers", {**NEWEST, "cursor": "x"}, "cursor"),
        ("/v1/tasks", {"sort": "name"}, "sort"),
        ("/v1/tasks", {"order": "down"}, "order"),
    ],
)  # fmt: skip
async def test_a_filter_or_a_cursor_that_is_none_is_refused(
    client: Client, path: str, query: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.call("GET", path, reply=Page[dict[str, Any]], query=query)
    assert said in str(caught.value)


async def test_ids_are_found_by_their_beginning(stored: Client) -> None:
    job_id = await submit(stored, "job_ab1")
    await submit(stored, "job_ab2")
    await register(stored, "n_ab")
    await report(stored, job_id, "t_ab1", "t_ab1c")
    await report(stored, job_id, "t_ab1", attempt=1, state=TaskState.FAILED)
    exits = WorkersExited(exits=(WorkerExit(worker_id="w_ab", node_id="n_ab"),))
    await stored.call("POST", "/v1/workers/exited", exits)
    group = CreatePlacementGroup(
        group_id="pg_ab", job_id=job_id, bundles=(Bundle(resources={"CPU": 1.0}),), name="gang"
    )
    await stored.call("POST", "/v1/placement-groups", group, reply=PlacementGroup)

    async def matches(**query: object) -> IdMatches:
        return await stored.call("GET", "/v1/ids", reply=IdMatches, query=query)

    async def found(prefix: str, **query: object) -> list[str]:
        got = await matches(prefix=prefix, **query)
        return [match.id for match in got.matches]

    assert await found("job_ab") == ["job_ab1", "job_ab2"]
    assert await found("t_ab1") == ["t_ab1", "t_ab1c"], "an exact match is the first"
    assert await found("w_a") == ["w_ab"]
    assert await found("job_x") == await found("x_") == await found("job_ab1 ") == []
    assert await found("") == ["n_ab", "job_ab1", "job_ab2", "t_ab1", "t_ab1c", "w_ab", "pg_ab"]
    [found_group] = (await matches(prefix="pg_")).matches
    assert (found_group.kind, found_group.name) == ("placement group", "gang")
    some = await matches(prefix="t_ab1", limit=1)
    [match] = some.matches
    assert (match.kind, match.state, match.name, some.more) == ("task", "FAILED", "f", True)


async def test_a_job_tells_what_of_it_waits_by_cause(client: Client, fake: FakeScheduler) -> None:
    fake.held_back.clear()
    job_id = (await attach(client)).job_id
    demand = Demand(job_id=job_id, resources={"CPU": 1.0}, name="Trainer")
    for i in range(4):
        body = CreateActor(actor_id=f"a_{i}", demand=demand, class_name="Trainer", payload=b"")
        await client.call("POST", "/v1/actors", body, reply=Actor)
    queued = Demand(job_id=job_id, resources={"GPU": 1.0}, name="step")
    for i in range(3):
        local = Demand(job_id=job_id, resources={"GPU": 1.0}, name="step", locality={"n_1": i})
        await report(client, job_id, f"t_a{i}", state=TaskState.QUEUED, name="step", demand=local)
    waiting = "it waits for its argument o_a0.0"
    for i in range(2):
        facts = {"demand": queued, "waiting_for": waiting, "name": "late"}
        await report(client, job_id, f"t_b{i}", state=TaskState.WAITING, **facts)
    for i in range(5):
        told_once = f"it waits for actor Trainer (a_{i % 4}): it is ALIVE"
        facts = {"waiting_for": told_once, "actor_id": f"a_{i % 4}", "name": "Trainer.f"}
        await report(client, job_id, f"t_c{i}", state=TaskState.QUEUED, **facts)
    await report(client, job_id, "t_runs", "t_other")

    told = await client.call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation)
    groups = [(g.count, g.kind, g.name, g.cause, g.example_id) for g in told.waiting]
    assert groups == [
        (5, "task", "Trainer.f", "waits for actor Trainer (a_0), which is PENDING", "t_c0"),
        (4, "actor", "Trainer", "Trainer waits for 99 CPUs", "a_0"),
        (3, "task", "step", "step waits for 99 CPUs", "t_a0"),
        (2, "task", "late", "waits for its argument o_a0.0", "t_b0"),
    ]
    of_task = await client.call("GET", "/v1/tasks/t_b0/explain", reply=Explanation)
    assert of_task.summary == (
        "task t_b0 (late, attempt 0) waits for its argument o_a0.0, which task t_a0 (step) makes; "
        "that is QUEUED"
    )
    of_call = await client.call("GET", "/v1/tasks/t_c1/explain", reply=Explanation)
    assert of_call.summary == (
        "task t_c1 (Trainer.f, attempt 0) waits for its actor; Trainer waits for 99 CPUs"
    )

    await client.call("POST", f"/v1/jobs/{job_id}/stop", reply=Job)

    async def is_over() -> bool:
        told = await client.call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation)
        return told.state == "STOPPED" and not told.waiting

    await eventually(is_over, "a job that has ended waits for nothing")


async def test_lists_are_documented_with_their_order(client: Client) -> None:
    document = await client.call("GET", "/openapi.json", reply=dict[str, Any])
    for path in ("/v1/tasks", "/v1/jobs", "/v1/events", "/v1/leases", "/v1/ids"):
        names = {p["name"] for p in document["paths"][path]["get"]["parameters"]}
        wanted = {"prefix", "limit"} if path == "/v1/ids" else {"sort", "order", "count", "cursor"}
        assert wanted <= names, path
