"""An object lives as long as somebody can reach it, whatever happens to channels and processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests.sim.refs_world import World, run

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 400


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        made = World(request.param, 5, patch)
        gc.disable()  # what dies is dead at once, or there is a cycle to be found
        try:
            yield made
        finally:
            gc.enable()
            made.loop.close()


def all_is_gone(world: World) -> None:
    assert not world.left(), world.left()
    assert min(world.messages[m] for m in ("Borrow", "ReleaseBorrow", "Resolve", "tuple")) > 20


@pytest.mark.parametrize("world", range(10), indirect=True)
def test_all_is_freed_and_nothing_under_a_reader(world: World) -> None:
    run(world, STEPS, faults=False)
    all_is_gone(world)


@pytest.mark.parametrize("world", range(100, 130), indirect=True)
def test_the_same_with_cut_lines_and_dead_processes(world: World) -> None:
    run(world, STEPS, faults=True)
    all_is_gone(world)
