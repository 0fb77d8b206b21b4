"""Tenants: whose turn it is, who may not start more now, and what each can count on.

Queues form a tree whose root is the cluster. Three questions are answered here:

- :meth:`Tenants.order`: of the queues with work that fits, which is next? At each level of the tree,
  what stays within its quota goes before what borrows; then the queue with the smallest dominant share
  for its weight (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011), counting what it has now and
  what it had lately, the latter with a half-life (as Slurm's fair-share factor does).
- :meth:`Tenants.hold`: which limit keeps an account from starting one more lease?
- :meth:`Tenants.entitlements`: the part of the cluster that each active account and queue can claim from
  the others: its quota, and by its weight of what the quotas of active queues leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stoker_scheduler.core.model.queues import DEFAULT_QUEUE, Account, QueueSpec
from stoker_scheduler.core.model.resources import Units, add, amount_text
from stoker_scheduler.core.queueing.policies import POLICIES, Order, by_priority

Vector = tuple[tuple[str, int], ...]
Turn = tuple[tuple[bool, float], ...]
"""The sort key of a queue, the least first: level by level, whether it borrows, and its weighted share."""

UNLIMITED = 1 << 62
BURST_S = 1.0
"""Leases that a ``rate_limit`` would allow in this time may start at once."""


def dominant_share(used: Mapping[str, int], total: Mapping[str, int]) -> float:
    """Return the largest fraction of any one resource of the cluster that ``used`` is."""
    share = 0.0
    for name, units in used.items():
        has = total.get(name, 0)
        if has > 0:
            part = units / has
            if part > share:
                share = part
    return share


@dataclass(frozen=True, slots=True)
class Hold:
    """The limit that keeps work from starting; ``until_s`` is when time alone will end that."""

    queue: str
    limit: str
    """The field of :class:`QueueSpec`."""
    text: str
    remedy: str
    until_s: float = math.inf
    is_final: bool = False
    """Whether what is asked for is more than the limit by itself."""
    resource: str = ""
    needed: int = 0
    """The amount of ``resource`` that the limit would have to be."""


@dataclass(slots=True)
class _Queue:
    """A queue and what its work, with that of the queues below, has allocated."""

    spec: QueueSpec
    usage: Units = field(default_factory=dict)
    by_user: dict[str, Units] = field(default_factory=dict)
    by_job: dict[str, Units] = field(default_factory=dict)
    average: float = 0.0
    """Its dominant share, averaged over the past with exponentially falling weight."""
    average_at_s: float = 0.0
    next_start_s: dict[str, float] = field(default_factory=dict)
    """User -> when its next lease would start at exactly ``rate_limit``."""

    def settle(self, at_s: float, share: float, half_life_s: float) -> None:
        """Bring the average up to date; ``share`` is what it had since."""
        past_s = at_s - self.average_at_s
        if past_s > 0:
            kept = 0.5 ** (past_s / half_life_s)
            self.average = self.average * kept + share * (1 - kept)
            self.average_at_s = at_s


class Tenants:
    """The tree of queues; told of every allocation, asked before each."""

    __slots__ = ("_path", "_queues", "capacity", "half_life_s", "is_plain", "only_priority")

    def __init__(self, half_life_s: float = 3600.0) -> None:
        self.half_life_s = half_life_s
        self.capacity: Mapping[str, int] = {}
        """All resources of the cluster."""
        self.is_plain = True
        """Whether there is no queue but the default one, without any limit: nothing to decide."""
        self.only_priority = True
        """Whether priority orders the requests of every queue."""
        self._queues: dict[str, _Queue] = {}
        self._path: dict[str, tuple[_Queue, ...]] = {}
        """Queue -> itself and those above it, the nearest first."""

    def change(
        self,
        specs: Iterable[QueueSpec],
        usage: Mapping[Account, Units],
        waiting: Iterable[Account] = (),
    ) -> None:
        """Replace the queues; ``usage`` is what each account has allocated, ``waiting`` who wants more.

        A queue of theirs that is not among ``specs``, yet or any more, has weight 1 and no limits.
        """
        before = self._queues
        every = {account.queue: QueueSpec(name=account.queue) for account in (*usage, *waiting)}
        every |= {spec.name: spec for spec in specs}
        self._queues = {name: _Queue(spec) for name, spec in every.items()}
        for name, queue in self._queues.items():
            old = before.get(name)
            if old is not None:
                queue.average, queue.average_at_s = old.average, old.average_at_s
                queue.next_start_s = old.next_start_s
        self._path = {}
        self.is_plain = all(spec == QueueSpec(name=DEFAULT_QUEUE) for spec in every.values())
        self.only_priority = all(self.policy(name) is by_priority for name in every)
        if not self.is_plain:
            for account, units in usage.items():
                self._add(account, tuple(units.items()), 1)

    def add(self, account: Account, usage: Mapping[Account, Units]) -> None:
        """Add the queue of a new account, if it is not known."""
        if account.queue not in self._queues:
            specs = [queue.spec for queue in self._queues.values()]
            self.change(specs, usage, (account,))

    @property
    def names(self) -> tuple[str, ...]:
        """The queues that are known."""
        return tuple(self._queues)

    @property
    def specs(self) -> tuple[QueueSpec, ...]:
        """The queues that are known, with their settings."""
        return tuple(queue.spec for queue in self._queues.values())

    def names_above(self, name: str) -> list[str]:
        """Return the names of a queue and of those above it."""
        return [queue.spec.name for queue in self.path(name)]

    def path(self, name: str) -> tuple[_Queue, ...]:
        """Return a queue and those above it, the nearest first."""
        path = self._path.get(name)
        if path is None:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = _Queue(QueueSpec(name=name))
            above = self.path(queue.spec.parent) if queue.spec.parent else ()
            path = self._path[name] = (queue, *above)
        return path

    def policy(self, name: str) -> Order:
        """Return the order of the requests of a queue."""
        queue = self._queues.get(name)
        return by_priority if queue is None else POLICIES.get(queue.spec.policy, by_priority)

    # What is allocated

    def charge(self, account: Account, resources: Vector, sign: int, at_s: float) -> None:
        """Add what an account allocates to its queue and those above, or with ``sign`` -1 subtract it."""
        if self.is_plain:
            return
        for queue in self.path(account.queue):
            queue.settle(at_s, dominant_share(queue.usage, self.capacity), self.half_life_s)
        self._add(account, resources, sign)

    def _add(self, account: Account, resources: Vector, sign: int) -> None:
        path = self.path(account.queue)
        for queue in path:
            add(queue.usage, resources, sign)
        leaf = path[0]
        for sums, key in ((leaf.by_user, account.user), (leaf.by_job, account.job_id)):
            of_key = sums.setdefault(key, {})
            add(of_key, resources, sign)
            if not of_key:
                del sums[key]

    def started(self, account: Account, at_s: float) -> None:
        """Count a lease that starts against the rate limit of its user."""
        if self.is_plain:
            return
        queue = self.path(account.queue)[0]
        rate = queue.spec.rate_limit
        if rate:
            due_s = queue.next_start_s.pop(account.user, at_s)
            queue.next_start_s[account.user] = max(due_s, at_s) + 1 / rate
            oldest = next(iter(queue.next_start_s))
            if queue.next_start_s[oldest] < at_s:
                del queue.next_start_s[oldest]

    # Whose turn it is

    def order(self, name: str, resources: Vector, at_s: float) -> Turn:
        """Return the turn of queue ``name``, whose next request asks for ``resources``."""
        turn = []
        for queue in reversed(self.path(name)):
            share = dominant_share(queue.usage, self.capacity)
            queue.settle(at_s, share, self.half_life_s)
            turn.append((_borrows(queue, resources), (share + queue.average) / queue.spec.weight))
        return tuple(turn)

    # Limits

    def stopped(self, account: Account) -> Hold | None:
        """Return the hold of a queue of ``account`` that starts nothing, or None."""
        for queue in () if self.is_plain else self.path(account.queue):
            if queue.spec.stopped:
                name = queue.spec.name
                text = f"queue {name!r} is stopped"
                return Hold(name, "stopped", text, f"stoker queue start {name}")
        return None

    def hold(self, account: Account, resources: Vector, at_s: float) -> Hold | None:
        """Return the limit that keeps ``account`` from allocating ``resources`` now, or None."""
        if self.is_plain:
            return None
        path = self.path(account.queue)
        stopped = self.stopped(account)
        if stopped is not None:
            return stopped
        for queue, limit, used, limits in _limits(path, account):
            for name, units in resources:
                most = limits.get(name, UNLIMITED)
                if used.get(name, 0) + units > most:
                    return _over(
                        queue.spec.name, limit, account, name, (units, used.get(name, 0), most)
                    )
        leaf = path[0]
        due_s = leaf.next_start_s.get(account.user, 0.0) - BURST_S
        if leaf.spec.rate_limit and due_s > at_s:
            text = (
                f"queue {leaf.spec.name!r} has a rate_limit of {leaf.spec.rate_limit:g} leases a second "
                f"for user {account.user!r}"
            )
            return Hold(leaf.spec.name, "rate_limit", text, "none needed: time will do", due_s)
        return None

    def headroom(self, account: Account, resources: Vector) -> int:
        """Return how many times ``account`` may allocate ``resources`` before a limit holds it."""
        if self.is_plain:
            return UNLIMITED
        path = self.path(account.queue)
        if any(queue.spec.stopped for queue in path):
            return 0
        rooms = [
            (limits[name] - used.get(name, 0)) // units
            for _, _, used, limits in _limits(path, account)
            for name, units in resources
            if name in limits and units
        ]
        return max(0, min(rooms, default=UNLIMITED))

    def startable(self, wanted: Mapping[Account, int], resources: Vector) -> int:
        """Return how many of the ``wanted`` leases of each account the limits allow, in all."""
        if self.is_plain:
            return sum(wanted.values())
        allowed: list[tuple[Account, Vector]] = []
        count = 0
        for account, leases in wanted.items():
            fit = min(leases, self.headroom(account, resources))
            allowed.append((account, tuple((name, units * fit) for name, units in resources)))
            count += fit
            self._add(*allowed[-1], 1)
        for account, together in allowed:
            self._add(account, together, -1)
        return count

    # What each can count on

    def entitlements(self, accounts: Iterable[Account]) -> Entitlements:
        """Return the parts of the cluster of ``accounts``, which are those that have or want something."""
        members: dict[str, list[Account]] = {}
        children: dict[str, dict[str, _Queue]] = {}
        for account in accounts:
            members.setdefault(account.queue, []).append(account)
        for name in members:
            for queue in self.path(name):
                children.setdefault(queue.spec.parent, {})[queue.spec.name] = queue
        found = Entitlements({}, {})
        level = [("", 1.0)]
        while level:
            name, part = level.pop()
            below, own = children.get(name, {}), members.get(name, ())
            quotas = {n: dominant_share(q.spec.quota, self.capacity) for n, q in below.items()}
            promised = sum(quotas.values())
            scale = min(1.0, part / promised) if promised else 1.0
            rest = part - promised * scale
            # The accounts of a queue that has others below it are as one of those, of weight 1.
            weights = sum(queue.spec.weight for queue in below.values()) + (1.0 if own else 0.0)
            for account in own:
                found.of_account[account] = rest / weights / len(own)
            for n, queue in below.items():
                found.of_queue[n] = quotas[n] * scale + rest * queue.spec.weight / weights
                level.append((n, found.of_queue[n]))
        return found

    def shares(self) -> dict[str, float]:
        """Return the dominant share of each queue."""
        return {n: dominant_share(q.usage, self.capacity) for n, q in self._queues.items()}

    def check(self, usage: Mapping[Account, Units]) -> None:
        """Raise AssertionError unless the sums are those of the accounts' ``usage``."""
        if self.is_plain:
            return
        sums: dict[str, Units] = {}
        for account, units in usage.items():
            for queue in self.path(account.queue):
                add(sums.setdefault(queue.spec.name, {}), units.items())
        for name, queue in self._queues.items():
            assert queue.usage == sums.get(name, {}), f"queue {name} has not what its accounts have"
            assert bool(queue.by_job) == any(a.queue == name for a in usage), name


