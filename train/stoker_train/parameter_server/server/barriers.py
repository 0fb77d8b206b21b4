"""The waits of a server for workers: all of them at each step (sync), or the slowest of them (staleness).

Both name the ranks that did not come. They live on the event loop of the server's actor. A number of a step
only grows, and a worker is at a step only if it knows that the one before was applied.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server.errors import WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_train.parameter_server.server.messages import Part

    Apply = Callable[[list[list[Part]]], None]


class _Step:
    """A step for which not all ranks have come."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.parts: dict[int, list[Part]] = {}
        self.done: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()


class StepBarrier:
    """Gathers what all ranks push at a step, and has it applied at once, in the order of ranks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: dict[int, _Step] = {}
        self.applied: dict[int, int] = {}
        """Of each rank its last step that was applied (the ``order`` of its sequence)."""
        self.left: set[int] = set()
        """Ranks that have ended: nobody waits for them."""

    async def push(
        self, rank: int, world: int, order: int, parts: list[Part], apply: Apply, timeout_s: float
    ) -> bool | None:
        """Return True once the step is applied, False if it is lost with a server that restarted.

        None: rows have moved, and nothing was applied.
        Raises WorkerTimeoutError that names the ranks that did not come; then this push is not applied.
        """
        if order <= self.applied.get(rank, -1):
            return True
        # Whoever is at this step has seen the ones before applied: by a process that had not saved them.
        for older in [one for one in self._steps if one < order]:
            _set(self._steps.pop(older).done, False)
        if any(one > order for one in self._steps):  # the same, in the order in which they came
            return False
        if order not in self._steps:
            self._steps[order] = _Step(world)
        step = self._steps[order]
        if step.world != world:
            raise BadRequestError(
                f"rank {rank} is one of {world} workers, others of {step.world}\n"
                "give all workers the same world",
                field="world",
            )
        step.parts[rank] = parts
        if not self._apply_if_whole(order, world, apply):
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(step.done)
            except TimeoutError:
                missing = self._missing(step, world)
                if step.parts.get(rank) is parts:  # not those of the worker that took its place
                    del step.parts[rank]
                if not step.parts and self._steps.get(order) is step:
                    del self._steps[order]
                raise _late(
                    self._name, missing, f"at a step in sync mode for {timeout_s:g} s"
                ) from None
        return True

    def leave(self, rank: int, world: int, apply: Apply) -> None:
        """Wait for a rank no more."""
        self.left.add(rank)
        for order in sorted(self._steps):
            self._apply_if_whole(order, world, apply)

    def move(self) -> None:
        """Answer those who wait that rows have moved."""
        for step in self._steps.values():
            _set(step.done, None)
        self._steps.clear()

    def _missing(self, step: _Step, world: int) -> list[int]:
        return [one for one in range(world) if one not in step.parts and one not in self.left]

    def _apply_if_whole(self, order: int, world: int, apply: Apply) -> bool:
        step = self._steps[order]
        if self._missing(step, world):
            return False
        del self._steps[order]
        try:
            apply([step.parts[rank] for rank in sorted(step.parts)])
        except Exception as error:
            if not step.done.done():
                step.done.set_exception(error)
                step.done.exception()  # it is raised here, if nobody else waits
            raise
        self.applied.update(dict.fromkeys(step.parts, order))
        _set(step.done, True)
        return True


class StalenessGate:
    """The steps that workers have ended, by which those too far ahead wait for the slowest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.steps: dict[int, int] = {}
        self.left: set[int] = set()
        self.histogram: collections.Counter[int] = collections.Counter()
        """How often a worker went on so many steps ahead of the slowest."""
        self._changed = asyncio.Condition()
        self._has_moved = False

    async def advance(
        self, rank: int, world: int, step: int, bound: int, timeout_s: float
    ) -> int | None:
        """Return by how many steps the rank is ahead of the slowest, once that is at most ``bound``.

        None: rows have moved.
        Raises WorkerTimeoutError that names the slowest.
        """
        async with self._changed:
            self.steps[rank] = max(step, self.steps.get(rank, 0))
            self._changed.notify_all()

            def slowest() -> int:
                others = [one for one in range(world) if one not in self.left or one == rank]
                return min(min(self.steps.get(one, 0) for one in others), step)

            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(
                        lambda: self._has_moved or step - slowest() <= bound
                    )
            except TimeoutError:
                late = [
                    one
                    for one in range(world)
                    if one not in self.left and step - self.steps.get(one, 0) > bound
                ]
                text = f"more than {bound} steps behind rank {rank} for {timeout_s:g} s"
                raise _late(self._name, late, text) from None
            if self._has_moved:
                return None
            ahead = step - slowest()
            self.histogram[ahead] += 1
            return ahead

    async def leave(self, rank: int) -> None:
        """Wait for a rank no more."""
        async with self._changed:
            self.left.add(rank)
            self._changed.notify_all()

    async def move(self) -> None:
        """Answer those who wait that rows have moved."""
        async with self._changed:
            self._has_moved = True
            self._changed.notify_all()


def _set(future: asyncio.Future[bool | None], value: bool | None) -> None:
    if not future.done():
        future.set_result(value)


def _late(name: str, ranks: list[int], text: str) -> WorkerTimeoutError:
    listed = ", ".join(map(str, ranks))
    return WorkerTimeoutError(
        f"workers of {name} did not come in time\nrank {listed}: {text}\n"
        "find out why these are slow or ended (stoker list tasks), let one that has ended call close(), "
        "or give start() a longer timeout_s; what this worker pushed at a sync step was not applied",
        extra={"ranks": ranks},
    )
