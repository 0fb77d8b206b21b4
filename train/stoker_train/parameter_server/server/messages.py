"""The messages between clients and servers, beside arrays of keys, rows and gradients.

Pickled as structs with their arrays out of band, so a message is some hundred bytes and its arrays.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker_train.parameter_server.storage.spec import TableSpec

_EPOCH_BITS = 20


class Part(msgspec.Struct, frozen=True):
    """Rows of one table for one server: ``keys`` (None for a dense table) and their values."""

    spec: TableSpec
    keys: NDArray[np.int64] | None
    values: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.values.nbytes + (0 if self.keys is None else self.keys.nbytes)


class Moved(msgspec.Struct, frozen=True):
    """The answer of a server whose rows are with others now: nothing was changed, ask those."""


class Sequence(msgspec.Struct, frozen=True):
    """The number of a push: by it a server knows one that it has applied already."""

    client: str
    number: int
    """Grows by one with each push, or step, of the client."""
    epoch: int
    """Which set of servers it was sent to: what these passed on is sent again under the next."""
    owner: int = 0
    """Grows with each process that is the worker of this rank: one of before is refused."""

    @property
    def order(self) -> int:
        """Grows with both."""
        return (self.number << _EPOCH_BITS) | self.epoch

    @staticmethod
    def number_of(order: int) -> int:
        """Return the number in an ``order``."""
        return order >> _EPOCH_BITS
