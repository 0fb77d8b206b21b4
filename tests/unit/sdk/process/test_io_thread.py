"""The loop thread and its guests: one at a time, and the loop goes on with what guests leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.process.io_thread import IoThread
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0


@pytest.fixture
def io() -> Iterator[IoThread]:
    io = IoThread("test")
    io.start()
    yield io
    io.running = False
    io.stop()


def test_a_guest_is_the_loop_thread(io: IoThread) -> None:
    assert not io.is_current()
    io.enter()
    assert io.is_current()
    assert asyncio.get_running_loop() is io.loop
    io.leave()
    assert not io.is_current()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_a_guest_inside_another_loop_finds_that_again(io: IoThread) -> None:
    async def visit() -> None:
        own = asyncio.get_running_loop()
        io.enter()
        assert asyncio.get_running_loop() is io.loop
        io.leave()
        assert asyncio.get_running_loop() is own

    asyncio.run(visit())


def test_nobody_enters_while_the_loop_runs(io: IoThread) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go_on.wait(WAIT_S)

    io.call_soon(hold)
    assert inside.wait(WAIT_S)
    assert not io.try_enter()
    threading.Timer(0.05, go_on.set).start()
    io.enter()
    assert go_on.is_set()
    io.leave()


def test_the_loop_sees_what_a_guest_schedules(io: IoThread) -> None:
    for schedule in (
        io.loop.call_soon,
        lambda callback: io.loop.call_later(0.001, callback),
    ):
        done = threading.Event()
        io.enter()
        schedule(done.set)
        assert not done.is_set()
        io.leave()
        assert done.wait(WAIT_S)


def test_a_guest_that_completes_a_future_wakes_its_coroutine(io: IoThread) -> None:
    future: asyncio.Future[int] = io.loop.create_future()

    async def wait() -> int:
        return await future

    waiting = asyncio.run_coroutine_threadsafe(wait(), io.loop)
    time.sleep(0.02)
    io.enter()
    future.set_result(7)
    io.leave()
    assert waiting.result(WAIT_S) == 7


def test_the_end_of_a_turn_is_that_of_the_guest(io: IoThread) -> None:
    seen: list[str] = []
    io.enter()
    io.at_turn_end(lambda: seen.append("first"))
    io.at_turn_end(lambda: io.at_turn_end(lambda: seen.append("last")))
    assert not seen
    io.leave()
    assert seen == ["first", "last"]

    done = threading.Event()
    io.call_soon(io.at_turn_end, done.set)
    assert done.wait(WAIT_S)


def test_turns_never_overlap(io: IoThread, seed: int) -> None:
    """A counter that is not locked loses no step, whoever takes it."""
    state = {"count": 0, "inside": 0}
    errors: list[str] = []

    def step() -> None:
        state["inside"] += 1
        if state["inside"] != 1:
            errors.append("two at once")
        count = state["count"]
        time.sleep(0)
        state["count"] = count + 1
        state["inside"] -= 1

    def visit(index: int) -> None:
        rng = random.Random(seed + index)
        for _ in range(300):
            way = rng.randrange(3)
            if way == 0:
                io.call_soon(step)
            elif way == 1:
                io.enter()
                step()
                io.leave()
            elif io.try_enter():
                step()
                io.leave()
            else:
                io.call_soon(step)

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    io.run(asyncio.sleep(0), WAIT_S)
    assert not errors
    assert state["count"] == 4 * 300


def test_a_socket_taken_from_the_loop_and_given_back_at_once_is_still_read(io: IoThread) -> None:
    """An event that was on its way when the socket was taken must not undo its return."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    read: list[bytes] = []

    def on_readable() -> None:
        read.append(mine.recv(100))

    async def register() -> None:
        io.loop.add_reader(mine, on_readable)

    io.run(register(), WAIT_S)
    for turn in range(300):
        io.enter()
        theirs.send(b"x")  # the loop wakes, and waits for its turn
        if turn % 2:
            time.sleep(0.0005)
        io.loop.remove_reader(mine)
        io.loop.add_reader(mine, on_readable)
        io.leave()
        deadline_s = time.monotonic() + WAIT_S
        while len(b"".join(read)) <= turn:
            assert time.monotonic() < deadline_s, "the loop reads the socket no more"
            time.sleep(0.0001)

    async def close() -> None:
        io.loop.remove_reader(mine)

    io.run(close(), WAIT_S)
    mine.close()
    theirs.close()


