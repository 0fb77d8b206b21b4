"""Values and where they lie: a value on another machine is fetched within the time that is left."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker.exceptions import GetTimeoutError, ObjectLostError
from stoker.runtime.objects import values as values_module
from stoker.runtime.objects.values import ValueStore
from stoker.runtime.serialization.pickling import Packed
from stoker_wire.errors import ArenaFullError, DeadlineExceededError
from stoker_wire.messages.data import Stored


class FarAway:
    """Stands for a node whose memory is not ours and that is silent, and for all that leads to it."""

    def __init__(self) -> None:
        self.node = self
        self.url = "http://near:1"
        self.asked: list[tuple[str, float]] = []

    def arena_of(self, node_id: str) -> None:
        return None

    def read(self, object_id: str) -> None:
        raise ObjectLostError("not in this arena")

    def client_of(self, url: str) -> FarAway:
        return self

    def call(
        self, method: str, path: str, body: Any, *, reply: Any, timeout_s: float, retry: bool
    ) -> str:
        return path

    def run(self, work: str, timeout_s: float) -> None:
        self.asked.append((work, timeout_s))
        raise DeadlineExceededError("a call passed its deadline")


def test_a_get_with_a_timeout_bounds_the_fetch_and_names_the_node() -> None:
    far = cast("Any", FarAway())
    values = ValueStore(far, far, far, far, far, far, inline_max_bytes=1)
    place = Stored(5_000_000, "n_far", "http://far:1", (), "o_1")
    with pytest.raises(GetTimeoutError, match=r"(?s)o_1 .*5000000 bytes .* node n_far"):
        values.load(place, "o_1", 0.25)
    [(path, timeout_s)] = far.asked
    assert path == "/v1/objects/o_1/pull"
    assert 0 < timeout_s <= 0.25


class CrowdedNode(FarAway):
    """Stands for a node that makes room, which others are always faster to take; it has a disk."""

    job_id = peer_id = "p_1"
    node_id = "n_1"

    def is_current(self) -> bool:
        return False

    def wake(self) -> None:
        return

    def run(self, work: Any, timeout_s: float) -> None:
        work.close()
        self.asked.append(("room", timeout_s))

    def write(self, *_: object) -> int:
        raise ArenaFullError("no room")

    def write_to_disk(self, object_id: str, *_: object) -> int:
        return 77


def test_a_writer_that_others_keep_from_memory_takes_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None, time=float)
    monkeypatch.setattr(values_module, "time", clock)
    monkeypatch.setattr(values_module, "_PATIENCE_S", 3)
    crowded = cast("Any", CrowdedNode())
    values = ValueStore(crowded, crowded, crowded, crowded, crowded, crowded, inline_max_bytes=1)
    place = values.store_result("o_1", Packed(bytes(100), [], []), "p_1")
    assert isinstance(place, Stored) and place.nbytes == 77
    assert len(crowded.asked) > 1
