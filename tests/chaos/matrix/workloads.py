"""Four workloads whose answers are known beforehand, run by a driver of their own until told to stop.

``python -m tests.chaos.matrix.workloads NAME FOLDER SEED`` joins the cluster of ``STOKER_ADDRESS``, runs
rounds of calls until ``FOLDER/stop`` is there, and compares each answer with the serial evaluation,
computed here. What calls do is seen in files: ``effects`` has a line for each attempt of a task that
ran, ``journal-*`` one for each call of an actor. ``progress.jsonl`` has a line for each call that
began and ended, by a clock that all processes of the machine share; ``verdict.json`` the rest. A file
``hold-gil-call`` is taken by the next call, ``hold-gil-driver`` by the driver, as an order to keep the
interpreter for that long.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import stoker
from stoker import exceptions

if TYPE_CHECKING:
    from collections.abc import Callable

RETRIES = 30
"""For calls that must come right whatever happens."""
LOST_AFTER_S = 150.0
"""A call that is open for longer counts as lost."""
LONG_WAIT_S = 10.0
"""A wait beyond this must say what it waits for."""
WORK_S = 0.02
MODULUS = 1_000_003


# Tasks with effects


def leave_effect(folder: str, key: str) -> None:
    """Append one line, whole, for this attempt; then hold the interpreter if there is an order to."""
    context = stoker.get_runtime_context()
    line = f"{key} {context.task_id} {context.attempt}\n".encode()
    file = os.open(f"{folder}/effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    obey(Path(folder), "hold-gil-call")


def obey(folder: Path, name: str) -> None:
    """Hold the interpreter if there is an order to; one process takes an order."""
    order, taken = folder / name, folder / f"{name}.taken-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        order.rename(taken)
        ctypes.PyDLL(None).usleep(int(float(taken.read_text()) * 1e6))


def scrambled(number: int) -> int:
    """What a task answers."""
    return (number * 7919 + 13) % MODULUS


@stoker.remote(max_retries=RETRIES)
def work(folder: str, key: str, number: int) -> int:
    leave_effect(folder, key)
    time.sleep(WORK_S)
    return scrambled(number)


# Actors


def folded(state: int, number: int) -> int:
    """The next state of an actor."""
    return (state * 31 + number) % MODULUS


@stoker.remote(num_cpus=0)
class Ledger:
    """An actor whose journal outlives it: a call that is repeated answers as it did."""

    def __init__(self, journal: str) -> None:
        self.journal = Path(journal)
        self.answers: dict[int, int] = {}
        self.state = 0
        if self.journal.exists():
            for line in self.journal.read_text().splitlines():
                call, number = map(int, line.split()[:2])
                self.apply(call, number)

    def apply(self, call: int, number: int) -> None:
        if call not in self.answers:
            self.state = self.answers[call] = folded(self.state, number)

    def add(self, call: int, number: int) -> int:
        with self.journal.open("a") as file:
            file.write(f"{call} {number} {os.getpid()}\n")
        self.apply(call, number)
        obey(self.journal.parent, "hold-gil-call")
        time.sleep(WORK_S / 4)
        return self.answers[call]


# Streams


@stoker.remote(max_retries=RETRIES, num_returns="streaming")
def stream(folder: str, key: str, seed: int, count: int) -> Any:
    leave_effect(folder, key)
    for at in range(count):
        time.sleep(WORK_S)
        yield (seed, at, scrambled(seed + at))


# A graph of tasks


@stoker.remote(max_retries=RETRIES)
def node_value(
    folder: str, key: str, kind: str, number: int, borrowed: list[Any], *inputs: Any
) -> Any:
    """One node of a graph; the runtime fetches ``inputs``, ``borrowed`` holds refs."""
    leave_effect(folder, key)
    return evaluate(kind, number, [*inputs, *stoker.get(borrowed)])


def evaluate(kind: str, number: int, values: list[Any]) -> Any:
    """The value of a node: what the cluster and the serial evaluation both run."""
    if kind == "array":
        base = np.arange(number % 60_000 + 20_000, dtype=np.int64)
        return base + sum(int(np.sum(value) % MODULUS) for value in values)
    return (
        number + sum(int(np.sum(value)) * (at + 3) for at, value in enumerate(values))
    ) % MODULUS


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a random graph: its function, and which earlier nodes it reads, how."""

    kind: str
    number: int
    inputs: tuple[int, ...]
    borrowed: tuple[int, ...]
    once: bool
    """Without retries; none reads it, so that it fails alone."""


