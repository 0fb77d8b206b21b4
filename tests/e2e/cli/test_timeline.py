"""``stoker timeline`` and stories of a job with spans, as its owner and as another user see them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.messages.control import CreateToken, Token
from tests.e2e._cluster import cli, head, http, run_driver
from tests.services import until
from tests.unit.sdk.api.tracing.test_timeline import check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
PROGRAM = """
    import asyncio, time, stoker
    info = stoker.init(log_to_driver=False)

    @stoker.remote(num_cpus=0)
    def leaf(x):
        with stoker.profile("deep", size=x):
            time.sleep(0.01)

    @stoker.remote(num_cpus=0)
    def branch():
        return stoker.get([leaf.remote(x) for x in range(3)])

    @stoker.remote(num_cpus=0)
    class Shop:
        async def sell(self):
            with stoker.profile("sale"):
                await asyncio.sleep(0.05)

    shop = Shop.remote()
    with stoker.profile("main"):
        stoker.get([branch.remote() for _ in range(2)])
        stoker.get([shop.sell.remote() for _ in range(4)])
    try:
        stoker.get(stoker.remote(num_cpus=0, max_retries=0)(lambda: 1 / 0).remote())
    except ZeroDivisionError:
        pass
    events = stoker.timeline()
    print(info.job_id, sum(one["name"] == "leaf" for one in events))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("timeline"), num_cpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def job_id(cluster: LocalCluster) -> str:
    """A job that has ended."""
    done = run_driver(cluster, PROGRAM)
    assert done.returncode == 0, done.stderr
    job_id, leaves = done.stdout.split()
    assert leaves == "6"
    return job_id


def written(cluster: LocalCluster, path: Path, *args: str) -> list[dict[str, Any]]:
    done = cli(cluster, "timeline", *args, "-o", str(path))
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = json.loads(path.read_text())
    check(events)
    return events


def test_a_job_is_shown_with_arrows_spans_and_rows(
    cluster: LocalCluster, job_id: str, tmp_path: Path
) -> None:
    events = written(cluster, tmp_path / "trace.json", job_id)
    slices = [one["name"] for one in events if one["ph"] == "X"]
    counts = {"leaf": 6, "deep": 6, "branch": 2, "Shop.sell": 4, "sale": 4}
    assert {name: slices.count(name) for name in counts} == counts
    names = {one["id"]: one for one in events if one["ph"] == "b"}
    assert "main" in {one["name"] for one in names.values()}
    # Each call has one: six from `branch`, seven from the driver.
    assert sum(one["ph"] == "s" for one in events) == 13
    rows = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {f"driver of {job_id}", "starts of workers"} <= rows
    assert any(one.startswith("actor Shop") and one.endswith("(4)") for one in rows)
    (failed,) = [one for one in events if one.get("args", {}).get("state") == "FAILED"]
    assert "ZeroDivisionError" in failed["args"]["error"]
    assert not list(tmp_path.glob("*.part"))


def test_what_is_left_out_is_said(cluster: LocalCluster, job_id: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = cli(cluster, "timeline", "--job", job_id, "--limit", "5", "--json", "-o", str(path))
    told = json.loads(done.stdout)
    assert told["events"] == len(json.loads(path.read_text()))
    assert any("older attempts were not read: --limit " in one for one in told["notes"]), told
    assert not written(cluster, path, job_id, "--until", "2d")
    assert written(cluster, path, job_id, "--since", "2d")
    shown = cli(cluster, "timeline", job_id, "-o", "-")
    assert len(json.loads(shown.stdout)) > 20


def test_mistakes_are_told_on_one_line(cluster: LocalCluster, job_id: str, tmp_path: Path) -> None:
    refused = cli(cluster, "timeline", "-o", str(tmp_path / "none" / "x"))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    for args in (("--since", "yesterday"), (job_id, "--job", job_id), ("--limit", "0")):
        assert cli(cluster, "timeline", *args).returncode == 2


def test_a_story_tells_the_spans_of_an_attempt(cluster: LocalCluster, job_id: str) -> None:
    query = {"job_id": job_id, "name": "leaf"}
    (task, *_) = http(cluster).call("GET", "/v1/tasks", reply=dict[str, Any], query=query)["items"]
    assert [one["name"] for one in task["spans"]["items"]] == ["deep"]
    told = cli(cluster, "story", task["task_id"]).stdout
    assert "deep (size=" in told


def test_others_see_only_what_is_theirs(cluster: LocalCluster, job_id: str, tmp_path: Path) -> None:
    client = http(cluster)
    token = client.call("POST", "/v1/tokens", CreateToken(name="eve", role="user"), reply=Token)
    (node,) = client.call("GET", "/v1/nodes", reply=dict[str, Any])["items"]
    path = f"/v1/nodes/{node['node_id']}/activity"
    entries = client.call("GET", path, reply=dict[str, Any], query={"job_id": job_id})["items"]
    assert {one["kind"] for one in entries} == {"lease"}
    file = tmp_path / "trace.json"
    mine = cli(cluster, "timeline", "-o", str(file), STOKER_TOKEN=token.secret)
    assert mine.returncode == 0, mine.stderr
    assert json.loads(file.read_text()) == []
    until(
        lambda: cli(cluster, "timeline", "-o", "-").stdout.count("job_"),
        WAIT_S,
        "an admin sees all",
    )
