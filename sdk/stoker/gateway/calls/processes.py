"""The callers of a gateway: a process for each token that calls, started when its first request comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stoker.gateway.calls.handover import OnConnection, Receiver, connection_of, hand_over
from stoker.gateway.calls.spec import CallerSpec
from stoker.gateway.relay import Held
from stoker_wire.errors import StokerError, UnavailableError, error_for
from stoker_wire.http.auth import SECRETS
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker.gateway.admission import Pass
    from stoker.gateway.door import Door

T = TypeVar("T")

_log = logging.getLogger(__name__)
_READY_S = 30.0
_STOP_S = 12.0
_READY = b"ready\n"
MAX_CALLERS = 64
"""Processes at one gateway: each has some 60 MB."""


class _Refusal(msgspec.Struct, frozen=True):
    """Reason for which a caller did not start."""

    code: str
    message: str


class _Caller:
    """The process of one token. It is open by that token, and ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, spec: CallerSpec, by: Pass) -> None:
        self.process = process
        self.spec = spec
        self._folder = spec.folder
        self._by = by
        by.open.add(self)

    def abort(self) -> None:
        """End it at once: the token is not valid any more."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def forget(self) -> None:
        """Note that it has ended."""
        self._by.open.discard(self)
        shutil.rmtree(self._folder, ignore_errors=True)


class Callers:
    """The callers, by token; ``on_back`` takes the connections that they give back."""

    def __init__(self, gcs_url: str, host: str, on_back: OnConnection) -> None:
        self._gcs_url = gcs_url
        self._host = host
        self._background = Background("callers")
        self._on_back = on_back
        self._receiver: Receiver | None = None
        self._folder = ""
        self._callers: dict[str, _Caller] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def count(self) -> int:
        """The number of callers that there are, or that start."""
        return len(self._callers)

    async def connect(self, token: str, by: Pass) -> asyncio.Transport:
        """Return a connection to the caller of a token; UnavailableError if it cannot be had."""

        async def connect(caller: _Caller) -> asyncio.Transport:
            create = asyncio.get_running_loop().create_unix_connection
            return (await create(Held, caller.spec.socket_path))[0]

        return await self._use(token, by, connect)

    async def hand_over(self, token: str, by: Pass, door: Door) -> None:
        """Give a connection to the caller of a token, until a request comes on it that is for another.

        UnavailableError if there can be no caller. It must have no TLS.
        """
        if door.transport.is_closing():
            return
        with connection_of(door.transport) as connection:

            async def give(caller: _Caller) -> None:
                await hand_over(caller.spec.handover_path, connection, door.data)

            await self._use(token, by, give)
        door.transport.abort()  # which ends no connection: its caller has it

    async def _use(self, token: str, by: Pass, reach: Callable[[_Caller], Awaitable[T]]) -> T:
        """Reach the caller of a token, which is started if there is none."""
        lock = self._locks.setdefault(token, asyncio.Lock())
        try:
            async with lock:
                for _ in range(2):  # one that was idle may be about to end
                    caller = self._callers.get(token) or await self._start(token, by)
                    try:
                        return await reach(caller)
                    except OSError:
                        await self._end(token, caller)
        finally:
            if token not in self._callers and not lock.locked():
                self._locks.pop(token, None)
        raise UnavailableError("the process that makes this token's calls ended\ntry again")

    async def _start(self, token: str, by: Pass) -> _Caller:
        if len(self._callers) >= MAX_CALLERS:
            raise UnavailableError(
                f"{MAX_CALLERS} tokens make calls at this gateway\n"
                "try again later, or start another gateway"
            )
        spec = CallerSpec(
            gcs_url=self._gcs_url,
            token=token,
            user=by.sender,
            host=self._host,
            folder=tempfile.mkdtemp(prefix="stoker-calls-"),
            gateway_path=self._back().path,
        )
        environ = {name: text for name, text in os.environ.items() if name not in SECRETS}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "stoker.gateway.calls"),
            env={**environ, "STOKER_LOG_UNSEEN_ERRORS": "0"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        caller = _Caller(process, spec, by)
        try:
            await self._until_ready(process, spec)
        except BaseException:
            caller.abort()
            await process.wait()
            caller.forget()
            raise
        self._callers[token] = caller
        self._background.spawn(self._until_ended(token, caller), name="caller")
        _log.info("a caller of %s started, pid %d", by.owner, process.pid)
        return caller

    def _back(self) -> Receiver:
        """Return the listener for what callers give back, from the first caller on."""
        if self._receiver is None:
            self._folder = tempfile.mkdtemp(prefix="stoker-gateway-")
            path = os.path.join(self._folder, "back.sock")
            self._receiver = Receiver(path, self._on_back, self._background)
            self._receiver.start()
        return self._receiver

    async def _until_ready(self, process: asyncio.subprocess.Process, spec: CallerSpec) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            await process.stdin.drain()
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), _READY_S)
        if line == _READY:
            return
        error: StokerError = UnavailableError(
            f"the process that makes this token's calls did not start within {_READY_S:g} s\n"
            "the gateway's log has what it said"
        )
        with contextlib.suppress(msgspec.MsgspecError):
            refusal = msgspec.json.decode(line, type=_Refusal)
            error = error_for(refusal.code, refusal.message)
        raise error

    async def _until_ended(self, token: str, caller: _Caller) -> None:
        """Forget a caller once it has ended, for whatever reason."""
        await caller.process.wait()
        if self._callers.get(token) is caller:
            del self._callers[token]
        caller.forget()

    async def _end(self, token: str, caller: _Caller) -> None:
        """Have a caller end in order, and wait until it has."""
        if caller.process.stdin is not None:
            caller.process.stdin.close()
        try:
            await asyncio.wait_for(caller.process.wait(), _STOP_S)
        except TimeoutError:
            caller.abort()
        await self._until_ended(token, caller)

    async def close(self) -> None:
        """End all of them in order."""
        async with asyncio.TaskGroup() as group:
            for token, caller in self._callers.items():
                group.create_task(self._end(token, caller))
        await self._background.close()
        if self._receiver is not None:
            self._receiver.close()
            shutil.rmtree(self._folder, ignore_errors=True)
