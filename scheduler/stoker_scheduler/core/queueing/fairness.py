"""Fair shares: which accounts have more of the cluster than they can claim, and which less.

One look, before leases in use are preempted. What one account takes from another of its queue is a matter
of their own shares; across queues, of those of the queues where their paths part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stoker_scheduler.core.queueing.tenants import dominant_share

if TYPE_CHECKING:
    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.queues import Account
    from stoker_scheduler.core.state import State

_ROUNDING = 1e-9


class FairShares:
    """The shares of accounts and queues, and what they are entitled to, as preemption goes on."""

    __slots__ = ("_account_shares", "_capacity", "_entitled", "_queue_shares", "_tenants")

    def __init__(self, state: State) -> None:
        self._tenants = state.tenants
        self._capacity = state.capacity
        self._entitled = state.tenants.entitlements({**state.queue.accounts, **state.usage})
        self._account_shares = {account: state.share(account) for account in state.usage}
        self._queue_shares = state.tenants.shares()

    def copy(self) -> FairShares:
        """Return an independent copy, to try what could be taken."""
        twin = FairShares.__new__(FairShares)
        twin._tenants, twin._capacity, twin._entitled = (
            self._tenants,
            self._capacity,
            self._entitled,
        )
        twin._account_shares = dict(self._account_shares)
        twin._queue_shares = dict(self._queue_shares)
        return twin

    def poorest(self, accounts: Iterable[Account]) -> Account:
        """Return the account that has least of what it is entitled to."""
        return min(accounts, key=self._filled)

    def _filled(self, account: Account) -> float:
        entitled = self._entitled.of_account[account]
        return self._account_shares.get(account, 0.0) / entitled if entitled else math.inf

    def missing(self, account: Account, lease_share: float, coming: int) -> int:
        """Return how many leases of ``lease_share`` the account can claim besides those ``coming``."""
        entitled = self._entitled.of_account[account]
        own_share = self._account_shares.get(account, 0.0)
        if not lease_share:
            return 0 if own_share else 1
        if own_share + coming * lease_share > 0:
            return int((entitled - own_share) / lease_share + _ROUNDING) - coming
        return max(1, int(entitled / lease_share + _ROUNDING))

    def excess(self) -> dict[Account, None]:
        """Return the accounts that something may be taken of: those, or whose queues, have too much."""
        of_account, of_queue = self._entitled.of_account, self._entitled.of_queue
        queues = [
            name
            for name, share in self._queue_shares.items()
            if self._is_beyond(share, of_queue.get(name, 0.0))
        ]
        return {
            account: None
            for account, share in self._account_shares.items()
            if self._is_beyond(share, of_account[account])
            or any(name in queues for name in self._tenants.names_above(account.queue))
        }

    def may_take(self, account: Account, lease: LeaseState) -> bool:
        """Return whether ``account`` can claim the lease of another that has more than its share."""
        other = lease.account
        if other == account or not lease.charged:
            return False
        if other.queue == account.queue:
            return self._is_beyond(
                self._account_shares.get(other, 0.0), self._entitled.of_account.get(other, 0.0)
            )
        if lease.in_bundle:
            return False  # it takes nothing of its queue: the placement group has taken it
        mine, theirs = self._parting(account, other)
        if mine and self._is_beyond(
            self._queue_shares.get(mine, 0.0) + self._share_of(lease), self._entitled.of_queue[mine]
        ):
            return False
        return not theirs or self._is_beyond(
            self._queue_shares.get(theirs, 0.0), self._entitled.of_queue.get(theirs, 0.0)
        )

    def may_force(self, account: Account, lease: LeaseState, wanted_share: float) -> bool:
        """Return whether ``account`` may have the lease ended for ``wanted_share`` more that it wants.

        It must not have too much then: what it gets could be claimed back, and so on for ever.
        """
        other = lease.account
        if other.queue == account.queue:
            share = self._account_shares.get(account, 0.0) + wanted_share
            return not self._is_beyond(share, self._entitled.of_account[account])
        name, _ = self._parting(account, other)
        return not name or not self._is_beyond(
            self._queue_shares.get(name, 0.0) + wanted_share, self._entitled.of_queue[name]
        )

    def took(self, account: Account, lease: LeaseState) -> None:
        """Count a lease that is preempted for ``account``."""
        if not lease.charged:
            return
        share = self._share_of(lease)
        known = self._account_shares.get(lease.account, 0.0)
        self._account_shares[lease.account] = known - share
        for name, sign in ((account.queue, 1), (lease.account.queue, -1)):
            for above in self._tenants.names_above(name):
                self._queue_shares[above] = self._queue_shares.get(above, 0.0) + sign * share

    def _parting(self, account: Account, other: Account) -> tuple[str, str]:
        """Return the highest queues of two accounts that differ; '' for an account right in the other's."""
        mine = self._tenants.names_above(account.queue)[::-1]
        theirs = self._tenants.names_above(other.queue)[::-1]
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return a, b
        common = min(len(mine), len(theirs))
        return "".join(mine[common : common + 1]), "".join(theirs[common : common + 1])

    def _share_of(self, lease: LeaseState) -> float:
        return dominant_share(dict(lease.charged), self._capacity)

    @staticmethod
    def _is_beyond(share: float, entitled: float) -> bool:
        return share > entitled + _ROUNDING
