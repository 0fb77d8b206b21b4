"""The end of a rendezvous: rank 0 waits for those that connect, and not for one that died meanwhile."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.exceptions import ConflictError, GetTimeoutError
from stoker.train import rendezvous
from stoker.train.rendezvous import Rendezvous
from tests.services import until

torch = pytest.importorskip("torch")
WAIT_S = 40.0


class Keys:
    """The KV, as far as the end of a rendezvous needs it."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def delete(self, key: str) -> None:
        self.deleted.append(key)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    runtime = SimpleNamespace(job=SimpleNamespace(job_id="job_1"))
    monkeypatch.setattr(rendezvous, "current", SimpleNamespace(runtime=lambda: runtime))
    made = Keys()
    monkeypatch.setattr(rendezvous, "kv", made)
    return made


@pytest.fixture
def store() -> Any:
    return torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S)
    )


def test_rank_0_waits_until_all_have_connected_and_removes_the_keys(keys: Keys, store: Any) -> None:
    ranks = [Rendezvous("g", rank, 3, timeout_s=WAIT_S) for rank in range(3)]
    first = threading.Thread(target=ranks[0].close, args=(store,))
    first.start()
    ranks[1].close(store.clone())
    assert not keys.deleted
    ranks[2].close(store.clone())
    first.join(WAIT_S)
    assert keys.deleted == [
        f"train/job_1/g/0/{end}" for end in ("rank/0", "rank/1", "rank/2", "store")
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_died_meanwhile_holds_nobody_once_its_group_is_given_up(
    keys: Keys, store: Any, waits: bool
) -> None:
    abandoned, errors = threading.Event(), []
    first = Rendezvous("g", 0, 3, timeout_s=3000.0, abandoned=abandoned)

    def close() -> None:
        try:
            first.close(store)
        except ConflictError as error:
            errors.append(str(error))

    if not waits:
        abandoned.set()
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    if waits:
        until(lambda: store.check(["stoker/met/0"]), WAIT_S, "rank 0 waits for the others")
        Rendezvous("g", 1, 3).close(store.clone())
        abandoned.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert errors and errors[0].startswith("group 'g' (attempt 0, 3 ranks) was given up")
    assert not keys.deleted, "what forms again looks for itself"


@pytest.mark.parametrize("abandoned", [None, threading.Event()])
def test_ranks_that_came_and_did_not_connect_are_named_at_the_deadline(
    keys: Keys, store: Any, abandoned: threading.Event | None
) -> None:
    first = Rendezvous("g", 0, 3, timeout_s=0.3, abandoned=abandoned)
    Rendezvous("g", 1, 3).close(store.clone())
    began_s = time.monotonic()
    with pytest.raises(GetTimeoutError, match=r"ranks \[2\] came, and did not connect") as caught:
        first.close(store)
    assert caught.value.extra["missing_ranks"] == [2]
    assert time.monotonic() - began_s >= 0.3


def test_a_group_whose_rendezvous_fails_at_its_end_is_left(
    keys: Keys, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Rendezvous, store: Any) -> None:
        raise GetTimeoutError("rank 1 did not come\nit has died")

    monkeypatch.setattr(Rendezvous, "open_store", lambda self: store)
    monkeypatch.setattr(Rendezvous, "close", fails)
    with pytest.raises(GetTimeoutError):
        rendezvous.init_process_group("g", 0, 1, backend="gloo", timeout_s=WAIT_S)
    assert not torch.distributed.is_initialized()