def random_graph(seed: str, size: int) -> list[GraphNode]:
    """A graph in topological order; the same for the same seed."""
    dice = random.Random(seed)
    made: list[GraphNode] = []
    for at in range(size):
        repeatable = [i for i in range(at) if not made[i].once]
        before = dice.sample(repeatable, min(len(repeatable), dice.randrange(4)))
        cut = dice.randrange(len(before) + 1)
        kind = "array" if dice.random() < 0.3 else "number"
        inputs, borrowed = tuple(before[:cut]), tuple(before[cut:])
        made.append(GraphNode(kind, dice.randrange(MODULUS), inputs, borrowed, at % 4 == 3))
    return made


def serial(graph: list[GraphNode]) -> list[Any]:
    """The value of each node, without a cluster."""
    values: list[Any] = []
    for node in graph:
        read = [values[at] for at in (*node.inputs, *node.borrowed)]
        values.append(evaluate(node.kind, node.number, read))
    return values


# The driver


@dataclass(slots=True)
class Call:
    """A call and what it must answer. ``once`` may fail with a cause, and have no effect twice."""

    key: str
    expected: Any
    once: bool = False
    task_id: str = ""
    since_s: float = field(default_factory=time.monotonic)
    asked_s: float = 0.0


@dataclass(slots=True)
class Verdict:
    """What became of the calls of a run. ``waits`` has how long each waited, as of when, and why."""

    workload: str
    seed: int
    job_id: str = ""
    calls: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Errors of calls with retries."""
    failed_once: Counter[str] = field(default_factory=Counter)
    """Errors of calls without, by class."""
    first_failed: str = ""
    """The first of these."""
    waits: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)


class Recorder:
    """Follows calls to their end, and writes down when each began, ended and why it waits."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        self.folder = folder
        self.verdict = verdict
        self._progress = (folder / "progress.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()

    def began(self, call: Call, task_id: str) -> None:
        call.task_id = task_id
        with self._lock:
            self.verdict.calls += 1
            self._write("began", call)

    def answered(self, call: Call, value: Any) -> None:
        with self._lock:
            if np.array_equal(value, call.expected):
                self.verdict.right += 1
            else:
                self.verdict.wrong.append(f"{call.key}: {value!r}, not {call.expected!r}"[:300])
            self._write("ended", call)

    def failed(self, call: Call, error: BaseException) -> None:
        text = f"{call.key}: {type(error).__name__}: {error}"[:1200]
        with self._lock:
            if call.once and isinstance(error, exceptions.WorkFailedError):
                self.verdict.failed_once[type(error).__name__] += 1
                self.verdict.first_failed = self.verdict.first_failed or text
            else:
                self.verdict.refused.append(text)
            self._write("failed", call, type(error).__name__)

    def waits(self, call: Call, reason: str) -> None:
        if not reason:
            return
        with self._lock:
            waited_s = round(time.monotonic() - call.since_s, 1)
            self.verdict.waits.setdefault(call.key, []).append((waited_s, time.monotonic(), reason))

    def lost(self, call: Call) -> None:
        with self._lock:
            self.verdict.lost.append(f"{call.key} ({call.task_id})")

    def settle(self, open_calls: dict[Any, Call]) -> None:
        """Wait for all of them."""
        while open_calls:
            obey(self.folder, "hold-gil-driver")
            done, _ = stoker.wait(list(open_calls), timeout=1.0, fetch_local=False)
            for ref in done:
                call = open_calls.pop(ref)
                try:
                    value = stoker.get(ref, timeout=LOST_AFTER_S)
                except exceptions.StokerError as error:
                    self.failed(call, error)
                else:
                    self.answered(call, value)
            now_s = time.monotonic()
            for ref, call in list(open_calls.items()):
                if now_s - call.since_s > LOST_AFTER_S:
                    self.lost(call)
                    del open_calls[ref]
                elif min(now_s - call.since_s, now_s - call.asked_s) > LONG_WAIT_S:
                    call.asked_s = now_s
                    self.waits(call, why(ref))

    def _write(self, what: str, call: Call, error: str = "") -> None:
        line = {"at_s": time.monotonic(), "what": what, "key": call.key, "began_s": call.since_s}
        line |= {"task_id": call.task_id, "error": error}
        self._progress.write(json.dumps(line) + "\n")


def why(ref: Any) -> str:
    """What the runtime says a ref waits for; '' if it has ended."""
    try:
        stoker.get(ref, timeout=0.01)
    except exceptions.GetTimeoutError as error:
        return str(error)
    except exceptions.StokerError:
        pass
    return ""


class Workload(ABC):
    """Rounds of calls; ``folder`` is where their effects are."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self.recorder = recorder
        self.folder = recorder.folder
        self.seed = seed

    @abstractmethod
    def round(self, number: int) -> None:
        """Make calls, and see each to its end."""

    def end(self) -> None:  # noqa: B027 - most share nothing
        """Let go what rounds have shared."""


class Tasks(Workload):
    """Tasks that leave an effect for each attempt; one in four has no retries."""

    def round(self, number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        calls: dict[Any, Call] = {}
        for at in range(24):
            once, value = at % 4 == 3, dice.randrange(MODULUS)
            call = Call(f"{'once' if once else 'task'}-{number}-{at}", scrambled(value), once)
            function = work.options(max_retries=0) if once else work
            ref = function.remote(str(self.folder), call.key, value)
            self.recorder.began(call, ref.task_id)
            calls[ref] = call
        self.recorder.settle(calls)


class Actors(Workload):
    """Two actors with retries, one without: each answers by the calls before, in their order."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        super().__init__(recorder, seed)
        self._count = 0
        self._ledgers = {f"journal-{at}": self._ledger(f"journal-{at}") for at in range(2)}
        self._states = dict.fromkeys(self._ledgers, 0)

    def _ledger(self, name: str, retries: int = -1) -> Any:
        options = Ledger.options(max_restarts=retries, max_task_retries=retries)
        return options.remote(str(self.folder / name))

    def round(self, number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        calls: dict[Any, Call] = {}
        once = f"once-journal-{number}"
        targets = [*self._ledgers.items(), (once, self._ledger(once, retries=0))]
        self._states[once] = 0
        for at in range(12):
            for name, ledger in targets:
                value = dice.randrange(MODULUS)
                self._states[name] = folded(self._states[name], value)
                order = number * 100 + at
                call = Call(f"{name}/{order}", self._states[name], once=name == once)
                ref = ledger.add.remote(order, value)
                self.recorder.began(call, ref.task_id)
                calls[ref] = call
        self.recorder.settle(calls)

    def end(self) -> None:
        self._ledgers.clear()


class Streams(Workload):
    """Generators that yield while they run; one in four has no retries."""

    def round(self, number: int) -> None:
        threads = [
            threading.Thread(target=self._follow, args=(number * 100 + at, at == 3))
            for at in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _follow(self, seed: int, once: bool) -> None:
        seed += self.seed
        count = 20
        expected = [(seed, at, scrambled(seed + at)) for at in range(count)]
        call = Call(f"{'once-' if once else ''}stream-{seed}", expected, once)
        items = (stream.options(max_retries=0) if once else stream).remote(
            str(self.folder), call.key, seed, count
        )
        self.recorder.began(call, items.task_id)
        read: list[Any] = []
        done = threading.Event()
        threading.Thread(target=self._watch, args=(items.completed(), call, done)).start()
        try:
            for ref in items:
                obey(self.folder, "hold-gil-driver")
                read.append(stoker.get(ref, timeout=LOST_AFTER_S))
        except exceptions.GetTimeoutError:
            self.recorder.lost(call)
        except exceptions.StokerError as error:
            if read != expected[: len(read)]:
                self.recorder.answered(call, read)
            else:
                self.recorder.failed(call, error)
        else:
            self.recorder.answered(call, read)
        finally:
            done.set()

    def _watch(self, completed: Any, call: Call, done: threading.Event) -> None:
        while not done.wait(LONG_WAIT_S):
            self.recorder.waits(call, why(completed))


class Graph(Workload):
    """A random graph of tasks over numbers and arrays, some read by refs that they borrow.

    One in four has no retries.
    """

    def round(self, number: int) -> None:
        graph = random_graph(f"{self.seed} {number}", 30)
        expected = serial(graph)
        refs: list[Any] = []
        calls: dict[Any, Call] = {}
        for at, node in enumerate(graph):
            key = f"{'once-' if node.once else ''}node-{number}-{at}"
            call = Call(key, expected[at], node.once)
            function = node_value.options(max_retries=0) if node.once else node_value
            inputs = [refs[i] for i in node.inputs]
            borrowed = [refs[i] for i in node.borrowed]
            ref = function.remote(str(self.folder), key, node.kind, node.number, borrowed, *inputs)
            refs.append(ref)
            self.recorder.began(call, ref.task_id)
            calls[ref] = call
        self.recorder.settle(calls)


WORKLOADS: dict[str, Callable[[Recorder, int], Workload]] = {
    "tasks": Tasks,
    "actors": Actors,
    "streams": Streams,
    "graph": Graph,
}


def main(name: str, folder: Path, seed: int) -> None:
    """Run one workload until ``stop`` is there, then write the verdict."""
    stoker.init(log_to_driver=False)
    verdict = Verdict(name, seed, stoker.get_runtime_context().job_id)
    recorder = Recorder(folder, verdict)
    (folder / "job").write_text(verdict.job_id)
    workload = WORKLOADS[name](recorder, seed)
    number = 0
    while not (folder / "stop").exists():
        workload.round(number)
        number += 1
        (folder / "rounds").write_text(str(number))
    workload.end()
    stoker.shutdown()
    text = json.dumps({slot: getattr(verdict, slot) for slot in verdict.__slots__})
    (folder / "verdict.part").write_text(text)
    (folder / "verdict.part").rename(folder / "verdict.json")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
