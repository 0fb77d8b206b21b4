"""The scheduler's word as events: offers that come and go, replicas that were lost or taken.

A thread follows the job's session with the scheduler and puts events into the controller's queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ConflictError, StokerError
from stoker.train.elastic import Generation, Session
from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.membership import Slot
from stoker_wire.messages.elastic import Replica

if TYPE_CHECKING:
    from stoker_wire.messages.elastic import ElasticState, Offer

__all__ = ("Offers",)

_log = logging.getLogger(__name__)
_WAIT_S = 0.5
_MAX_NAMED = 80
"""Nodes in a filter, which may have 4,096 characters: some 115 names."""


class Offers:
    """The offers of one session. ``put`` takes events from the thread that follows it."""

    def __init__(self, session: Session, put: Callable[[Any], None]) -> None:
        self._session, self._put = session, put
        self._lock = threading.Lock()
        self._accepted: tuple[Replica, ...] = ()
        self._open: dict[int, Offer] = {}
        self._told = 0
        self._ended = False
        self._thread = threading.Thread(target=self._follow, name="offers", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Follow no more."""
        self._ended = True

    def accept(self, number: int) -> bool:
        """Accept an offer; False if it is void by now."""
        with self._lock:
            offer = self._open.get(number)
            if offer is None:
                return False
            try:
                self._session.accept(Generation(number, offer.replicas, {}))
            except ConflictError as error:
                del self._open[number]
                _log.info("offer %d is void: %s", number, error)
                return False
            del self._open[number]
            self._accepted = offer.replicas
            return True

    def _follow(self) -> None:
        seen = 0
        while not self._ended:
            try:
                state = self._session.wait_for_change(seen, _WAIT_S)
            except StokerError as error:
                if not self._ended:
                    self._put(error)
                return
            if state.version != seen:
                seen = state.version
                self._tell(state)

    def _tell(self, state: ElasticState) -> None:
        now_s, wall_s = time.monotonic(), time.time()
        with self._lock:
            state = (
                self._session.state
            )  # an answer to an offer may have changed it since it was read
            offer = state.offer
            if offer is None and self._told in self._open:
                del self._open[self._told]
                self._put(ev.Withdrawn(now_s, self._told))
            lost = set(self._accepted) - set(state.replicas)
            taken = state.generation == 0 or set(state.replicas) < set(self._accepted)
            if lost and taken:
                self._accepted = state.replicas
                self._put(ev.Granted(now_s, slots_of(state.replicas)))
            if offer is not None and offer.generation > self._told:
                self._told = offer.generation
                self._open[offer.generation] = offer
                by_s = now_s + offer.answer_by_s - wall_s
                self._put(
                    ev.Offered(
                        now_s, offer.generation, slots_of(offer.replicas), offer.withdraws, by_s
                    )
                )


def slots_of(replicas: Iterable[Replica]) -> tuple[Slot, ...]:
    """Return the places of replicas as the machine knows them."""
    return tuple(Slot(one.group_id, one.bundle, one.node_id) for one in replicas)


def replicas_of(slots: Iterable[Slot]) -> tuple[Replica, ...]:
    """Return the machine's slots as places of replicas."""
    return tuple(
        Replica(group_id=one.group_id, bundle=one.bundle, node_id=one.node_id) for one in slots
    )


def node_filter_without(nodes: Iterable[str]) -> str:
    """Return a filter that keeps nodes out of offers; of very many it names the first by their ids."""
    names = ", ".join(f"'{one}'" for one in sorted(nodes)[:_MAX_NAMED])
    return f"node_id not in ({names})" if names else ""
