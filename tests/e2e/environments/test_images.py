"""Images on a node that has no engine for them; tests/engine has those of a node that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import RuntimeEnvSetupError
from tests.e2e._cluster import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 90.0
NO_ENGINE = r"this node has no 'no-such-engine'\.\nput docker or podman on the PATH"


@pytest.fixture(scope="module", autouse=True)
def _job_in_an_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CONTAINER_ENGINE", "no-such-engine")
        folder = tmp_path_factory.mktemp("sessions")
        with embedded(folder, num_cpus=2, runtime_env={"image_uri": "x/y:1"}):
            yield


def task(**env: Any) -> Any:
    return stoker.remote(runtime_env=env, max_retries=0)(abs)


def test_tasks_and_actors_are_in_the_image_of_their_job() -> None:
    with pytest.raises(RuntimeEnvSetupError, match=NO_ENGINE):
        stoker.get(task(env_vars={"A": "1"}).remote(-1), timeout=WAIT_S)

    @stoker.remote
    class Actor:
        def value(self) -> int:
            return 1

    with pytest.raises(stoker.exceptions.ActorDiedError, match="this node has no 'no-such-engine'"):
        stoker.get(Actor.remote().value.remote(), timeout=WAIT_S)


def test_what_the_node_does_for_one_task_is_not_done_in_the_image_of_its_job() -> None:
    assert stoker.get(task(pip=["msgspec"]).remote(-1), timeout=WAIT_S) == 1
    with pytest.raises(RuntimeEnvSetupError, match=r"runtime_env\.setup: it is not done in images"):
        stoker.get(task(setup="true").remote(-1), timeout=WAIT_S)
