"""A few processes with torch, which tests run functions in: each time as ranks of a new gloo group."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 120.0
REPO = Path(__file__).resolve().parents[4]


class RankProcesses:
    """``run(function, world, *args)``: what ``function(rank, world, *args)`` returns on each rank."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                cwd=REPO,
            )
            for _ in range(count)
        ]
        self._answers: list[queue.Queue[Any]] = [queue.Queue() for _ in self._processes]
        self._threads = [
            threading.Thread(target=_read_all, args=(process.stdout, answers), daemon=True)
            for process, answers in zip(self._processes, self._answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        self.runs += 1
        store = str(self.folder / f"group-{self.runs}")
        for rank, process in enumerate(self._processes[:world]):
            assert process.stdin is not None
            pickle.dump(cloudpickle.dumps((function, (rank, world, *args), store)), process.stdin)
            process.stdin.flush()
        answers = []
        for rank in range(world):
            try:
                answers.append(self._answers[rank].get(timeout=WAIT_S))
            except queue.Empty:
                raise TimeoutError(f"rank {rank} of {world} did not answer") from None
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # they hold nothing, and torch takes its time to end
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.join()
            assert process.stdout is not None
            process.stdout.close()


def _read_all(stream: BinaryIO, answers: queue.Queue[Any]) -> None:
    while True:
        try:
            answers.put(cloudpickle.loads(pickle.load(stream)))
        except EOFError:
            answers.put(("its process has ended", None))
            return


def serve() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print is no answer
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, args, store = cloudpickle.loads(pickle.load(sys.stdin.buffer))
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
        meeting.set(f"done-{rank}", "")
        with contextlib.suppress(dist.DistStoreError):
            meeting.wait([f"done-{other}" for other in range(world)], timedelta(seconds=WAIT_S / 2))
        if dist.is_initialized():
            dist.destroy_process_group()
        pickle.dump(cloudpickle.dumps(answer), out)
        out.flush()


if __name__ == "__main__":
    serve()
