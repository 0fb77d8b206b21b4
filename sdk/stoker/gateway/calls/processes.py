"""The callers of a gateway: a process for each token that calls, started when its first request comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

import msgspec

from stoker.gateway.calls.spec import CallerSpec
from stoker.gateway.relay import Held
from stoker_wire.errors import StokerError, UnavailableError, error_for
from stoker_wire.http.auth import SECRETS
from stoker_wire.http.gateway.calls import CALLS_PATH, REFS_PATH
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker.gateway.admission import Pass

_log = logging.getLogger(__name__)
_READY_S = 30.0
_STOP_S = 12.0
_READY = b"ready\n"
MAX_CALLERS = 64
"""Processes at one gateway: each has some 60 MB."""


def is_call(path: str) -> bool:
    """Return whether a request is for a caller."""
    return path in (CALLS_PATH, REFS_PATH) or path.startswith((f"{CALLS_PATH}/", f"{REFS_PATH}/"))


class _Refusal(msgspec.Struct, frozen=True):
    """Reason for which a caller did not start."""

    code: str
    message: str


class _Caller:
    """The process of one token. It is open by that token, and ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, spec: CallerSpec, by: Pass) -> None:
        self.process = process
        self.path = spec.socket_path
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
    """The callers, by token."""

    def __init__(self, gcs_url: str, host: str) -> None:
        self._gcs_url = gcs_url
        self._host = host
        self._background = Background("callers")
        self._callers: dict[str, _Caller] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def connect(self, token: str, by: Pass) -> asyncio.Transport:
        """Return a connection to the caller of a token; UnavailableError if it cannot be had."""
        lock = self._locks.setdefault(token, asyncio.Lock())
        try:
            async with lock:
                for _ in range(2):  # one that was idle may be about to end
                    caller = self._callers.get(token) or await self._start(token, by)
                    try:
                        transport, _ = await asyncio.get_running_loop().create_unix_connection(
                            Held, caller.path
                        )
                    except OSError:
                        await self._end(token, caller)
                        continue
                    return transport
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
