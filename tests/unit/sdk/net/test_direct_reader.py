"""Threads that read a channel by themselves, and the loop: every answer reaches who waits for it, once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.net.direct_reader import DirectReader
from stoker.runtime.objects.waiters import DirectWaiter, FailFastWaiter
from stoker.runtime.process.held_signals import HeldSignals
from stoker.runtime.process.io_thread import IoThread
from stoker_wire.data.frame_socket import FrameSocket, length_prefix
from stoker_wire.process.event_loop import new_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0
_NUMBER = struct.Struct("<Q")


class Channel:
    """A channel of numbers: each that is sent comes back after a while."""

    def __init__(self, sock: socket.socket, world: World) -> None:
        self.frames = FrameSocket(sock)
        self.world = world

    def start(self) -> None:
        self.frames.start(self._receive, self._end)

    @property
    def closed(self) -> bool:
        return self.frames.closed

    def _receive(self, frames: list[Any]) -> None:
        assert self.world.io.is_current()
        for frame in frames:
            (number,) = _NUMBER.unpack(frame)
            self.world.received.append(number)
            waiter = self.world.waiting.pop(number)
            waiter.settled()

    def _end(self) -> None:
        self.world.reader.on_channel_closed(self)  # type: ignore[arg-type]

    def send(self, number: int) -> None:
        self.frames.send([length_prefix(_NUMBER.size), _NUMBER.pack(number)])


class World:
    """A loop thread, one reader, and channels to peers that echo."""

    def __init__(self, rng: random.Random, channels: int) -> None:
        self.rng = rng
        self.io = IoThread("test")
        self.io.start()
        self.waiting: dict[int, FailFastWaiter] = {}
        self.received: list[int] = []
        self.reader = DirectReader(self.io, self.waiting)
        self.peers: list[threading.Thread] = []
        self.socks: list[socket.socket] = []
        self.channels = [self._open(i) for i in range(channels)]

    def _open(self, index: int) -> Channel:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self.socks.append(theirs)

        async def make() -> Channel:
            channel = Channel(mine, self)
            channel.start()
            return channel

        channel = self.io.run(make(), WAIT_S)
        rng = random.Random(self.rng.random())
        peer = threading.Thread(target=_echo, args=(theirs, rng), name=f"peer-{index}")
        peer.start()
        self.peers.append(peer)
        return channel

    def ask(self, channel: Channel, number: int, how: str, timeout_s: float | None) -> bool:
        """Send a number and wait for it, by one of the ways in which users wait."""
        direct = DirectWaiter(self.reader, channel)  # type: ignore[arg-type]
        waiter = direct if how == "direct" else FailFastWaiter()
        waiter.missing = 1
        self.waiting[number] = waiter
        if how == "direct":
            self.io.enter()
            channel.send(number)
            self.io.leave()
        else:
            self.io.call_soon(channel.send, number)
            self.reader.demand()
        if waiter.wait(timeout_s):
            return True
        self.reader.demand()
        return waiter.wait(WAIT_S)

    def close(self) -> None:
        for sock in self.socks:
            sock.shutdown(socket.SHUT_RDWR)
        for peer in self.peers:
            peer.join(WAIT_S)
        for sock in self.socks:
            sock.close()

        async def close() -> None:
            for channel in self.channels:
                channel.frames.close()

        self.io.run(close(), WAIT_S)
        self.io.running = False
        self.io.stop()
        self.reader.close()


def _echo(sock: socket.socket, rng: random.Random) -> None:
    while data := sock.recv(1 << 16):
        delay_s = rng.choice([0, 0, 0, 0.0005, 0.004, 0.012])
        if delay_s:
            time.sleep(delay_s)
        sock.sendall(data)


@pytest.fixture
def world(seed: int) -> Iterator[World]:
    world = World(random.Random(seed), 3)
    yield world
    world.close()


def test_every_answer_comes_whoever_reads(world: World, seed: int) -> None:
    failures: list[str] = []
    sent: list[int] = []

    def ask_many(index: int) -> None:
        rng = random.Random(seed * 10 + index)
        for turn in range(150):
            number = index * 1000 + turn
            sent.append(number)
            channel = rng.choice(world.channels) if rng.random() < 0.2 else world.channels[0]
            how = rng.choice(["direct", "direct", "loop"])
            timeout_s = rng.choice([None, None, 0.001, 0.0])
            if not world.ask(channel, number, how, timeout_s):
                failures.append(f"{number} by {how}")
            if rng.random() < 0.05:
                time.sleep(0.02)

    threads = [threading.Thread(target=ask_many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not failures
    assert sorted(world.received) == sorted(sent)


def test_a_lone_caller_reads_by_itself(world: World) -> None:
    channel = world.channels[0]
    by: list[bool] = []
    original = channel._receive

    def receive(frames: list[Any]) -> None:
        by.append(threading.current_thread().name == "stoker-io")
        original(frames)

    channel.frames._on_frames = receive
    for number in range(200):
        assert world.ask(channel, number, "direct", None)
    assert not all(by)


def test_the_loop_reads_again_soon_after(world: World) -> None:
    channel = world.channels[0]
    for number in range(20):
        world.ask(channel, number, "direct", None)
    waiter = FailFastWaiter()
    waiter.missing = 1
    world.waiting[999] = waiter
    world.io.enter()
    channel.send(999)  # and nobody says that they wait
    world.io.leave()
    assert waiter.wait(WAIT_S)


def test_the_end_of_the_channel_ends_the_reading(world: World) -> None:
    channel = world.channels[0]
    waiter = DirectWaiter(world.reader, channel)  # type: ignore[arg-type]
    waiter.missing = 1
    world.waiting[1] = waiter
    threading.Timer(0.05, world.io.call_soon, [channel.frames.close]).start()
    with HeldSignals() as signals:
        world.reader.read_until(channel, lambda: False, WAIT_S, signals)  # type: ignore[arg-type]
    assert channel.closed
    threading.Timer(0.05, world.io.call_soon, [waiter.settled]).start()
    assert waiter.wait(WAIT_S)


def test_an_answer_from_elsewhere_wakes_the_thread_that_reads(world: World) -> None:
    channel = world.channels[0]
    waiter = DirectWaiter(world.reader, channel)  # type: ignore[arg-type]
    waiter.missing = 1
    threading.Timer(0.05, world.io.call_soon, [waiter.settled]).start()
    assert waiter.wait(WAIT_S)


def test_an_interrupt_ends_the_wait_and_tears_nothing(world: World, seed: int) -> None:
    rng = random.Random(seed)
    channel = world.channels[0]
    interrupts: list[int] = []
    armed = False
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(rng.uniform(0.0, 0.003)):
            os.kill(os.getpid(), signal.SIGINT)

    def on_signal(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            interrupts.append(number)
            raise Interrupt

    before = signal.signal(signal.SIGINT, on_signal)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        until_s = time.monotonic() + 3.0
        number = 0
        while time.monotonic() < until_s:
            number += 1
            waiter = DirectWaiter(world.reader, channel)  # type: ignore[arg-type]
            waiter.missing = 1
            try:
                armed = True
                with HeldSignals():
                    world.io.enter()
                    try:
                        world.waiting[number] = waiter
                        channel.send(number)
                    finally:
                        world.io.leave()
                assert waiter.wait(WAIT_S)
                armed = False
            except Interrupt:
                pass
            assert signal.getsignal(signal.SIGINT) is on_signal
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert interrupts
    deadline_s = time.monotonic() + WAIT_S
    while world.waiting and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert not world.waiting, "an interrupt lost an answer"
    assert len(set(world.received)) == len(world.received)


def test_a_handler_that_waits_itself_gets_its_answer_and_so_does_the_wait(world: World) -> None:
    channel = world.channels[0]
    answers: list[bool] = []

    def ask(*_: object) -> None:
        how = ["direct", "loop"][len(answers) % 2]
        answers.append(world.ask(channel, 1000 + len(answers), how, None))

    before = signal.signal(signal.SIGUSR2, ask)
    began_s = time.monotonic()
    try:
        for number in range(4):
            waiter = DirectWaiter(world.reader, channel)  # type: ignore[arg-type]
            waiter.missing = 1
            world.waiting[number] = waiter
            signals = threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGUSR2])
            signals.start()
            threading.Timer(0.1, world.io.call_soon, [channel.send, number]).start()
            assert waiter.wait(WAIT_S)
            signals.join()  # it may be late, and must not meet a handler that is gone
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert answers == [True] * 4
    assert time.monotonic() - began_s < WAIT_S / 2, "a wait ended by its deadline only"


@pytest.fixture
def user_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of an async actor, on a thread of its own."""
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, name="user-loop")
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


