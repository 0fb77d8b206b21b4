"""The threads of transfers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

from stoker_nodelet.transfer.io_pool import IoPool


class Held:
    """Something that a caller refers to."""


async def test_what_a_caller_refers_to_goes_with_it_after_an_error_too() -> None:
    pool = IoPool(1, "test")

    def fail() -> None:
        raise ValueError("no room")

    async def call() -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(ValueError):
            await pool.run(fail)
        return weakref.ref(held)

    gc.collect()
    gc.disable()  # a service collects cycles rarely, and files that are mapped stay open till then
    try:
        left = await call()
        await asyncio.sleep(0)  # what the loop still has to call
        assert left() is None
    finally:
        gc.enable()
        pool.close()
