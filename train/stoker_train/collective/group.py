"""A group: the collectives of its members, their process sets, and its end.

Made by :mod:`stoker_train.collective.joining`. It puts together lanes, supervisor and store; each has its own
module.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker_train.collective.channel import Backend, Channel, TransportError
from stoker_train.collective.communicator import Communicator
from stoker_train.collective.errors import Failure
from stoker_train.collective.headers import Call
from stoker_train.collective.lane import Lane, Peers
from stoker_train.collective.lending.table import Lent
from stoker_train.collective.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import Store  # type: ignore[attr-defined]

    from stoker_train.collective.members import Member
    from stoker_train.collective.supervisor import Supervisor

_CLOSE_S = 5.0
_TRANSPORT_SLACK_S = 10.0
"""How much later than the supervisor torch itself gives up: the supervisor knows more."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a group; see :func:`~stoker_train.collective.joining.join`."""

    backend: Backend
    timeout_s: float = 60.0
    join_timeout_s: float = 60.0
    stall_s: float = 30.0
    check: bool = True


class Group(Communicator):
    """A group as one of its members has it. For any thread; calls of one communicator keep their order."""

    def __init__(
        self,
        name: str,
        rank: int,
        members: dict[int, Member],
        store: Store,
        supervisor: Supervisor,
        options: Options,
        attempt: int | str = 0,
    ) -> None:
        self.attempt = attempt
        """Which attempt to form a group of this name it came of."""
        self._store: Store | None = store
        self._supervisor = supervisor
        self._options = options
        self._members = members
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._sets: dict[tuple[int, ...], int] = {}
        self._timeline: Timeline | None = None
        self._drawn: list[Communicator] = [self]
        ranks = tuple(range(len(members)))
        lane = self._lane_of("", ranks)
        super().__init__(name, ranks, rank, lane, Peers(self._lane_of))
        supervisor.on_failure(self._drop_store)
        self.lent = Lent(rank, self._lane_of, supervisor.tell)
        """What this member lends to others, and its way to what they lend."""
        supervisor.on_request(self.lent.take)

    @property
    def backend(self) -> str:
        """``"gloo"`` or ``"nccl"``."""
        return self._options.backend.value

    @property
    def group_id(self) -> str:
        """The id of this one group: another of the same name has another."""
        return self._supervisor.group_id

    @property
    def members(self) -> dict[int, Member]:
        """The members by rank: actor, node, process."""
        return dict(self._members)

    def connect(self) -> None:
        """Connect the members; returns once all are."""
        self._connect_lane(self._own_lane())

    def process_set(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some members, in this order of rank; all of them have to ask for it.

        Others may ask as well: what they get says that they are not :meth:`included`. Sets with no member in
        common work at the same time. They live as long as the group, and fail with it.
        """
        wanted = tuple(ranks)
        if not wanted or len(set(wanted)) != len(wanted):
            raise BadRequestError(
                f"a process set of {list(ranks)} is none\ngive one rank or more, each once",
                field="ranks",
            )
        for one in wanted:
            self._check_rank(one, "ranks")
        label = f"set {','.join(map(str, wanted))}"
        if self.rank not in wanted:
            return Communicator(label, wanted, -1, None, None)
        self._supervisor.check()
        with self._lock:
            number = self._sets[wanted] = self._sets.get(wanted, 0) + 1
        if number > 1:
            label = f"{label} ({number})"
        lane = self._lane_of(label, wanted)
        found = Communicator(label, wanted, wanted.index(self.rank), lane, None)
        self._connect_lane(lane)
        with self._lock:
            found.draw(self._timeline)
            self._drawn.append(found)
        return found

    def abort(self, reason: str) -> None:
        """Fail the group: pending and later calls of all members raise CollectiveError with ``reason``."""
        text = f"group {self.name!r} was aborted by rank {self.rank}\n{reason}"
        self._supervisor.fail(Failure(code="collective_failed", text=text, ranks=(self.rank,)))

    def failed(self) -> bool:
        """Return whether the group is over."""
        return self._supervisor.failure is not None

    def stalled(self) -> list[str]:
        """Return what this member waits for, a text for each operation that runs.

        It names who had not come when the members were last asked: after half of ``stall_s``.
        """
        return self._supervisor.stalled()

    def start_timeline(self, path: str | Path) -> None:
        """Write this member's calls to ``path``, in Chrome's trace format; ``{rank}`` in it is the rank."""
        timeline = Timeline(path, self.rank, f"group {self.name!r}")
        with self._lock:
            before, self._timeline = self._timeline, timeline
            for one in self._drawn:
                one.draw(timeline)
        if before is not None:
            before.close()

    def stop_timeline(self) -> None:
        """Complete the file of :meth:`start_timeline`; nothing happens if there is none."""
        with self._lock:
            before, self._timeline = self._timeline, None
            for one in self._drawn:
                one.draw(None)
        if before is not None:
            before.close()

    def destroy(self) -> None:
        """Leave the group, once the calls of this member have ended, or a few seconds are over.

        The others leave by themselves; one that waits for this member is told.
        """
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        if not self.failed():
            until_s = time.monotonic() + _CLOSE_S
            for lane in lanes:
                lane.join(max(0.0, until_s - time.monotonic()))
        self._supervisor.leave(_CLOSE_S)
        left = Failure(code="collective_failed", text=f"this process has left group {self.name!r}")
        for lane in lanes:
            lane.fail(left)  # what did not end in time
        self.stop_timeline()
        self._drop_store()

    def _lane_of(self, label: str, ranks: tuple[int, ...]) -> Lane:
        own = self._supervisor.rank
        lane = Lane(
            label,
            ranks,
            functools.partial(_connect, self, label, ranks.index(own), len(ranks)),
            self._supervisor,
            timeout_s=self._options.timeout_s,
            check=self._options.check,
        )
        with self._lock:
            self._lanes.append(lane)
        self._supervisor.add(lane)
        return lane

    def _connect_lane(self, lane: Lane) -> None:
        limit_s = self._options.join_timeout_s
        lane.submit(Call("connect"), lambda channel: channel.barrier(), limit_s=limit_s).wait()

    def _drop_store(self) -> None:
        with self._lock:
            self._store = None


def _connect(group: Group, label: str, rank: int, size: int) -> Channel:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store, options = group._store, group._options
    if store is None:
        raise TransportError("the group has failed")
    limit_s = max(options.timeout_s, options.join_timeout_s) + _TRANSPORT_SLACK_S
    try:
        own = PrefixStore(f"lane/{label}", _own_connection(store))
        return Channel(options.backend, own, rank, size, limit_s)
    except RuntimeError as error:
        text = str(error).strip().partition("\n")[0]
    raise TransportError(text)


def _own_connection(store: Any) -> Any:
    """Return a store of a lane's own.

    On one connection, two lanes that each wait for the other member would keep each other from telling it.
    """
    clone = getattr(store, "clone", None)  # since torch 2.8
    return store if clone is None else clone()
