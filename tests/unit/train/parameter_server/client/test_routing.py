"""Requests by several threads of one client, one of which finds that the servers are others now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_train.parameter_server import directory
from stoker_train.parameter_server.client import routing
from stoker_train.parameter_server.client.routing import Routing
from stoker_train.parameter_server.server.messages import Moved
from stoker_train.parameter_server.storage.spec import TableSpec

if TYPE_CHECKING:
    import pytest


class Server:
    """Server ``number`` of a set; ``pull`` is its method, and ``remote`` calls it at once."""

    def __init__(self, routing: Routing, epoch: int, number: int) -> None:
        self.routing, self.epoch, self.number = routing, epoch, number
        self.pull = self

    def remote(self, spec: TableSpec, keys: Any, create: bool) -> Any:
        if self.epoch == 2:
            return np.full((keys.size, 1), self.number, np.float32)
        self.routing.refresh()  # as another thread does
        return Moved()


def test_keys_that_were_split_for_servers_go_to_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows would be made, and stepped, on a server that nobody asks for them again."""
    records = iter(
        [directory.Record(epoch=1, servers=3), *[directory.Record(epoch=2, servers=2)] * 9]
    )
    client = Routing("t")
    monkeypatch.setattr(directory, "find", lambda _: next(records))
    monkeypatch.setattr(client, "_server", lambda epoch, number: Server(client, epoch, number))
    monkeypatch.setattr(routing, "get", lambda value, timeout: value)
    asked = client.route()
    client.refresh()
    keys = np.arange(50)
    moved = client.ask(dict.fromkeys(range(3), (TableSpec(name="s"), keys, True)), "pull", asked)
    assert moved == dict.fromkeys(range(3), Moved())
    assert set(client.pull(TableSpec(name="s"), keys).ravel()) == {0.0, 1.0}
