"""The entry point of every service: event loop, logging, signals, and a graceful stop.

Called by each ``__main__.py`` and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from stoker_wire.errors import StokerError
from stoker_wire.process import garbage, log
from stoker_wire.process.event_loop import new_loop
from stoker_wire.process.files import umask
from stoker_wire.process.files.open_files import raise_open_files
from stoker_wire.settings import Settings


class Stoppable(Protocol):
    """A running service, as its ``serve`` returns it."""

    async def stop(self) -> None:
        """Stop gracefully."""
        ...


def run_service(
    main: Callable[[], Awaitable[Stoppable]], *, settings: Settings | None = None
) -> None:
    """Run what ``main`` starts until SIGTERM or SIGINT, then stop it; a second signal exits at once.

    A StokerError while starting is printed as one line, and the process exits with status 1.
    """
    raise_open_files()
    settings = settings or Settings.from_env()
    log.configure(settings.log_level, settings.log_format)
    umask.restrict()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(main))
    except StokerError as error:
        sys.stderr.write(f"error ({error.code}): {error.one_line}\n")
        raise SystemExit(1) from None


async def _run(main: Callable[[], Awaitable[Stoppable]]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    running = await main()
    garbage.settle()
    try:
        await stopping.wait()
    finally:
        await running.stop()