@dataclass(frozen=True, slots=True)
class Entitlements:
    """Fractions of the cluster: of each active account, and of each queue with one in or below it."""

    of_account: dict[Account, float]
    of_queue: dict[str, float]


def _over(
    queue: str, limit: str, account: Account, name: str, amounts: tuple[int, int, int]
) -> Hold:
    asked, used, most = amounts
    whose = {"user_limit": f" for user {account.user!r}", "job_limit": f" for job {account.job_id}"}
    text = f"queue {queue!r} has a {limit} of {amount_text(name, most)}{whose.get(limit, '')}"
    change = f"raise it (stoker queue set {queue} --{limit.replace('_', '-')} {name}=AMOUNT)"
    if asked > most:
        fix, needed = f"ask for less, or {change}", used + asked
        return Hold(queue, limit, text, fix, is_final=True, resource=name, needed=needed)
    text += f", of which {amount_text(name, used)} is in use"
    fix, needed = f"leases of the queue must end, or {change}", used + asked
    return Hold(queue, limit, text, fix, resource=name, needed=needed)


def _borrows(queue: _Queue, resources: Vector) -> bool:
    """Return whether ``resources`` more are beyond the quota of a queue; without one, all are."""
    quota, usage = queue.spec.quota, queue.usage
    named = [(name, units) for name, units in resources if name in quota]
    return not named or any(usage.get(name, 0) + units > quota[name] for name, units in named)


def _limits(
    path: tuple[_Queue, ...], account: Account
) -> Iterator[tuple[_Queue, str, Mapping[str, int], Mapping[str, int]]]:
    """Iterate over the limits of an account: the queue, the field, what is used of it, the most."""
    leaf = path[0]
    if leaf.spec.job_limit:
        yield leaf, "job_limit", leaf.by_job.get(account.job_id, {}), leaf.spec.job_limit
    if leaf.spec.user_limit:
        yield leaf, "user_limit", leaf.by_user.get(account.user, {}), leaf.spec.user_limit
    for queue in path:
        if queue.spec.limit:
            yield queue, "limit", queue.usage, queue.spec.limit