def test_flush_now_is_made_by_the_caller_if_the_loop_sleeps(io: IoThread) -> None:
    threads: list[str] = []
    io.on_wake(lambda: threads.append(threading.current_thread().name))
    until(lambda: io.visit(lambda: None), WAIT_S, "the loop sleeps")
    io.flush_now()
    assert threads == [threading.current_thread().name]
    io.enter()
    flushed = threading.Thread(target=io.flush_now)
    flushed.start()
    flushed.join(WAIT_S)
    io.leave()
    io.run(asyncio.sleep(0), WAIT_S)
    assert threads[1:] == ["stoker-io"]


def test_what_a_server_had_accepted_when_it_was_closed_is_closed_too(io: IoThread) -> None:
    """Found by a flood: asyncio forgets them, so that they stay open until the garbage collection."""

    async def close_while_accepting() -> None:
        server: asyncio.Server

        def protocol() -> asyncio.Protocol:
            server.close()
            return asyncio.Protocol()

        server = await io.loop.create_server(protocol, "127.0.0.1", 0)
        for _ in range(3):
            peers.append(socket.create_connection(server.sockets[0].getsockname()))

    peers: list[socket.socket] = []
    gc.disable()
    try:
        io.run(close_while_accepting(), WAIT_S)
        for peer in peers:
            peer.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionResetError):  # it was not accepted yet
                assert peer.recv(1) == b""
            peer.close()
    finally:
        gc.enable()
        gc.collect()


def test_a_guest_that_fails_takes_nothing_with_it(io: IoThread) -> None:
    reported: list[object] = []
    io.loop.set_exception_handler(lambda _, what: reported.append(what["exception"]))
    error = ValueError("a mistake of ours")

    def fail() -> None:
        raise error

    assert io.visit(fail)
    assert reported == [error]
    assert not io.is_current()
    assert io.visit(lambda: None)


def test_the_loop_thread_does_not_wait_for_itself(io: IoThread) -> None:
    io.enter()
    try:
        with pytest.raises(RuntimeError, match="cannot wait for a result"):
            io.run(asyncio.sleep(0), WAIT_S)
    finally:
        io.leave()


def test_the_error_of_a_call_keeps_nothing_of_its_caller(io: IoThread) -> None:
    class Held:
        pass

    async def fails() -> None:
        raise ValueError("no")

    def call(held: Held) -> weakref.ref[Held]:
        with contextlib.suppress(ValueError):
            io.run(fails(), 5.0)
        return weakref.ref(held)

    gc.disable()
    try:
        held = call(Held())
        io.run(asyncio.sleep(0), 5.0)  # the loop lets go of the call, too
        assert held() is None, "without a garbage collection"
    finally:
        gc.enable()


def test_no_destructor_of_a_cycle_runs_in_a_turn(io: IoThread) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            ran.append(io.is_current())

    ran: list[bool] = []
    for _ in range(50):
        io.enter()
        for _ in range(100):
            Cycle()
        io.leave()
    gc.collect()
    assert ran
    assert not any(ran)
    assert gc.isenabled()


def test_a_connection_that_nobody_closes_ends_with_the_loop() -> None:
    io = IoThread("test")
    io.start()
    lost = threading.Event()

    class Silent(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    mine, theirs = socket.socketpair()
    io.run(io.loop.create_connection(Silent, sock=theirs), WAIT_S)
    io.running = False
    io.stop()
    assert lost.is_set()
    assert mine.recv(1) == b""
    mine.close()
