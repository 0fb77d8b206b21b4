"""The records of a job in a world: its ledger behind the fence, and controllers that come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_train.elastic.core.ledger import Entry, Ledger, decode
from stoker_train.elastic.fence import INDEX, FencedLedger, decode_index, read
from stoker_wire.errors import FencedError

if TYPE_CHECKING:
    from tests.sim.training.world import World


class Keys:
    """A store of :mod:`stoker_train.elastic.fence`: raw values in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def put(self, name: str, data: bytes, *, over: bytes | None) -> bool:
        if self.values.get(name) != over:
            return False
        self.values[name] = data
        return True

    def put_new(self, name: str, data: bytes) -> None:
        assert name not in self.values, f"{name} is written twice"
        self.values[name] = data

    def delete(self, name: str) -> None:
        self.values.pop(name, None)

    def entries(self) -> tuple[Entry, ...]:
        """Return the ledger that they are."""
        return tuple(decode(read(self.get, decode_index(self.get(INDEX)))).entries)


class Records:
    """The ledger in the KV, of which ``written`` is what must be there."""

    def __init__(self, world: World) -> None:
        self.world, self.keys = world, Keys()
        self.written: tuple[Entry, ...] = ()
        self._writer: FencedLedger | None = None
        self._past: list[tuple[FencedLedger, Ledger]] = []
        """Controllers that are taken for dead, and are not, with what they think is the ledger."""

    def take(self, attempt: int) -> Ledger:
        """Take the ledger over for the next controller, and return it."""
        self._writer = FencedLedger(self.keys, attempt)
        ledger = decode(self._writer.take())
        if tuple(ledger.entries) != self.written:
            self.world.breaks("the ledger in the KV is not what the controller before has written")
        for _ in self._past:
            self.world.later(self.world.random.uniform(0.0, 20.0), self._come_back)
        return ledger

    def keep(self, ledger: Ledger) -> None:
        """Write what has changed."""
        assert self._writer is not None
        self._writer.write(ledger.changes())
        self.written = tuple(ledger.entries)

    def suspect(self, ledger: Ledger) -> None:
        """Take the controller for dead, which perhaps comes back; ``ledger`` is what it has."""
        if self._writer is not None and self.world.random.random() < 0.5:
            self._past.append((self._writer, Ledger(ledger.entries, ledger.head)))

    def _come_back(self) -> None:
        """Have one that is past go on: it trains, as it thinks, and writes what it believes."""
        # The newest may write until another has taken over.
        past = [one for one in self._past if one[0] is not self._writer]
        writer, ledger = self.world.random.choice(past)
        ledger.truncate(ledger.next_step - self.world.random.choice([0, 1, 5]))
        ledger.extend([Entry(99, ledger.next_step, 0, 1, 10_000, 1, 0.1)])
        try:
            writer.write(ledger.changes())
        except FencedError:
            self.world.outcome.faults["fenced"] += 1
        if self.keys.entries() != self.written:
            self.world.breaks("a controller that is past has written into the ledger")
