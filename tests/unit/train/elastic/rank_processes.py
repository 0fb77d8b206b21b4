"""A few processes with torch, which tests run functions in: each time as ranks of a new gloo group."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WAIT_S = 280.0
"""For an answer of every rank: a busy machine needs long, and tests end after 300 s."""
REPO = Path(__file__).resolve().parents[4]


class RankProcesses:
    """``run(function, world, *args)``: what ``function(rank, world, *args)`` returns on each rank.

    One process imports torch, and the modules of ``preload``, then it forks: imports are most of the work.
    """

    def __init__(self, count: int, folder: Path, preload: Sequence[str] = ()) -> None:
        self.count, self.folder, self.runs = count, folder, 0
        self._preload = tuple(preload)
        self._start()

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        self.runs += 1
        store = str(self.folder / f"group-{self.runs}")
        try:
            for rank in range(world):
                job = cloudpickle.dumps((function, (rank, world, *args), store, WAIT_S))
                pickle.dump(job, self._jobs[rank])
                self._jobs[rank].flush()
            answers = [self._answer(rank, world) for rank in range(world)]
        except BaseException:
            self.close()  # what they still do would be taken for an answer to the next run
            self._start()
            raise
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)  # they hold nothing
        self._server.wait()
        for jobs in self._jobs:
            with contextlib.suppress(BrokenPipeError):
                jobs.close()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        ours, theirs = [], []
        for _ in range(self.count):
            job_end, job_start = os.pipe()
            answer_end, answer_start = os.pipe()
            ours.append((job_start, answer_end))
            theirs.append((job_end, answer_start))
        fds = [fd for pair in theirs for fd in pair]
        self._server = subprocess.Popen(
            [sys.executable, __file__, ",".join(self._preload), *map(str, fds)],
            pass_fds=fds,
            env=environment,
            cwd=REPO,
            start_new_session=True,
        )
        for fd in fds:
            os.close(fd)
        self._jobs = [os.fdopen(fd, "wb") for fd, _ in ours]
        self._answers: list[queue.Queue[Any]] = [queue.Queue() for _ in ours]
        self._threads = [
            threading.Thread(target=_read_all, args=(os.fdopen(fd, "rb"), answers), daemon=True)
            for (_, fd), answers in zip(ours, self._answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _answer(self, rank: int, world: int) -> tuple[str, Any]:
        try:
            text, value = self._answers[rank].get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"rank {rank} of {world} did not answer in {WAIT_S:g} s") from None
        if text == _ENDED:
            raise ChildProcessError(f"rank {rank} of {world}: its process has ended")
        return text, value


_ENDED = "its process has ended"


def _read_all(stream: BinaryIO, answers: queue.Queue[Any]) -> None:
    with stream:
        while True:
            try:
                answers.put(cloudpickle.loads(pickle.load(stream)))
            except (EOFError, pickle.UnpicklingError):
                answers.put((_ENDED, None))
                return


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    import torch.distributed as dist

    while True:
        try:
            function, args, store, wait_s = cloudpickle.loads(pickle.load(jobs))
        except EOFError:
            return
        rank, world = args[:2]
        meeting = dist.FileStore(store, world)
        try:
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
            answer = ("", function(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        # Whoever left at once would break the connection of one that still connects.
        with contextlib.suppress(RuntimeError):  # FileStore has no error of its own for a late one
            meeting.set(f"done-{rank}", "")
            meeting.wait([f"done-{other}" for other in range(world)], timedelta(seconds=wait_s))
        if dist.is_initialized():
            dist.destroy_process_group()
        pickle.dump(cloudpickle.dumps(answer), answers)
        answers.flush()


def fork(preload: Sequence[str], lines: Sequence[tuple[int, int]]) -> None:
    """Import torch once, and serve each line of (jobs, answers) in a process of its own."""
    os.dup2(2, 1)  # what tests print is no answer
    import torch

    torch.set_num_threads(1)
    for name in preload:
        import_module(name)
    threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 1
    assert threads == 1, f"{threads} threads run after the imports: a fork would lose them"
    for own in lines:
        if os.fork():
            continue
        for line in lines:  # else nobody would see the end of another rank
            if line is not own:
                os.close(line[0])
                os.close(line[1])
        serve(os.fdopen(own[0], "rb"), os.fdopen(own[1], "wb"))
        os._exit(0)
    for line in lines:
        os.close(line[0])
        os.close(line[1])
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    numbers = [int(fd) for fd in sys.argv[2:]]
    fork(
        sys.argv[1].split(",") if sys.argv[1] else (),
        list(zip(numbers[::2], numbers[1::2], strict=True)),
    )
