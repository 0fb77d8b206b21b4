"""The reader of a channel's socket: the loop, or a thread that waits for what it brings. Pure.

The loop reads all sockets. A thread that has nothing to do but wait for one answer reads the one socket that
brings it by itself (leader and follower). When it has its answer it is likely to come back soon with the next
call, so that the socket is left to nobody, but not for long::

    LOOP --begin--> THREAD --end--> NOBODY --begin--> THREAD
    NOBODY --demand, or two ticks without a use--> LOOP
    THREAD --end, others wait--> LOOP

Used by :class:`~stoker.runtime.net.direct_reader.DirectReader`, which has ticks made while ``needs_ticks``.
"""

from __future__ import annotations

from enum import Enum


class Reader(Enum):
    """The reader of a socket."""

    LOOP = 0
    THREAD = 1
    NOBODY = 2


class ReadHandover:
    """The state of one socket."""

    def __init__(self) -> None:
        self.reader = Reader.LOOP
        self._was_used = False
        self._is_ticking = False

    @property
    def needs_ticks(self) -> bool:
        """Whether :meth:`tick` must be called, every few milliseconds, and is not."""
        return self.reader is Reader.NOBODY and not self._is_ticking

    def begin(self) -> bool:
        """Have the calling thread read; return False if another thread does."""
        if self.reader is Reader.THREAD:
            return False
        self.reader, self._was_used = Reader.THREAD, True
        return True

    def end(self, *, others_wait: bool) -> None:
        """Note that the thread reads no more; ``others_wait`` for what the socket brings."""
        self.reader = Reader.LOOP if others_wait else Reader.NOBODY
        self._was_used = True

    def use(self) -> None:
        """Note that somebody who waits for other things as well has just read it."""
        self._was_used = True

    def demand(self) -> None:
        """Note that somebody waits for what the socket brings, and reads nothing."""
        if self.reader is Reader.NOBODY:
            self.reader = Reader.LOOP

    def ticks_began(self) -> None:
        """Note that :meth:`tick` is called from now on, until it returns False."""
        self._is_ticking = True

    def tick(self) -> bool:
        """Give the socket back to the loop if no thread has come for it; return whether to go on."""
        if not self._was_used and self.reader is Reader.NOBODY:
            self.reader = Reader.LOOP
        self._is_ticking = self._was_used and self.reader is not Reader.LOOP
        self._was_used = False
        return self._is_ticking
