"""A thread that waits for one answer reads the socket that brings it, instead of being woken by the loop.

A driver's ``get()`` waits so for the only call under way, a worker's main thread for its next call. What
else arrives is handled as the loop would handle it, in the loop thread's place (:meth:`IoThread.enter`).
:class:`~stoker.runtime.net.read_handover.ReadHandover` decides who reads; at most one channel of a process
is away from its loop.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from stoker.runtime.net.read_handover import Reader, ReadHandover

if TYPE_CHECKING:
    import asyncio

    from stoker.runtime.process.held_signals import HeldSignals
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.data.channel import Channel

_TICK_S = 0.005
"""A socket that nobody reads is the loop's again after two of these at most."""


class DirectReader:
    """The reading of one channel by a thread that waits; ``calls`` are this process's unsettled ones."""

    def __init__(self, io: IoThread, calls: Sized) -> None:
        self._io = io
        self._calls = calls
        self._handover = ReadHandover()
        self._channel: Channel | None = None
        self._fd = -1
        self._loop_reads = True
        self._thread = 0
        """The thread that reads, by its ident."""
        self._registered: tuple[asyncio.AbstractEventLoop, Channel] | None = None
        """The event loop of user code that polls a channel's socket, and that channel."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = self._new_poll()

    def _new_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        return poll

    # -- the thread that waits -------------------------------------------------------------------

    def read_until(
        self,
        channel: Channel,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        signals: HeldSignals,
    ) -> None:
        """Read ``channel`` until ``is_done()``, the time is over, or the channel is closed.

        Returns at once where another thread reads: the caller then waits to be woken.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        io, ident = self._io, threading.get_ident()
        if self._thread == ident:
            self._hand_off()
        io.enter()
        try:
            reads = not is_done() and self._begin(channel)
            if reads and is_done():  # by a thread that did not see that this one reads
                self._end()
                reads = False
            poll = self._poll.poll
        finally:
            io.leave()
        try:
            while reads:
                left_ms = None
                if deadline_s is not None:
                    left_ms = max(0.0, deadline_s - time.monotonic()) * 1000 + 1
                ready = signals.passing(poll, left_ms)
                if self._thread != ident:
                    return  # the handler of a signal waited as well, and took over
                if ready is None:
                    continue
                io.enter()
                try:
                    for fd, _ in ready:
                        if fd == self._wakeup:
                            os.eventfd_read(fd)
                        else:
                            self._read(channel)
                    if is_done() or channel.closed or not ready:
                        self._end()
                        reads = False
                finally:
                    io.leave()
        finally:
            if reads and self._thread == ident:  # the handler of a signal raised
                io.enter()
                self._end()
                io.leave()

    def wake(self) -> None:
        """Have the thread that reads look again whether it is done (any thread)."""
        if self._thread not in (0, threading.get_ident()) and self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def demand(self) -> None:
        """Have the loop read what nobody does: the caller waits for it by other means (any thread)."""
        if self._thread == threading.get_ident():
            self._hand_off()  # in the handler of a signal that came while this thread read
        elif self._handover.reader is not Reader.NOBODY or not self._io.running:
            return
        elif self._io.is_current():
            self._give_back()
        else:
            self._io.call_soon(self._give_back)

    def _hand_off(self) -> None:
        """Have the loop read in place of the calling thread, which does so further up its stack."""
        self._io.enter()
        self._handover.end(others_wait=True)
        self._thread = 0
        self._apply()
        self._channel, self._fd, self._poll = None, -1, self._new_poll()
        self._io.leave()

    # -- an event loop of user code ---------------------------------------------------------------

    def read_on(self, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        """Have ``loop``, which the calling thread runs, read ``channel`` while that is in use.

        For the loop of an async actor: the next call is likely to come from where the last one did.
        """
        if self._registered != (loop, channel) or self._handover.reader is not Reader.NOBODY:
            self._io.visit(lambda: self._register(loop, channel))

    def _register(self, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        if not self._begin(channel):
            return
        self._end()
        if self._registered != (loop, channel) and self._handover.reader is Reader.NOBODY:
            fd = os.dup(channel.frames.fileno())  # its own, for as long as the loop knows it
            loop.add_reader(fd, self._on_readable, loop, channel, fd)
            self._registered = loop, channel

    def _on_readable(self, loop: asyncio.AbstractEventLoop, channel: Channel, fd: int) -> None:
        self._io.enter()
        try:
            may_read = self._channel is channel and self._handover.reader is Reader.NOBODY
            if may_read and not channel.closed:
                self._handover.use()
                self._read(channel)
                return
            if self._registered == (loop, channel):
                self._registered = None
        finally:
            self._io.leave()
        loop.remove_reader(fd)
        os.close(fd)

    # -- the loop thread, or in its place ----------------------------------------------------------

    def _begin(self, channel: Channel) -> bool:
        if channel.closed or not self._io.running:
            return False
        if channel is not self._channel and not self._switch(channel):
            return False
        if not self._handover.begin():
            return False
        self._thread = threading.get_ident()
        self._apply()
        return True

    def _switch(self, channel: Channel) -> bool:
        """Read another channel from now on, unless a thread reads the present one."""
        if self._handover.reader is Reader.THREAD:
            return False
        self._give_back()
        if self._fd >= 0:
            self._poll.unregister(self._fd)
        self._channel, self._fd = channel, channel.frames.fileno()
        self._poll.register(self._fd, select.POLLIN)
        return True

    def _read(self, channel: Channel) -> None:
        try:
            channel.frames.read()
        except Exception as error:
            self._io.on_error(error)

    def _end(self) -> None:
        self._thread = 0
        self._handover.end(others_wait=len(self._calls) > 0)
        self._apply()

    def _give_back(self) -> None:
        self._handover.demand()
        self._apply()

    def _apply(self) -> None:
        """Have the loop do as the handover says."""
        handover, channel = self._handover, self._channel
        if channel is None:
            return
        loop_reads = handover.reader is Reader.LOOP
        if loop_reads != self._loop_reads:
            self._loop_reads = loop_reads
            if loop_reads:
                channel.frames.resume_reading()
            else:
                channel.frames.pause_reading()
        if handover.needs_ticks and self._io.running:
            handover.ticks_began()
            self._io.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        goes_on = self._handover.tick()
        self._apply()
        if goes_on:
            self._io.loop.call_later(_TICK_S, self._tick)

    def on_channel_closed(self, channel: Channel) -> None:
        """Have a thread that reads this channel notice."""
        if channel is self._channel:
            self.wake()

    def close(self) -> None:
        """Release the descriptors, at the end of the loop thread."""
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1
