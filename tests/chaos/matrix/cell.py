"""One cell of the matrix: a workload goes on through a fault, and what it did is checked to the end."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.work import TaskState
from tests.chaos.matrix.faults import FAULTS
from tests.chaos.matrix.world import World, link_is_possible, pause, world
from tests.services import ServerUnavailable, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.matrix.faults import Fault
    from tests.chaos.matrix.world import Driver

GOES_ON_S = 120.0
AFTER_S = 2.0
"""What a fault leaves behind must show before the end."""
SETTLED_S = 40.0
MORE_FILES = 32
LONG_WAIT_S = 10.0
ASKED_AFTER_S = 4.0
"""A call that waits is asked why within this after the long wait."""
TERMINAL = {state.value for state in TaskState if state.terminal}
LOST_RESULT = {"ObjectLostError", "ObjectNodeDiedError"}
"""Errors of calls that finished, and whose result was lost."""
CRASH = re.compile(r"Traceback \(most recent call last\)|never retrieved|was never awaited|^Fatal ")

Waits = dict[str, list[tuple[float, float, str]]]
"""How long a call had waited, as of when, and what it was told, by call."""


@dataclass(slots=True)
class Outcome:
    """What became of a cell.

    ``gap_s`` is the longest time in which no call ended, ``slowest_s`` what the slowest call took of
    those that were open at some moment of the fault.
    """

    workload: str
    fault: str
    seed: int
    gap_s: float = 0.0
    slowest_s: float = 0.0
    usual_gap_s: float = 0.0
    calls: int = 0
    attempts: int = 0
    failed_once: dict[str, int] = field(default_factory=dict)
    waits: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    skipped: str = ""
    took_s: float = 0.0

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else "BROKEN" if self.broken else "right"


def run_cell(workload: str, fault: str, seed: int, folder: Path) -> Outcome:
    """Run one cell in ``folder``, which must not be there yet."""
    outcome = Outcome(workload, fault, seed)
    needs = FAULTS[fault].needs
    if needs.link and (reason := link_is_possible()):
        outcome.skipped = reason
        return outcome
    began_s = time.monotonic()
    own = random.Random(f"{seed} {workload} {fault}").randrange(1 << 30)
    folder.mkdir(parents=True)
    try:
        with world(folder, own, needs) as made:
            _run(made, outcome)
    except (ServerUnavailable, pytest.skip.Exception) as error:
        outcome.skipped = f"{error}"
    except (AssertionError, TimeoutError) as error:
        outcome.broken.append(f"{error}"[:3000])
    outcome.broken += _crashes(folder)
    outcome.took_s = round(time.monotonic() - began_s, 1)
    return outcome


def _run(made: World, outcome: Outcome) -> None:
    fault = FAULTS[outcome.fault]
    driver = made.start_driver(outcome.workload)
    driver.goes_on(2, GOES_ON_S)
    files = made.descriptors()
    struck_s = time.monotonic()
    fault.strike(made)
    over_s = time.monotonic()
    pause(AFTER_S)
    if fault.ends_driver:
        _check_nothing_left(made, driver, outcome)
        driver = made.start_driver(outcome.workload)
    driver.goes_on(2, GOES_ON_S)
    verdict = driver.end()
    outcome.failed_once = verdict["failed_once"]
    waits: Waits = verdict["waits"]
    outcome.waits = {call: (told[0][0], told[0][2]) for call, told in waits.items()}
    lines = [line for one in made.drivers for line in one.progress()]
    outcome.calls = sum(line["what"] == "began" for line in lines)
    outcome.usual_gap_s = _gap([line for line in lines if line["at_s"] < struck_s])
    outcome.gap_s = _gap(lines)
    outcome.slowest_s = slowest(lines, struck_s, over_s)
    for what in ("wrong", "lost", "refused"):
        outcome.broken += [f"{what}: {text}" for text in verdict[what]]
    settled = verdict["right"] + sum(outcome.failed_once.values())
    if settled != verdict["calls"] and not outcome.broken:
        outcome.broken.append(f"{settled} of {verdict['calls']} calls ended")
    if outcome.failed_once and not fault.hurts:
        outcome.broken.append(
            f"failed, and nothing that it needs died: {outcome.failed_once}\n{verdict['first_failed']}"
        )
    outcome.broken += unexplained(fault, driver.progress(), waits, over_s)
    for one in made.drivers:
        attempts = _history(made, one, outcome)
        _check_effects(one, attempts, outcome)
        outcome.attempts += sum(len(known) for known in attempts.values())
    _check_nothing_left(made, driver, outcome)
    _check_descriptors(made, files, outcome)


def _gap(lines: list[dict[str, Any]]) -> float:
    times = sorted(line["at_s"] for line in lines if line["what"] != "began")
    first = min((line["at_s"] for line in lines), default=0.0)
    gaps = (late - early for early, late in zip([first, *times], times, strict=False))
    return round(max(gaps, default=0.0), 2)


def slowest(lines: list[dict[str, Any]], struck_s: float, over_s: float) -> float:
    """What the slowest call took of those that were open between the two moments."""
    ends = [line for line in lines if line["what"] != "began"]
    took = [
        line["at_s"] - line["began_s"]
        for line in ends
        if line["began_s"] <= over_s and line["at_s"] >= struck_s
    ]
    return round(max(took, default=0.0), 2)


def unexplained(
    fault: Fault, lines: list[dict[str, Any]], waits: Waits, over_s: float
) -> list[str]:
    """Which calls waited for long without being told why, or were told something else.

    While it stands still a driver asks nobody, and is told nothing. Once the fault is over, other reasons
    may be true.
    """
    found = [
        f"{call} waited {waited_s} s, and that is not why: {reason}"
        for call, told in waits.items()
        for waited_s, at_s, reason in told
        if waited_s - fault.stops_driver_s > LONG_WAIT_S
        and at_s <= over_s
        and not fault.explains(reason)
    ]
    for line in lines:
        waited_s = line["at_s"] - line["began_s"] - fault.stops_driver_s
        asked = waited_s > LONG_WAIT_S + ASKED_AFTER_S and line["what"] != "began"
        if asked and line["key"] not in waits:
            found.append(f"{line['key']} waited {waited_s:.1f} s, and nobody says why")
    return found[:10]


# Effects and the history


def _history(made: World, driver: Driver, outcome: Outcome) -> dict[str, dict[int, dict[str, Any]]]:
    """The attempts of each of its tasks, once the history says how each call ended."""
    ends = {line["task_id"]: line for line in driver.progress() if line["what"] != "began"}
    known: dict[str, dict[int, dict[str, Any]]] = {}

    def missing() -> list[str]:
        known.clear()
        known.update(made.apart.attempts(driver.job_id))
        return [
            f"history: {task_id} {end['key']} {end['what']} {end['error']}, and its attempts are {short}"
            for task_id, end in ends.items()
            if not tells(short := states_of(known.get(task_id, {})), end["what"], end["error"])
        ] + [
            f"history: attempts of {task_id} have no end: {states_of(attempts)}"
            for task_id, attempts in known.items()
            if not TERMINAL.issuperset(states_of(attempts).values())
        ]

    try:
        until(lambda: not missing(), SETTLED_S, "the history is complete", interval_s=0.5)
    except TimeoutError:
        outcome.broken += missing()[:5]
    return known


def tells(states: dict[int, str], what: str, error: str = "") -> bool:
    """Whether all attempts are there with their ends, the last one with that which the driver saw."""
    if sorted(states) != list(range(len(states))) or not TERMINAL.issuperset(states.values()):
        return False
    finished = what == "ended" or error in LOST_RESULT
    return bool(states) and (states[max(states)] == "FINISHED") is finished


def states_of(attempts: dict[int, dict[str, Any]]) -> dict[int, str]:
    """The state of each attempt, in order."""
    return {at: attempts[at]["state"] for at in sorted(attempts)}


def _check_effects(
    driver: Driver, attempts: dict[str, dict[int, dict[str, Any]]], outcome: Outcome
) -> None:
    ended = {line["key"] for line in driver.progress() if line["what"] == "ended"}
    effects = driver.folder / "effects"
    lines = effects.read_text().splitlines() if effects.exists() else []
    runs = Counter(tuple(line.split()) for line in lines)
    unknown = [run for run in runs if int(run[2]) not in attempts.get(run[1], {})]
    outcome.broken += [f"history: ran, and is not there: {run}" for run in unknown[:5]]
    for journal in driver.folder.glob("*journal-*"):
        for line in journal.read_text().splitlines():
            call, *rest = line.split()
            runs[f"{journal.name}/{call}", *rest] += 1
    outcome.broken += [f"doubled: {run}" for run, count in runs.items() if count > 1]
    counts = Counter(key for key, *_ in runs)
    for key, count in counts.items():
        if key.startswith("once") and count > 1:
            outcome.broken.append(f"doubled: {key} ran {count} times")
    outcome.broken += [f"lost effect: {key}" for key in sorted(ended - counts.keys())[:5]]


# What is left


def _check_nothing_left(made: World, driver: Driver, outcome: Outcome) -> None:
    """Nothing of a driver that has ended is held: leases, actors, workers, objects."""
    job_id = driver.job_id

    def held() -> list[str]:
        query: dict[str, Any] = {"limit": 1000}
        living = {**query, "job_id": job_id, "state": "PENDING,ALIVE,RESTARTING"}
        actors = made.apart.client.call("GET", "/v1/actors", reply=dict[str, Any], query=living)
        found = [f"{one['state']} {one['actor_id']}" for one in actors["items"]]
        leases = made.apart.client.call("GET", "/v1/leases", reply=dict[str, Any], query=query)
        found += [f"lease {one['lease_id']}" for one in leases["items"] if one["job_id"] == job_id]
        for nodelet in made.apart.nodelets:
            client = HttpClient(nodelet.url, token=made.apart.token)
            for path in ("/v1/workers", "/v1/objects"):
                page = client.call("GET", path, reply=dict[str, Any], query=query)
                mine = [one for one in page["items"] if one["job_id"] == job_id]
                found += [f"{nodelet.name}: {one}" for one in mine]
        return found

    try:
        until(lambda: not held(), SETTLED_S, "leases end", interval_s=0.2)
    except TimeoutError:
        outcome.broken += [f"left: {what}"[:300] for what in held()[:5]]


def _check_descriptors(made: World, before: dict[int, list[str]], outcome: Outcome) -> None:
    def more() -> list[str]:
        now = made.descriptors()
        return [
            f"open files of {pid} grew by {Counter(now[pid]) - Counter(files)}"[:500]
            for pid, files in before.items()
            if len(now.get(pid, ())) > len(files) + MORE_FILES
        ]

    try:
        until(lambda: not more(), SETTLED_S, "files close", interval_s=0.5)
    except TimeoutError:
        outcome.broken += more()


def _crashes(folder: Path) -> list[str]:
    """Lines of services' logs that say that something of them broke."""
    found = []
    for log in folder.rglob("*.log"):
        if log.name.startswith(("worker-", "job-", "redis", "driver")):
            continue
        for line in log.read_text(errors="replace").splitlines():
            if CRASH.search(line) or '"level": "error"' in line:
                found.append(f"{log.name}: {line[:1500]}")
    return found[:5]
