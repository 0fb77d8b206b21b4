"""Which event loop runs: uvloop where it is installed, else the standard one."""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, for the runtime's thread or an async actor."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
