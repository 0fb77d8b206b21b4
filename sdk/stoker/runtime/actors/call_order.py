"""The order in which one caller's calls of one actor are sent: the caller's side of "calls run in order".

Order is kept per *group* (a concurrency group of the actor; the default one is ``""``) and is that of
the first start: in an ordered group no call is sent for the first time before those submitted before
it. A call that was sent once has had its turn: its retry waits for no other call, since the next in the
queue may need its result. Calls of unordered groups (those that run several at once) wait only for
their own arguments. Pure: the caller says whether arguments are ready, and sends what is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    """A call of an actor, as its order needs it."""

    task_id: str

    @property
    def deps(self) -> Collection[object]:
        """Arguments that are refs; a call without any can always go."""

    @property
    def group(self) -> str:
        """The concurrency group that the call names, or ''."""


C = TypeVar("C", bound=Ordered)


class CallOrder(Generic[C]):
    """The calls of one caller to one actor that are not sent.

    Each is in one place: requeued for a retry, in its blocked group (the call that cannot go, or one
    behind it), blocked by itself (unordered, and its arguments are not ready), or new.
    """

    __slots__ = (
        "_blocked_groups",
        "_blocked_unordered",
        "_dropped",
        "_new",
        "_requeued",
        "_unordered",
    )

    def __init__(self, unordered: Collection[str] = ()) -> None:
        self._unordered = unordered
        self._requeued: deque[C] = deque()
        self._new: deque[C] = deque()
        """Submitted since the last ``take``; of any group."""
        self._blocked_groups: dict[str, deque[C]] = {}
        """Of each ordered group: the first call whose arguments are not ready, and all after it."""
        self._blocked_unordered: dict[str, C] = {}
        self._dropped: set[str] = set()

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        queues = (
            self._new,
            self._requeued,
            self._blocked_unordered,
            *self._blocked_groups.values(),
        )
        return sum(map(len, queues)) - len(self._dropped)

    def __iter__(self) -> Iterator[C]:
        """Iterate over all calls."""
        for calls in (
            self._requeued,
            *self._blocked_groups.values(),
            self._blocked_unordered.values(),
            self._new,
        ):
            for call in list(calls):
                if call.task_id not in self._dropped:
                    yield call

    def is_ordered(self, group: str) -> bool:
        """Return whether calls of a group are sent in order."""
        return group not in self._unordered

    def append(self, call: C) -> None:
        """Add a call that was submitted."""
        self._new.append(call)

    def requeue(self, calls: Iterable[C]) -> None:
        """Put calls that were sent once before all others, in this order, for a retry."""
        self._requeued.extend(calls)

    def take(self, ready: Callable[[C], bool]) -> list[C]:
        """Return what can go now, in the order in which to send it.

        ``ready`` is asked of calls with arguments; one that it refuses is asked for again at the
        next ``take``, if it is the head of its group, or after ``mark_ready``.
        """
        out: list[C] = []
        dropped, blocked, unordered = self._dropped, self._blocked_groups, self._unordered
        if self._requeued:
            out += [call for call in self._requeued if not self._was_dropped(call)]
            self._requeued.clear()
        for group in list(blocked):
            self._advance(group, ready, out)
        for call in self._new:
            if dropped and self._was_dropped(call):
                continue
            if blocked and call.group in blocked:
                blocked[call.group].append(call)
            elif not call.deps or ready(call):
                out.append(call)
            elif call.group in unordered:
                self._blocked_unordered[call.task_id] = call
            else:
                blocked[call.group] = deque((call,))
        self._new.clear()
        return out

    def _advance(self, group: str, ready: Callable[[C], bool], out: list[C]) -> None:
        queue = self._blocked_groups[group]
        while queue:
            call = queue[0]
            if not self._was_dropped(call):
                if call.deps and not ready(call):
                    return
                out.append(call)
            queue.popleft()
        del self._blocked_groups[group]

    def _was_dropped(self, call: C) -> bool:
        if call.task_id not in self._dropped:
            return False
        self._dropped.remove(call.task_id)
        return True

    def drop(self, call: C) -> None:
        """Forget a call that is here. Its place is skipped later, so the cost is constant."""
        if self._blocked_unordered.pop(call.task_id, None) is None:
            self._dropped.add(call.task_id)
        if not self:
            self.drain()  # perhaps nobody calls ``take`` any more, which would skip the places

    def drain(self) -> list[C]:
        """Take out all calls, sendable or not."""
        calls = list(self)
        self._requeued.clear()
        self._blocked_groups.clear()
        self._blocked_unordered.clear()
        self._new.clear()
        self._dropped.clear()
        return calls

    def mark_ready(self, call: C) -> None:
        """Note that the arguments of a call that ``ready`` refused are ready now."""
        if self._blocked_unordered.pop(call.task_id, None) is not None:
            self._new.appendleft(call)

    def ahead_of(self, call: C) -> C | None:
        """Return the call that ``call`` waits behind: the first of its group; None if it does not."""
        if call.task_id in self._blocked_unordered:
            return None
        for other in self._blocked_groups.get(call.group, ()):
            if other.task_id not in self._dropped:
                return None if other is call else other
        return None
