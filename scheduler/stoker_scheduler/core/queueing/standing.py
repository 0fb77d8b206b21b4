"""The standing of a queue: what it has, borrows and lends, who waits in it, in what order and for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.resources import Units, add, units_text
from stoker_scheduler.core.queueing.queue import PendingRequest
from stoker_scheduler.core.queueing.tenants import Hold

if TYPE_CHECKING:
    from stoker_scheduler.core.state import State


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of a queue, with those below it.

    ``borrowed`` is what it has beyond its quota, ``lent`` what of its quota others use: what it neither has
    nor finds free. ``waiting`` are in its order, each with the limit that holds it, if one does.
    """

    spec: QueueSpec
    used: Units
    borrowed: Units
    lent: Units
    waiting: tuple[tuple[PendingRequest, Hold | None], ...]

    @property
    def holds(self) -> tuple[Hold, ...]:
        """The limits that hold some of what waits, the first that waits first."""
        return tuple({hold.text: hold for _, hold in self.waiting if hold is not None}.values())

    @property
    def text(self) -> str:
        """The standing in a sentence."""
        spec, parts = self.spec, [f"queue {self.spec.name!r} has {units_text(self.used.items())}"]
        if spec.quota:
            parts.append(f"its quota is {units_text(spec.quota.items())}")
        if self.borrowed:
            parts.append(f"it borrows {units_text(self.borrowed.items())}")
        if self.lent:
            parts.append(f"it has lent {units_text(self.lent.items())}")
        count = len(self.waiting)
        parts.append(f"{count} request waits" if count == 1 else f"{count} requests wait")
        return "; ".join(parts)


def standing(state: State, name: str) -> Standing:
    """Return how queue ``name``, which is known, stands now."""
    tenants = state.tenants
    spec = tenants.path(name)[0].spec
    used: Units = {}
    for account, units in state.usage.items():
        if name in tenants.names_above(account.queue):
            add(used, units.items())
    free: Units = {}
    for node in state.nodes.values():
        add(free, node.available_units.items())
    borrowed = {n: used.get(n, 0) - quota for n, quota in spec.quota.items()}
    unused = {n: quota - used.get(n, 0) for n, quota in spec.quota.items()}
    lent = {n: units - max(0, free.get(n, 0)) for n, units in unused.items() if units > 0}
    waiting = [
        pending
        for pending in state.queue.pending()
        if name in tenants.names_above(pending.account.queue)
    ]
    order, aging_s = tenants.policy(name), state.policy.aging_s
    waiting.sort(key=lambda p: (order(p, state.share(p.account), state.at_s, aging_s), p.seq))
    held = state.queue.held
    return Standing(
        spec=spec,
        used=used,
        borrowed={n: units for n, units in borrowed.items() if units > 0},
        lent={n: units for n, units in lent.items() if units > 0},
        waiting=tuple((p, held.get(p.requirements, {}).get(p.account)) for p in waiting),
    )
