"""In which order one caller's calls of one actor are sent: the caller's side of "calls run in order".

Order is kept per *group* (a concurrency group of the actor; the default one is ``""``) and is that of
the first start: in an ordered group no call is sent for the first time before those submitted before
it. A call that was sent once has had its turn: tried again, it waits for nobody, since it may be what
the next in line needs. Calls of unordered groups (those that run several at once) wait only for
their own arguments. Pure: whether arguments are there is asked of the shell, what to send is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Ordered(Protocol):
    """One call of an actor."""

    task_id: str

    @property
    def deps(self) -> Collection[object]:
        """Its arguments that are refs; a call without any can always go."""

    @property
    def group(self) -> str:
        """The concurrency group that it names, or ''."""


C = TypeVar("C", bound=Ordered)


class CallOrder(Generic[C]):
    """The calls of one caller to one actor that are not under way.

    Each is in one place: among those tried again, in its ordered group (behind a call that cannot
    go, or that call itself), alone (unordered, and its arguments are not there), or new.
    """

    __slots__ = ("_again", "_alone", "_behind", "_dropped", "_new", "_unordered")

    def __init__(self, unordered: Collection[str] = ()) -> None:
        self._unordered = unordered
        self._again: deque[C] = deque()
        self._new: deque[C] = deque()
        """Submitted since the last ``take``; of any group."""
        self._behind: dict[str, deque[C]] = {}
        """Of each ordered group: the first call whose arguments are not there, and all after it."""
        self._alone: dict[str, C] = {}
        self._dropped: set[str] = set()

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        behind = sum(len(queue) for queue in self._behind.values())
        return len(self._new) + len(self._again) + len(self._alone) + behind - len(self._dropped)

    def __iter__(self) -> Iterator[C]:
        """Iterate over all calls."""
        for calls in (self._again, *self._behind.values(), self._alone.values(), self._new):
            for call in list(calls):
                if call.task_id not in self._dropped:
                    yield call

    def append(self, call: C) -> None:
        """A call was submitted."""
        self._new.append(call)

    def again(self, calls: Iterable[C]) -> None:
        """These were sent once and go a second time, in this order, before all others."""
        self._again.extend(calls)

    def take(self, ready: Callable[[C], bool]) -> list[C]:
        """Return what can go now, in the order in which to send it.

        ``ready`` is asked of calls with arguments; one that it refuses is asked for again at the
        next ``take``, if it is the head of its group, or once it was ``settled``.
        """
        out: list[C] = []
        dropped, behind, unordered = self._dropped, self._behind, self._unordered
        if self._again:
            out += [call for call in self._again if not self._was_dropped(call)]
            self._again.clear()
        for group in list(behind):
            self._advance(group, ready, out)
        for call in self._new:
            if dropped and self._was_dropped(call):
                continue
            if behind and call.group in behind:
                behind[call.group].append(call)
            elif not call.deps or ready(call):
                out.append(call)
            elif call.group in unordered:
                self._alone[call.task_id] = call
            else:
                behind[call.group] = deque((call,))
        self._new.clear()
        return out

    def _advance(self, group: str, ready: Callable[[C], bool], out: list[C]) -> None:
        queue = self._behind[group]
        while queue:
            call = queue[0]
            if not self._was_dropped(call):
                if call.deps and not ready(call):
                    return
                out.append(call)
            queue.popleft()
        del self._behind[group]

    def _was_dropped(self, call: C) -> bool:
        if call.task_id not in self._dropped:
            return False
        self._dropped.remove(call.task_id)
        return True

    def drop(self, call: C) -> None:
        """Forget a call that is here. Costs the same wherever it is: its place is skipped later."""
        if self._alone.pop(call.task_id, None) is None:
            self._dropped.add(call.task_id)
        if not self:
            self.drain()  # nobody may ask for what can go any more

    def drain(self) -> list[C]:
        """Take out all calls, sendable or not."""
        calls = list(self)
        self._again.clear()
        self._behind.clear()
        self._alone.clear()
        self._new.clear()
        self._dropped.clear()
        return calls

    def settled(self, call: C) -> None:
        """The arguments of a call that ``ready`` refused are all there now."""
        if self._alone.pop(call.task_id, None) is not None:
            self._new.appendleft(call)

    def ahead_of(self, call: C) -> C | None:
        """Return the call that ``call`` waits behind: the first of its group; None if it does not."""
        if call.task_id in self._alone:
            return None
        for other in self._behind.get(call.group, ()):
            if other.task_id not in self._dropped:
                return None if other is call else other
        return None
