"""A socket always has a reader, or will have one within two ticks: over all orders of what can happen."""

from __future__ import annotations

import random

from stoker.runtime.net.read_handover import Reader, ReadHandover

STEPS = 50_000


class World:
    """One socket, the threads and waiters that use it, and the timer."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.handover = ReadHandover()
        self.ticking = False
        self.unread = 0
        self.ticks_unread = 0
        self.other_waiters = 0

    def step(self) -> str:
        name = self.rng.choice(
            ["arrive", "begin", "thread_reads", "end", "wait", "settle", "tick", "loop_reads"]
        )
        getattr(self, name)()
        if self.handover.needs_ticks:
            self.handover.ticks_began()
            self.ticking = True
        return name

    def arrive(self) -> None:
        self.unread += 1

    def begin(self) -> None:
        was = self.handover.reader
        assert self.handover.begin() == (was is not Reader.THREAD)
        assert self.handover.reader is Reader.THREAD

    def thread_reads(self) -> None:
        if self.handover.reader is Reader.THREAD:
            self.unread = 0

    def end(self) -> None:
        if self.handover.reader is Reader.THREAD:
            self.handover.end(others_wait=self.other_waiters > 0)

    def wait(self) -> None:
        self.other_waiters += 1
        self.handover.demand()

    def settle(self) -> None:
        self.other_waiters = max(0, self.other_waiters - 1)

    def tick(self) -> None:
        if self.ticking:
            self.ticks_unread = self.ticks_unread + 1 if self.unread else 0
            self.ticking = self.handover.tick()

    def loop_reads(self) -> None:
        if self.handover.reader is Reader.LOOP:
            self.unread = 0

    def check(self, trace: list[str]) -> None:
        reader = self.handover.reader
        if reader is Reader.NOBODY:
            assert self.ticking, f"nobody reads, and no tick will change that: {trace}"
            assert not self.other_waiters, f"somebody waits for what nobody reads: {trace}"


def test_some_reader_is_there_or_comes(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    trace: list[str] = []
    for _ in range(STEPS):
        trace.append(world.step())
        world.check(trace[-20:])


def test_nobody_lasts_for_two_ticks_at_most(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        world = World(rng)
        for _ in range(rng.randrange(60)):
            world.step()
        if world.handover.reader is Reader.NOBODY:
            world.tick()
            world.tick()
        assert world.handover.reader is not Reader.NOBODY


def test_a_thread_that_comes_back_at_once_finds_the_socket_as_it_left_it() -> None:
    handover = ReadHandover()
    handover.begin()
    for _ in range(100):
        handover.end(others_wait=False)
        if handover.needs_ticks:
            handover.ticks_began()
        assert handover.reader is Reader.NOBODY
        assert handover.begin()
        assert handover.tick()


def test_no_tick_is_needed_while_a_thread_waits_for_long() -> None:
    handover = ReadHandover()
    handover.begin()
    handover.end(others_wait=False)
    handover.ticks_began()
    handover.begin()
    assert handover.tick()
    assert not handover.tick()
    handover.end(others_wait=False)
    assert handover.needs_ticks
