"""The state that an actor saves: what passes is waited for, what is final is raised."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.exceptions import ObjectLostError
from stoker.runtime.worker.actor_state import saved_state
from stoker.runtime.worker.actor_state.saved_state import SavedState
from stoker_wire.errors import (
    DeadlineExceededError,
    NodeDiedError,
    ObjectNodeDiedError,
    StokerError,
    UnauthorizedError,
    UnavailableError,
)
from stoker_wire.messages.cluster import ActorSpec
from stoker_wire.messages.work import Actor, ActorState


class Cluster:
    """Stands for the io thread, the gcs and the objects; raises ``errors``, one at each use."""

    def __init__(self, *errors: StokerError, state: str = "o_1") -> None:
        self.errors = list(errors)
        self.detached = self
        self.state = state
        self.stored: list[Any] = []

    def run(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run(coroutine)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    async def call(self, method: str, path: str, *args: Any, **more: Any) -> Any:
        self._fail()
        return Actor(
            actor_id="a_1",
            job_id="j",
            class_name="C",
            state=ActorState.RESTARTING,
            state_object=self.state,
        )

    def import_ref(self, object_id: str) -> str:
        return object_id

    def get(self, refs: list[str], timeout_s: float) -> list[str]:
        self._fail()
        return [f"state of {one}" for one in refs]

    def packed(self, state: Any) -> Any:
        return state

    def store(self, object_id: str, packed: Any, value: Any, **more: Any) -> None:
        self._fail()
        self.stored.append(value)

    def free(self, object_id: str) -> None:
        return


def state_of(cluster: Cluster, incarnation: int = 1) -> SavedState:
    spec = ActorSpec(actor_id="a_1", incarnation=incarnation, class_name="C", payload=b"")
    parts: Any = cluster
    return SavedState(spec, parts, parts, parts)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_state, "_AGAIN_S", 0.0)


def test_a_failure_that_passes_does_not_keep_a_state_from_being_read() -> None:
    cluster = Cluster(
        UnavailableError("the gcs is away"),
        DeadlineExceededError("it is slow"),
        NodeDiedError("its node died"),
        ObjectNodeDiedError("its node died as it was read"),
    )
    assert state_of(cluster).load() == ("state of o_1",)
    assert cluster.errors == []


def test_there_is_no_state_before_the_first_restart_or_the_first_save() -> None:
    assert state_of(Cluster(UnavailableError("unused")), incarnation=0).load() == ()
    assert state_of(Cluster(state="")).load() == ()


@pytest.mark.parametrize("error", [ObjectLostError("gone"), UnauthorizedError("no")])
def test_what_does_not_pass_is_raised_at_once(error: StokerError) -> None:
    cluster = Cluster(error, error)
    with pytest.raises(type(error)):
        state_of(cluster).load()
    assert len(cluster.errors) == 1


def test_the_wait_for_a_state_has_an_end_that_is_not_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_state, "_READ_S", -1.0)
    lost = ObjectNodeDiedError("its node died")
    with pytest.raises(UnavailableError, match="could not be read"):
        state_of(Cluster(lost)).load()


def test_a_store_that_insists_waits_for_the_gcs_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(UnavailableError("away"), UnavailableError("still away"))
    state_of(cluster).store(7, insists=True)
    assert cluster.stored == [7]
    assert [one.getMessage() for one in caplog.records] == [
        "the calls of actor C (a_1) wait until its state is saved: UnavailableError: away."
    ]


def test_a_store_that_does_not_insist_raises() -> None:
    cluster = Cluster(UnavailableError("away"))
    with pytest.raises(UnavailableError):
        state_of(cluster).store(7, insists=False)
