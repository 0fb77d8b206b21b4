"""How a head or node process says that it is ready, and learns that it must end.

It ends by a signal, by the end of its driver's lifeline, or (for a lifeline that a forked child of
the dead driver still holds) when it finds that it has another parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import argparse

_ORPHAN_CHECK_S = 1.0


def end_of(options: argparse.Namespace) -> asyncio.Event:
    """Return what is set by SIGTERM, SIGINT and the end of the lifeline."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if over.is_set():
            os._exit(130)  # asked twice: the fork server cleans up
        over.set()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    loop.add_signal_handler(signal.SIGTERM, over.set)
    if options.lifeline_fd is not None:

        def on_lifeline() -> None:
            if not os.read(options.lifeline_fd, 4096):
                loop.remove_reader(options.lifeline_fd)
                over.set()

        loop.add_reader(options.lifeline_fd, on_lifeline)
    return over


async def until_over(over: asyncio.Event, *, orphaned: bool) -> None:
    """Wait for ``over`` or, with ``orphaned``, until the parent is another process.

    A child that the driver forked may hold a copy of the lifeline, which then does not end.
    """
    parent = os.getppid()
    while True:
        try:
            async with asyncio.timeout(_ORPHAN_CHECK_S if orphaned else None):
                await over.wait()
            return
        except TimeoutError:
            if os.getppid() != parent:
                return


def say(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Write the one line that the spawner waits for."""
    if options.ready_fd is None:
        return
    try:
        os.write(options.ready_fd, msgspec.json.encode(line) + b"\n")
        os.close(options.ready_fd)
    except OSError:
        pass  # the spawner is gone: the lifeline will tell
    options.ready_fd = None
