"""What the gcs adds up for the dashboard, over real HTTP and on each store."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from stoker_gcs.controllers.usage import UsageRecorder
from stoker_gcs.dashboard import timeline
from stoker_gcs.dashboard.overview import alike
from stoker_gcs.dashboard.task_summary import durations
from stoker_gcs.state import schema
from stoker_wire.errors import BadRequestError, ConflictError, ForbiddenError, UnauthorizedError
from stoker_wire.http.client.client import Client
from stoker_wire.http.dashboard.control_plane import PROCESS_PATH, ControlPlane
from stoker_wire.http.dashboard.figures import (
    LOGIN_LINKS_PATH,
    SESSION_PATH,
    JobCost,
    LoginLink,
    Overview,
    Session,
    TaskSummary,
    Timeline,
    Usage,
    UsageQuery,
    UsageSample,
)
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import ErrorInfo, Strategy
from stoker_wire.messages.control import (
    Campaign,
    CreateToken,
    KvPut,
    KvReply,
    Leader,
    Page,
    PersonRole,
    Token,
)
from stoker_wire.messages.groups import Bundle, CreatePlacementGroup, PlacementGroup
from stoker_wire.messages.kernels import TUNING_NAMESPACE, TunedKernel, tuning_key
from stoker_wire.messages.work import (
    Actor,
    ActorState,
    CreateActor,
    ReportActor,
    ReportTasks,
    TaskHistoryStatus,
    TaskRecord,
    TaskState,
)
from stoker_wire.version import VERSION
from tests.contract.gcs_support import (
    PATIENT,
    attach,
    eventually,
    gcs,
    migrate,
    register,
    scheduler,
)

if TYPE_CHECKING:
    from stoker_gcs.service import Running
    from stoker_wire.messages.work import Job
    from tests.contract.gcs_support import FakeScheduler

WORKERS = 3


async def report(client: Client, *records: TaskRecord) -> None:
    for first in range(0, len(records), 500):
        body = ReportTasks(records=records[first : first + 500])
        await client.call("POST", "/v1/tasks/report", body, reply=TaskHistoryStatus)


def began(job: Job) -> float:
    """When the work of a job begins here: all of it lies in the past."""
    return job.created_at_s - 100.0


def attempt(job: Job, number: int, start_s: float, run_s: float | None, **more: Any) -> TaskRecord:
    """The attempt of a task that began ``start_s`` after its job, waited a tenth of a second, and ran."""
    at_s = began(job) + start_s
    given: dict[str, Any] = {
        "name": "train",
        "state": TaskState.RUNNING if run_s is None else TaskState.FINISHED,
        "worker_id": f"w_{number % WORKERS}",
        "node_id": "n_1",
        **more,
    }
    return TaskRecord(
        task_id=f"t_{number:05}",
        attempt=0,
        job_id=job.job_id,
        submitted_at_s=at_s - 0.1,
        started_at_s=at_s,
        ended_at_s=None if run_s is None else at_s + run_s,
        **given,
    )


def failed(job: Job, number: int, message: str, **more: Any) -> TaskRecord:
    error = ErrorInfo(code="task_failed", message=message)
    return attempt(job, number, 1.0, 2.0, state=TaskState.FAILED, error=error, **more)


async def test_tasks_are_summed_up_by_function(stored: Client) -> None:
    await register(stored)
    job = await attach(stored)
    runs = [attempt(job, i, 0.0, 0.010 * (1 + i)) for i in range(100)]
    await report(
        stored, *runs, failed(job, 200, "no", name="evaluate"), attempt(job, 300, 0.0, None)
    )
    found = await stored.call(
        "GET", "/v1/tasks/summary", reply=TaskSummary, query={"job_id": job.job_id}
    )
    assert found.total == 2 and found.states == {"FINISHED": 100, "FAILED": 1, "RUNNING": 1}
    train, evaluate = found.items
    assert (train.key, train.count) == ("train", 101)
    assert train.states == {"FINISHED": 100, "RUNNING": 1} and not train.failures
    assert train.run_s.count == 100
    assert train.run_s.total == pytest.approx(sum(0.010 * (1 + i) for i in range(100)))
    assert train.run_s.p50 == pytest.approx(0.5, rel=0.11)
    assert train.run_s.p99 == pytest.approx(0.99, rel=0.11)
    assert train.wait_s.p90 == pytest.approx(0.1, rel=0.1)
    assert evaluate.failures == {"task_failed": 1}
    only = await stored.call(
        "GET", "/v1/tasks/summary", reply=TaskSummary, query={"name": "evaluate", "limit": 1}
    )
    assert [one.key for one in only.items] == ["evaluate"]
    other = await stored.call(
        "GET", "/v1/tasks/summary", reply=TaskSummary, query={"job_id": "job_none"}
    )
    assert other == TaskSummary(items=(), states={}, total=0)


async def test_a_timeline_has_attempts_where_they_are_few(stored: Client) -> None:
    await register(stored)
    job = await attach(stored)
    await report(stored, *(attempt(job, i, float(i), 0.5) for i in range(6)))
    found = await stored.call(
        "GET", "/v1/tasks/timeline", reply=Timeline, query={"job_id": job.job_id}
    )
    assert found.first_s == found.from_s == pytest.approx(began(job))
    assert [lane.worker_id for lane in found.lanes] == ["w_0", "w_1", "w_2"]
    spans = found.lanes[1].spans
    assert spans is not None and found.lanes[1].busy is None
    assert [(span[0] - found.from_s, span[4]) for span in spans] == [
        (pytest.approx(1.0), "t_00001"),
        (pytest.approx(4.0), "t_00004"),
    ]
    assert found.names[spans[0][2]] == "train" and found.states[spans[0][3]] == "FINISHED"
    part = {"from_s": began(job) + 2.2, "to_s": began(job) + 3.1}
    inside = await stored.call("GET", "/v1/tasks/timeline", reply=Timeline, query=part)
    shown = [span[4] for lane in inside.lanes for span in lane.spans or ()]
    assert sorted(shown) == ["t_00002", "t_00003"], "whatever touches the range"


async def test_lanes_come_in_pages(stored: Client) -> None:
    await register(stored)
    job = await attach(stored)
    await report(stored, *(attempt(job, i, float(i), 0.5) for i in range(6)))
    seen, cursor = [], ""
    while True:
        query = {"lane_limit": 2, **({"cursor": cursor} if cursor else {})}
        page = await stored.call("GET", "/v1/tasks/timeline", reply=Timeline, query=query)
        seen += [lane.worker_id for lane in page.lanes]
        cursor = page.next_cursor
        if not cursor:
            break
    assert seen == ["w_0", "w_1", "w_2"]


async def test_a_timeline_says_how_busy_workers_were_where_attempts_are_many(
    stored: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MOST_SPANS", 50)
    await register(stored)
    job = await attach(stored)
    # Each worker: half of each second in short attempts for 10 s, then one long attempt for 10 s.
    short = [
        attempt(job, 1000 * worker + i, i * 0.1, 0.05, worker_id=f"w_{worker}")
        for worker in range(WORKERS)
        for i in range(100)
    ]
    long = [
        attempt(job, 9000 + worker, 10.0, 10.0, worker_id=f"w_{worker}")
        for worker in range(WORKERS)
    ]
    await report(stored, *short, *long)
    query = {
        "job_id": job.job_id,
        "buckets": 20,
        "from_s": began(job),
        "to_s": began(job) + 20.0,
    }
    found = await stored.call("GET", "/v1/tasks/timeline", reply=Timeline, query=query)
    assert found.bucket_s == pytest.approx(1.0)
    for lane in found.lanes:
        assert lane.count == 101 and lane.spans is None and lane.busy is not None
        assert lane.busy[:10] == pytest.approx([0.5] * 10, abs=0.06)
        assert lane.busy[10:] == pytest.approx([1.0] * 10, abs=0.01)
    first = await stored.call(
        "GET", "/v1/tasks/timeline", reply=Timeline, query={**query, "lane_limit": 1}
    )
    second = await stored.call(
        "GET", "/v1/tasks/timeline", reply=Timeline, query={**query, "cursor": first.next_cursor}
    )
    assert (*first.lanes, *second.lanes) == found.lanes, "a page is a part of the whole"
    later = {**query, "from_s": began(job) + 15.0}
    zoomed = await stored.call("GET", "/v1/tasks/timeline", reply=Timeline, query=later)
    assert [len(lane.spans or ()) for lane in zoomed.lanes] == [1] * WORKERS, "few are left"


@pytest.mark.parametrize(
    "query",
    [
        {"from_s": 20.0, "to_s": 10.0},
        {"buckets": 1},
        {"lane_limit": 100_000},
        {"cursor": "x" * 400},
    ],
)
async def test_a_range_that_is_none_is_refused(client: Client, query: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        await client.call("GET", "/v1/tasks/timeline", reply=Timeline, query=query)


async def test_the_overview_counts_and_says_what_failed(
    served: tuple[Running, Client], fake: FakeScheduler
) -> None:
    _, client = served
    await register(client)
    job = await attach(client)
    await report(
        client,
        *(failed(job, i, f"ValueError: row {i} of t_{i:020x}") for i in range(5)),
        failed(job, 50, "OSError: no disk"),
    )
    found = await client.call("GET", "/v1/overview", reply=Overview)
    assert found.nodes == {"ALIVE": 1} and found.jobs == {"RUNNING": 1}
    assert found.tasks == {"FAILED": 6}
    counts = {failure.message.partition(":")[0]: failure.count for failure in found.failures}
    assert counts == {"ValueError": 5, "OSError": 1}, "what failed alike is one failure"
    assert {failure.job_id for failure in found.failures} == {job.job_id}


async def test_an_overview_without_a_scheduler_says_so(client: Client) -> None:
    await register(client)
    found = await client.call("GET", "/v1/overview", reply=Overview)
    assert found.nodes == {"ALIVE": 1}
    assert found.missing.startswith("what is used and what waits: ")


async def test_the_use_of_the_cluster_is_recorded(
    served: tuple[Running, Client], fake: FakeScheduler
) -> None:
    running, client = served
    await register(client)

    async def recorded() -> bool:
        found = await client.call("GET", "/v1/usage", reply=Usage)
        return bool(found.at_s) and found.series["node_count"][-1] is not None

    await eventually(recorded, "a sample")
    found = await client.call("GET", "/v1/usage", reply=Usage, query={"points": 2})
    assert {len(values) for values in found.series.values()} == {len(found.at_s)}
    long_ago = {"since_s": 1000.0, "until_s": 2000.0}
    empty = await client.call("GET", "/v1/usage", reply=Usage, query=long_ago)
    assert empty.at_s == () and empty.step_s == 900
    assert running.app.state.log.last < 20, "samples are no events"


async def test_a_step_goes_on_where_the_last_leader_has_left_it(
    served: tuple[Running, Client],
) -> None:
    app = served[0].app
    # Two days ago: the finer steps of then are removed by the gcs, which cleans up now and then.
    began_s = (time.time() // 900.0 - 192) * 900.0
    for at_s, finished, waiting in ((began_s + 5, 3.0, 8.0), (began_s + 10, 4.0, 2.0)):
        recorder = UsageRecorder(app.state, app.peers, app.nodes)
        sample = UsageSample(tasks_finished=finished, waiting=waiting)
        await recorder._record(sample, at_s)
    found = await recorder.read(UsageQuery(since_s=began_s, until_s=began_s + 900.0))
    assert (found.step_s, found.at_s) == (900, (began_s,))
    assert found.series["tasks_finished"] == (7.0,), "what was counted is not lost"
    assert found.series["waiting"] == (pytest.approx(6.0),)


async def test_users_see_what_is_theirs(
    served: tuple[Running, Client], fake: FakeScheduler
) -> None:
    running, admin = served
    await register(admin)
    job = await attach(admin)
    await report(admin, failed(job, 1, "secret of another"), attempt(job, 2, 0.0, 1.0))
    body = CreateToken(name="mallory", role=PersonRole.USER)
    token = await admin.call("POST", "/v1/tokens", body, reply=Token)
    async with Client(running.url, token=token.secret, peer="test") as mallory:
        summary = await mallory.call("GET", "/v1/tasks/summary", reply=TaskSummary)
        lanes = await mallory.call("GET", "/v1/tasks/timeline", reply=Timeline)
        overview = await mallory.call("GET", "/v1/overview", reply=Overview)
        assert not summary.items and not lanes.lanes and not overview.failures
        assert not overview.tasks and not overview.jobs
        asked = {"job_id": job.job_id}
        summary = await mallory.call("GET", "/v1/tasks/summary", reply=TaskSummary, query=asked)
        assert not summary.items
        with pytest.raises(ForbiddenError):
            await mallory.call("GET", "/v1/tasks/t_00001", reply=TaskRecord)


async def cost(client: Client, job: Job) -> JobCost:
    return await client.call("GET", f"/v1/jobs/{job.job_id}/cost", reply=JobCost)


async def test_what_functions_and_jobs_held_is_counted(stored: Client) -> None:
    await register(stored)
    job = await attach(stored)
    train = [attempt(job, i, 0.0, 10.0, cpus=2.0, gpus=0.5) for i in range(4)]
    load = [attempt(job, 10, 0.0, 3600.0, cpus=1.0, name="load")]
    runs = attempt(job, 20, 0.0, None, cpus=1.0, gpus=1.0, name="runs")
    await report(stored, *train, *load, runs)
    query = {"job_id": job.job_id, "limit": 2}
    found = await stored.call("GET", "/v1/tasks/summary", reply=TaskSummary, query=query)
    held = {one.key: (one.cpu_s, one.gpu_s) for one in found.items}
    assert held["train"] == pytest.approx((80.0, 20.0))
    assert held["load"] == pytest.approx((3600.0, 0.0))
    first, second = await cost(stored, job), await cost(stored, job)
    names = [part.name for part in first.parts]
    assert names == ["runs", "train", "load"], "one that runs for 100 s holds its GPU"
    assert 3780.0 < first.cpu_s < second.cpu_s and 120.0 < first.gpu_s < second.gpu_s
    assert found.gpu_s > 120.0, "of all functions, also those that are not shown"
    await report(stored, attempt(job, 20, 0.0, 30.0, name="runs"))
    ended = await cost(stored, job)
    assert (ended.cpu_s, ended.gpu_s) == pytest.approx((3710.0, 50.0)), "what only one report says"


async def test_what_a_placement_group_holds_counts_once(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client)
    job = await attach(client)
    bundles = (Bundle(resources={"CPU": 2.0, "GPU": 1.0}),) * 2
    body = CreatePlacementGroup(group_id="pg_1", job_id=job.job_id, bundles=bundles, name="gang")
    await client.call("POST", "/v1/placement-groups", body, reply=PlacementGroup)
    for actor_id, group_id in (("a_in", "pg_1"), ("a_out", "")):
        demand = Demand(
            job_id=job.job_id, resources={"GPU": 1.0}, strategy=Strategy(group_id=group_id)
        )
        made = CreateActor(actor_id=actor_id, demand=demand, class_name="Trainer", payload=b"")
        await client.call("POST", "/v1/actors", made, reply=Actor)
    await report(client, attempt(job, 1, 0.0, 50.0, cpus=1.0, gpus=1.0, group_id="pg_1"))

    async def all_hold() -> bool:
        for actor_id in ("a_in", "a_out"):
            now = await client.call("GET", f"/v1/actors/{actor_id}", reply=Actor)
            if now.lease_id and now.started_at_s is None:
                ready = ReportActor(
                    state=ActorState.ALIVE, incarnation=now.incarnation, worker_id=now.worker_id
                )
                await client.call("POST", f"/v1/actors/{actor_id}/report", ready, reply=Actor)
        return len((await cost(client, job)).parts) == 4

    await eventually(all_hold, "both actors and the group hold something")
    found = await cost(client, job)
    parts = {part.id or part.name: part for part in found.parts}
    assert parts["train"].group_gpu_s == parts["train"].gpu_s == pytest.approx(50.0)
    assert parts["a_in"].group_gpu_s == parts["a_in"].gpu_s > 0
    assert parts["a_out"].group_gpu_s == 0
    assert parts["pg_1"].cpu_s == pytest.approx(2 * parts["pg_1"].gpu_s)
    assert found.gpu_s == pytest.approx(parts["pg_1"].gpu_s + parts["a_out"].gpu_s)
    assert found.complete


async def test_lanes_are_named_by_their_actors_and_nodes(
    client: Client, fake: FakeScheduler
) -> None:
    await register(client)
    job = await attach(client)
    demand = Demand(job_id=job.job_id, resources={"CPU": 1.0})
    for actor_id, name in (("a_1", "counter"), ("a_2", "")):
        body = CreateActor(
            actor_id=actor_id, demand=demand, class_name="Counter", name=name, payload=b""
        )
        await client.call("POST", "/v1/actors", body, reply=Actor)
    actors = ["a_1", "a_2", "", "a_gone"]
    for number, actor_id in enumerate(actors):
        more = {"actor_id": actor_id, "worker_id": f"w_{number}", "node_id": "n_1"}
        await report(client, attempt(job, number, 0.0, 1.0, **more))
    await report(client, attempt(job, 9, 0.0, 1.0, worker_id="w_9", node_id="n_0"))
    found = await client.call("GET", "/v1/tasks/timeline", reply=Timeline)
    assert [lane.node_id for lane in found.lanes] == ["n_0", *["n_1"] * 4], "by node"
    assert [lane.name for lane in found.lanes] == ["", "counter", "Counter", "", ""]
    assert found.hostnames == {"n_1": "here"}, "of those that are known"


async def test_measured_kernels_are_shown_to_those_who_may_not_read_the_keys(
    served: tuple[Running, Client],
) -> None:
    running, admin = served
    tuned = TunedKernel(
        kernel="rms", key={"n": 8}, config={"block": 2}, device="H100", seconds=2e-3,
        least_seconds=1e-3,
    )  # fmt: skip
    values = {
        tuning_key("H100", "rms", {"n": 8}): msgspec.json.encode(tuned),
        "H100/broken": b"no measurement",
        tuning_key("A100", "rms", {}): msgspec.json.encode(replace(tuned, device="A100")),
    }
    for key, value in values.items():
        put = KvPut(key=key, value=value)
        await admin.call("POST", f"/v1/kv/{TUNING_NAMESPACE}", put, reply=KvReply)
    body = CreateToken(name="vera", role=PersonRole.VIEWER)
    token = await admin.call("POST", "/v1/tokens", body, reply=Token)
    async with Client(running.url, token=token.secret, peer="test") as viewer:
        with pytest.raises(ForbiddenError):
            await viewer.call("GET", f"/v1/kv/{TUNING_NAMESPACE}")
        found = await viewer.call("GET", "/v1/kernels", reply=Page[TunedKernel])
        assert [one.device for one in found.items] == ["A100", "H100"]
        query = {"device": "H1", "limit": 1, "count": True}
        page = await viewer.call("GET", "/v1/kernels", reply=Page[TunedKernel], query=query)
        assert (page.items, page.total) == ((), 2) and page.next_cursor
        query["cursor"] = page.next_cursor
        page = await viewer.call("GET", "/v1/kernels", reply=Page[TunedKernel], query=query)
        assert page.items == (tuned,)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_control_plane_tells_of_its_processes_and_health(
    request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    await migrate(url)
    settings = replace(PATIENT, otlp_endpoint="http://me:hidden@here:4318")
    settings = replace(settings, sources={"otlp_endpoint": "STOKER_OTLP_ENDPOINT"})
    async with gcs(url, settings=settings) as (running, admin), scheduler(admin):
        await register(admin)
        standby = Campaign(holder="p_second", url="http://127.0.0.1:9", ttl_s=1.0)
        with pytest.raises(ConflictError):
            await admin.call("POST", "/v1/leaders/scheduler", standby, reply=Leader)

        async def all_known() -> bool:
            plane = await admin.call("GET", "/v1/control-plane", reply=ControlPlane)
            gcs = [one for one in plane.processes if one.service == "gcs"]
            return len(plane.processes) == 4 and all(one.leads for one in gcs)

        await eventually(all_known, "the gcs leads, and knows the others")
        found = await admin.call("GET", "/v1/control-plane", reply=ControlPlane)
        named = {one.service + " " + one.id: one for one in found.processes}
        own = named[f"gcs {running.app.replica_id}"]
        assert own.status is not None and own.status.version == VERSION and own.leads
        assert [(one.name, one.value) for one in own.status.settings] == [
            ("otlp_endpoint", "http://***@here:4318")
        ]
        leader = named["scheduler p_sched"]
        assert leader.leads and leader.epoch == 1 and leader.status is not None
        assert not named["scheduler p_second"].leads and named["scheduler p_second"].problem
        assert named["nodelet n_1"].problem
        assert found.database.kind == {"postgres": "postgresql"}.get(kind, kind)
        assert found.database.revision == schema.REVISION and (found.database.nbytes or 0) > 1000
        assert (found.ephemeral.kind, found.ephemeral.up) == ("memory", True)
        assert found.events.last >= found.events.applied > 0
        assert {one.name for one in found.settings} > {"otlp_endpoint", "database_url"}
        assert "hidden" not in repr(found)
        body = CreateToken(name="vera", role=PersonRole.VIEWER)
        token = await admin.call("POST", "/v1/tokens", body, reply=Token)
        async with Client(running.url, token=token.secret, peer="test") as viewer:
            shown = await viewer.call("GET", "/v1/control-plane", reply=ControlPlane)
            assert len(shown.processes) == 4 and not shown.settings
            assert not any(one.status and one.status.settings for one in shown.processes)
            with pytest.raises(ForbiddenError):
                await viewer.call("GET", PROCESS_PATH)


async def test_a_login_link_opens_once_at_any_replica(postgres_url: str) -> None:
    await migrate(postgres_url)
    async with gcs(postgres_url) as (one, client), gcs(postgres_url) as (two, _):
        links = [await client.call("POST", LOGIN_LINKS_PATH, reply=LoginLink) for _ in range(2)]
        tokens = [link.path.removeprefix("/#login=") for link in links]

        async def log_in(url: str, token: str) -> Session | UnauthorizedError:
            async with Client(url, token=token, peer="test") as browser:
                try:
                    return await browser.call("POST", SESSION_PATH, reply=Session)
                except UnauthorizedError as error:
                    return error

        tries = [await log_in(url, tokens[0]) for url in (one.url, two.url, one.url)]
        assert isinstance(tries[0], Session)
        for again in tries[1:]:
            assert isinstance(again, UnauthorizedError)
            assert again.one_line.startswith("this link was opened before")
        at_once = await asyncio.gather(*(log_in(url, tokens[1]) for url in (one.url, two.url)))
        assert sorted(type(outcome).__name__ for outcome in at_once) == [
            "Session",
            "UnauthorizedError",
        ]


def test_percentiles_of_nothing_are_zero() -> None:
    assert durations({}, 0.0).p99 == 0.0
    assert durations({3: 0, 5: -1}, 0.0).count == 0


def test_failures_alike_have_the_newest_as_their_example() -> None:
    tasks = [
        TaskRecord(
            task_id=f"t_{i}",
            attempt=0,
            job_id="job_1",
            state=TaskState.FAILED,
            name="f",
            error=ErrorInfo(code="task_failed", message=f"row {i}"),
        )
        for i in (3, 2, 1)
    ]
    [found] = alike(tasks)
    assert (found.id, found.count, found.message) == ("t_3", 3, "row 3")
