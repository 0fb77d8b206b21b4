"""The members of a run of ``stoker launch``: named by its driver, obeyed by the rendezvous of its agents.

The driver numbers the sets of members, and writes each to a key of its own, so that one long poll hears of
the next at once. An agent forms a rendezvous of torch for each number, of just so many nodes: nobody waits
for a last call or for the heartbeats of the dead. A number that is superseded is fenced: what still
waits in it gets an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from stoker.exceptions import StokerError
from stoker_train.launch.backend import NAME, dynamic_handler
from stoker_train.launch.spec import Members, members_key
from stoker_train.launch.store import KVStore

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

    from stoker_train.launch.kv_line import KvLine

_log = logging.getLogger(__name__)
_POLL_S = 20.0
_PAUSE_S = 0.5
_FENCE_S = 1.0
_READ_S = 300
_HEARTBEAT = {"keep_alive_interval": 5, "keep_alive_max_attempt": 12}
"""The driver sees who dies, so heartbeats need not be fast."""


class LeftError(Exception):
    """This agent is not among the members any longer: it ends, and nothing is wrong."""


class MembersWatch:
    """The newest set of members, kept up to date by a thread until :meth:`close`."""

    def __init__(self, line: KvLine, run_id: str) -> None:
        self._line = line
        self._run_id = run_id
        self._newest = Members(0, ())
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="stoker-members", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Members:
        """The newest set; number 0, of nobody, before the first."""
        return self._newest

    def wait_beyond(self, number: int, timeout_s: float) -> Members | None:
        """Return the newest set once its number is above ``number``; None after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest.number > number, timeout_s)
            return self._newest if self._newest.number > number else None

    def close(self) -> None:
        """Stop following; a poll under way ends by itself."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            key = members_key(self._run_id, self._newest.number + 1)
            try:
                item = self._line.read([key], _POLL_S).get(key)
            except StokerError as error:
                if not self._closed.is_set():
                    _log.warning("the members of the run are not heard of: %s", error)
                self._closed.wait(_PAUSE_S)
                continue
            if item is not None:
                with self._changed:
                    self._newest = msgspec.json.decode(item.value, type=Members)
                    self._changed.notify_all()


class _FencedStore(KVStore):
    """The store of one number: no wait outlives it."""

    def __init__(self, *args: Any, check: Callable[[], object], **kwargs: Any) -> None:
        self._check = check
        super().__init__(*args, poll_s=_FENCE_S, **kwargs)

    def clone(self) -> KVStore:
        return _FencedStore(
            self._prefix, self._limit, check=self._check, ttl_s=self._ttl_s, line=self._line
        )

    def _check_lives(self) -> None:
        try:
            self._check()
        except RendezvousClosedError as error:
            raise dist.DistStoreError(f"nothing more is set here: {error}") from error


class MembersRendezvous(RendezvousHandler):
    """The rendezvous of the agent ``member``: of each number one of torch, until that is superseded.

    ``LeftError`` where the newest set is without it; ``RendezvousTimeoutError`` after ``join_s``.
    """

    def __init__(
        self, line: KvLine, run_id: str, member: str, local_addr: str, join_s: float
    ) -> None:
        self._line = line
        self._run_id = run_id
        self._member = member
        self._local_addr = local_addr
        self._join_s = join_s
        self._watch = MembersWatch(line, run_id)
        self._members = Members(0, ())
        self._inner: RendezvousHandler | None = None

    @property
    def members(self) -> Members:
        """The set that this agent is in, or was last."""
        return self._members

    @property
    def use_agent_store(self) -> bool:
        """As torch's own handler: workers use the store that the first agent serves."""
        return self._inner is None or self._inner.use_agent_store

    def wait_superseded(self, timeout_s: float) -> bool:
        """Return whether there is a newer set than its own, as soon as there is or ``timeout_s`` is over."""
        return self._watch.wait_beyond(self._members.number, timeout_s) is not None

    def get_backend(self) -> str:
        """Return ``stoker``."""
        return NAME

    def get_run_id(self) -> str:
        """Return the id of the run, the same in all its numbers."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all members of the next number are there."""
        deadline_s = time.monotonic() + self._join_s
        while True:
            self._inner = self._enter(deadline_s)
            try:
                return self._inner.next_rendezvous()
            except (RendezvousClosedError, RendezvousTimeoutError, dist.DistStoreError):
                if not self.wait_superseded(0.0):
                    raise

    def is_closed(self) -> bool:
        """Return False: the driver alone ends a run."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the driver alone ends a run."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if there is a newer number, so that torch's agent restarts its workers."""
        return int(self.wait_superseded(0.0))

    def shutdown(self) -> bool:
        """Stop following the run; its driver hears from the agent how it went."""
        self._watch.close()
        self._inner = None
        return True

    def _enter(self, deadline_s: float) -> RendezvousHandler:
        """Return torch's handler for the newest set, newer than that of last time.

        An agent that was in none yet waits for the first that it is in.
        """
        is_new = self._members.number == 0
        newest = self._members
        while newest.number == self._members.number or (
            is_new and self._member not in newest.members
        ):
            left_s = max(0.0, deadline_s - time.monotonic())
            found = self._watch.wait_beyond(newest.number, left_s)
            if found is None:
                raise RendezvousTimeoutError(
                    f"the driver of {self._run_id} did not name {self._member} within {self._join_s:g} s"
                )
            newest = found
        self._members, self._inner = newest, None
        if self._member not in newest.members:
            raise LeftError(f"{self._member} is not in number {newest.number} of {self._run_id}")

        def check() -> None:
            if self._watch.newest.number > newest.number:
                raise RendezvousClosedError(f"number {newest.number} of {self._run_id} is over")

        params = RendezvousParameters(
            backend=NAME,
            endpoint="",
            run_id=f"{self._run_id}.{newest.number}",
            min_nodes=len(newest.members),
            max_nodes=len(newest.members),
            local_addr=self._local_addr,
            join_timeout=max(1, int(self._join_s)),
            read_timeout=_READ_S,
            **_HEARTBEAT,
        )
        make_store = partial(_FencedStore, check=check)
        return dynamic_handler(self._line, params, check=check, make_store=make_store)