def on_loop(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> Any:
    async def call() -> Any:
        return function(*args)

    return asyncio.run_coroutine_threadsafe(call(), loop).result(WAIT_S)


def readers_of(channel: Channel) -> list[str]:
    """The names of the threads that read, from now on."""
    names: list[str] = []
    original = channel._receive

    def receive(frames: list[Any]) -> None:
        names.append(threading.current_thread().name)
        original(frames)

    channel.frames._on_frames = receive
    return names


def expect(world: World, number: int) -> FailFastWaiter:
    waiter = FailFastWaiter()
    waiter.missing = 1
    world.waiting[number] = waiter
    return waiter


def test_a_loop_of_user_code_reads_the_channel_that_it_polls(
    world: World, user_loop: asyncio.AbstractEventLoop
) -> None:
    channel = world.channels[0]
    names = readers_of(channel)
    for number in range(100):
        on_loop(user_loop, world.reader.read_on, user_loop, channel)
        waiter = expect(world, number)
        world.io.call_soon(channel.send, number)
        assert waiter.wait(WAIT_S)
    assert "user-loop" in names


def test_what_comes_while_that_loop_is_blocked_is_read_all_the_same(
    world: World, user_loop: asyncio.AbstractEventLoop
) -> None:
    channel = world.channels[0]
    on_loop(user_loop, world.reader.read_on, user_loop, channel)
    go_on = threading.Event()
    user_loop.call_soon_threadsafe(go_on.wait, WAIT_S)
    waiter = expect(world, 1)
    world.io.call_soon(channel.send, 1)
    assert waiter.wait(WAIT_S / 2)
    go_on.set()
    on_loop(user_loop, world.reader.read_on, user_loop, channel)
    waiter = expect(world, 2)
    world.io.call_soon(channel.send, 2)
    assert waiter.wait(WAIT_S)


def test_that_loop_keeps_no_descriptor_of_a_channel_that_ended(
    world: World, user_loop: asyncio.AbstractEventLoop
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    on_loop(user_loop, world.reader.read_on, user_loop, world.channels[0])
    world.io.call_soon(world.channels[0].frames.close)
    deadline_s = time.monotonic() + WAIT_S
    while len(os.listdir("/proc/self/fd")) >= before:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class Interrupt(Exception):
    """What the test's handler raises."""
