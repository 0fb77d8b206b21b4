"""Values and where they lie: a value on another machine is fetched within the time that is left."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stoker.exceptions import GetTimeoutError, ObjectLostError
from stoker.runtime.objects.values import ValueStore
from stoker_wire.errors import DeadlineExceededError
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
