"""A node's agent in ``stoker launch``: torch's elastic agent, whose members and restarts the driver decides.

``python -m stoker_train.launch.agent FD`` reads an :class:`AgentSpec` from stdin, and then each token that
the node's actor has instead of the one before; it writes events, as JSON lines, to the file descriptor.
It is a process of its own, started by the node's actor, as torch's agent handles signals. It never gives up
by itself: when workers fail it says so, and waits for the next members.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from typing import IO, TYPE_CHECKING, Any

import msgspec
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from stoker.runtime.net.http import HttpClient
from stoker_train.launch.kv_line import KvLine
from stoker_train.launch.membership import LeftError, MembersRendezvous
from stoker_train.launch.spec import (
    AgentSpec,
    Ended,
    Event,
    Failed,
    Failure,
    Formed,
    Ready,
    Spec,
    Succeeded,
)
from stoker_wire.http.auth import Credential

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_END_S = 24 * 3600.0
"""The driver ends an agent that waits for it, or goes on; for so long neither came only if it is gone."""
_TAIL_LINES = 30
_TAIL_NBYTES = 64 * 1024
_PREFIX = "[rank ${rank}] "


class Pipe:
    """The line to the node's actor. For any thread."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._lock = threading.Lock()

    def say(self, event: Event) -> None:
        """Send an event."""
        with self._lock:
            self._file.write(msgspec.json.encode(event) + b"\n")


class Logs(DefaultLogsSpecs):
    """The files of the workers' output, which is shown as well."""

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=folder, tee=Std.ALL)
        self.stderr_by_local_rank: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where the output of the workers that start now goes."""
        made = super().reify(envs)
        self.stderr_by_local_rank = made.stderrs
        return made


class Agent(LocalElasticAgent):
    """torch's agent for one node; who is in the run, and how often workers were restarted, it is told."""

    def __init__(self, worker_spec: WorkerSpec, logs: Logs, pipe: Pipe) -> None:
        super().__init__(worker_spec, logs, log_line_prefix_template=_PREFIX)
        handler = worker_spec.rdzv_handler
        assert isinstance(handler, MembersRendezvous)
        self._handler = handler
        self._logs = logs
        self._pipe = pipe

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # Of all agents the same: workers look for each other below the number of restarts.
        self._remaining_restarts = worker_group.spec.max_restarts - self._handler.members.restarts
        self._pipe.say(Formed(self._handler.members.number))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        if not self._handler.wait_superseded(0.0):
            failures = tuple(
                _failure(rank, one, self._logs) for rank, one in sorted(result.failures.items())
            )
            self._pipe.say(
                Failed(self._handler.members.number, failures or _unhealthy(worker_group))
            )
            if not self._handler.wait_superseded(_END_S):
                self._remaining_restarts = 0
                return result
        healthy: RunResult = RunResult(state=WorkerState.HEALTHY)
        return healthy  # what runs with the next set is restarted

    def _exit_barrier(self) -> None:
        # The others may need the store that this process serves.
        self._pipe.say(Succeeded(self._handler.members.number))
        self._handler.wait_superseded(_END_S)


def run(told: AgentSpec, credential: Credential, pipe: Pipe) -> None:
    """Run one node's part until it leaves, its workers have ended well, or it is killed."""
    spec = told.spec
    line = KvLine(HttpClient(told.address, token=credential), told.namespace)
    handler = MembersRendezvous(
        line, told.run_id, told.member, told.local_addr, spec.join_timeout_s
    )
    entrypoint, args = _command(spec)
    worker_spec = WorkerSpec(
        role=spec.role,
        local_world_size=spec.nproc,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=handler,
        max_restarts=spec.max_restarts,
        monitor_interval=spec.monitor_interval_s,
        local_addr=told.local_addr,
    )
    with tempfile.TemporaryDirectory(prefix="stoker-launch-") as scratch:
        if spec.log_dir:
            os.makedirs(spec.log_dir, exist_ok=True)
        agent = Agent(worker_spec, Logs(spec.log_dir or scratch), pipe)
        pipe.say(Ready())
        try:
            agent.run()
        finally:
            handler.shutdown()


def _command(spec: Spec) -> tuple[str, tuple[str, ...]]:
    if spec.no_python:
        return spec.command[0], spec.command[1:]
    module = ("-m",) if spec.module else ()
    return sys.executable, ("-u", *module, *spec.command)


def _failure(rank: int, failure: ProcessFailure, logs: Logs) -> Failure:
    """Return how a worker failed, with the traceback of its error file, else its last lines on stderr."""
    message: Any = failure.message
    cause = ""
    if isinstance(message, dict):
        cause = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    at_s = time.time()
    recorded = os.path.isfile(failure.error_file)
    if recorded:
        at_s = os.path.getmtime(failure.error_file)  # torch has it in whole seconds
    else:
        cause = _last_lines(logs.stderr_by_local_rank.get(failure.local_rank, ""))
        message = f"signal {failure.signal_name()}" if failure.exitcode < 0 else _last_of(cause)
    return Failure(
        rank=rank,
        local_rank=failure.local_rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        at_s=at_s,
        message=str(message),
        cause=cause,
        recorded=recorded,
    )


def _unhealthy(worker_group: WorkerGroup) -> tuple[Failure, ...]:
    """Return the failure of workers of which torch says no more than that."""
    first = worker_group.workers[0]
    why = "the workers of its node are unhealthy"
    told = Failure(
        rank=first.global_rank, local_rank=0, pid=0, exit_code=1, at_s=time.time(), message=why
    )
    return (told,)


def _last_of(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _last_lines(path: str) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL_NBYTES))
        return "".join(
            deque(file.read().decode(errors="replace").splitlines(keepends=True), _TAIL_LINES)
        )


def follow_tokens(said: IO[bytes], credential: Credential) -> None:
    """Show each token that the node's actor says; the workers that start from then on have it too."""
    for line in said:
        credential.replace(line.decode().strip())
        os.environ["STOKER_TOKEN"] = credential.token


def _own_stdin() -> IO[bytes]:
    """Return what this process reads; its workers read nothing."""
    own = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return own


def main() -> int:
    """Run as a process; return its exit code."""
    pipe = Pipe(int(sys.argv[1]))
    said = _own_stdin()
    told = msgspec.json.decode(said.readline(), type=AgentSpec)
    credential = Credential(told.token)
    threading.Thread(
        target=follow_tokens, args=(said, credential), name="stoker-tokens", daemon=True
    ).start()
    try:
        run(told, credential, pipe)
    except LeftError:
        pipe.say(Ended(left=True))
    except Exception as error:
        traceback.print_exc()
        pipe.say(Ended(left=False, message=f"{type(error).__name__}: {error}"))
        return 1
    else:
        pipe.say(Ended(left=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
