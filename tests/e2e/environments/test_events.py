"""What a node installs is in the event log, in explanations and in the story of its job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import NotFoundError, RuntimeEnvSetupError
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.control import Event, Explanation, Page, WaitPhase
from stoker_wire.messages.events import Story, payload_as
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild
from tests.e2e._cluster import embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.api.init import ClusterInfo


WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    with embedded(tmp_path_factory.mktemp("sessions"), num_cpus=2) as info:
        yield info


@pytest.fixture
def gcs(cluster: ClusterInfo) -> HttpClient:
    return HttpClient(cluster.address, token=cluster.token)


def builds(gcs: HttpClient, what: str) -> list[EnvironmentBuild]:
    query = {"kind": "environment.", "limit": 1000}
    page: Page[Event] = gcs.call("GET", "/v1/events", reply=Page[Event], query=query)
    found = [payload_as(event, EnvironmentBuild) for event in page.items]
    return [one for one in found if one is not None and one.what == what]


def ended(gcs: HttpClient, what: str) -> list[EnvironmentBuild]:
    """The events of a build once it has begun and ended, none before."""
    found = builds(gcs, what)
    return found if len(found) > 1 else []


def task(setup: str, **more: Any) -> Any:
    @stoker.remote(runtime_env={"setup": setup, **more}, max_retries=0)
    def done() -> int:
        return 1

    return done


def test_an_installation_is_visible_while_it_lasts_and_told_when_it_is_done(
    cluster: ClusterInfo, gcs: HttpClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ref = task(f"cat {gate}").remote()
    [began] = until(lambda: builds(gcs, "setup"), WAIT_S, "the build began")
    assert (began.state, began.node_id) == (BuildState.INSTALLING, cluster.node_id)
    assert began.job_id == cluster.job_id

    def explained() -> Explanation | None:
        path = f"/v1/tasks/{ref.task_id}/explain"
        try:
            found: Explanation = gcs.call("GET", path, reply=Explanation)
        except NotFoundError:  # it has not waited for long
            return None
        return found if found.phase is WaitPhase.ENVIRONMENT else None

    assert (
        "its environment is being installed"
        in until(explained, WAIT_S, "the task is explained").summary
    )
    with gate.open("w"):
        pass
    assert stoker.get(ref, timeout=WAIT_S) == 1
    _, ready = until(lambda: ended(gcs, "setup"), WAIT_S, "the build ended")
    assert (ready.state, ready.key) == (BuildState.READY, began.key)
    assert ready.took_s > 0
    story: Story = gcs.call("GET", f"/v1/story/{cluster.job_id}", reply=Story)
    told = [line.text for line in story.lines if line.kind.startswith("environment.")]
    texts = [text for text in told if "setup" in text]  # another test's may come first
    assert texts[0] == f"node {cluster.node_id} installs setup for job {cluster.job_id}"
    assert "has installed setup" in texts[1]


def test_one_that_fails_says_why_without_passwords(cluster: ClusterInfo, gcs: HttpClient) -> None:
    where = "https://me:secret@127.0.0.1:1/none-1.0-py3-none-any.whl"
    env = {"pip": [where]}
    ref = stoker.remote(runtime_env=env, max_retries=0)(abs).remote(1)
    with pytest.raises(RuntimeEnvSetupError, match="pip install"):
        stoker.get(ref, timeout=WAIT_S)
    what = f"pip ({where.replace('me:secret@', '...@')})"
    # A lease that a busy machine asked for again builds again: of failures nothing is kept.
    _, failed, *_ = until(lambda: ended(gcs, what), WAIT_S, "the build ended")
    assert failed.state is BuildState.FAILED
    assert "pip install" in failed.message
    assert "secret" not in failed.message
