"""``stoker.ps``: parameter servers, for tables that are larger than one process or mostly not touched.

::

    ps = stoker.ps.start(servers=2)
    table = ps.sparse("emb", width=64, optimizer=stoker.ps.Adagrad(lr=0.1))

    worker = ps.worker(rank, world, mode="async", staleness=4)    # in each task that trains
    rows = worker.pull(table, keys)
    worker.push(table, keys, gradients)
    worker.step()

Servers are actors: they restart with what they saved, and rows spread anew when there are more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_train.parameter_server.client.group import ParameterServers, connect, start
from stoker_train.parameter_server.client.tables import DenseTable, SparseTable
from stoker_train.parameter_server.client.worker import Mode, Worker
from stoker_train.parameter_server.errors import (
    ParameterServerError,
    ServerLostError,
    ServerTimeoutError,
    WorkerTimeoutError,
)
from stoker_train.parameter_server.shared import SharedArray, shared
from stoker_train.parameter_server.storage.initializers import Normal, Uniform, Zeros
from stoker_train.parameter_server.storage.optimizers import SGD, Adagrad, Adam

if TYPE_CHECKING:
    from stoker_train.parameter_server.embedding import Embedding

__all__ = (
    "SGD",
    "Adagrad",
    "Adam",
    "DenseTable",
    "Embedding",
    "Mode",
    "Normal",
    "ParameterServerError",
    "ParameterServers",
    "ServerLostError",
    "ServerTimeoutError",
    "SharedArray",
    "SparseTable",
    "Uniform",
    "Worker",
    "WorkerTimeoutError",
    "Zeros",
    "connect",
    "shared",
    "start",
)


def __getattr__(name: str) -> Any:
    if name == "Embedding":  # it imports torch
        from stoker_train.parameter_server.embedding import Embedding

        return Embedding
    raise AttributeError(f"module 'stoker.ps' has no attribute {name!r}")
