"""The driver of ``stoker launch``, as a job: ``python -m stoker_train.launch.driver SPEC``.

Has an actor in each place that the run holds, and decides which of their agents form the next set: when nodes
come, go or are lost, and when workers fail, of which it counts the restarts. Submitted by the CLI; follows
:mod:`stoker_train.launch.places`. It must not import torch.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

import stoker
from stoker import kv
from stoker.exceptions import StokerError
from stoker.runtime import current
from stoker_train.launch.node import Node
from stoker_train.launch.places import Places, open_places
from stoker_train.launch.spec import (
    KEPT_S,
    RENDEZVOUS,
    STORE,
    Ended,
    Event,
    Failed,
    Failure,
    Formed,
    Lines,
    Members,
    Ready,
    Spec,
    Succeeded,
    members_key,
)

_LOOK_S = 0.2
_SETTLE_S = 0.7
"""After a failure: what else fails, or is lost, with it?"""
_GATHER_S = 30.0
"""For so long those that are ready wait for others that begin."""
_LEAVE_S = 40.0
_MOST_BREAKS = 3
_END_S = 10.0
_SIGNAL = 128


@dataclass(eq=False)
class _Member:
    """An agent, in its place: its actor, and how far it is."""

    name: str
    place: str
    actor: Any
    started_at_s: float = field(default_factory=time.monotonic)
    ready: bool = False
    joined: bool = False
    leaving: bool = False
    ended: bool = False
    succeeded_in: int = 0
    listener: threading.Thread | None = None


@dataclass
class _Failures:
    """The failures in the present set, and when they are judged."""

    judge_at_s: float
    all: list[Failure] = field(default_factory=list)


class Run:
    """One run, from its first set of members to its end."""

    def __init__(self, spec: Spec, places: Places, run_id: str, namespace: str) -> None:
        self._spec = spec
        self._places = places
        self._run_id = run_id
        self._namespace = namespace
        self._inbox: queue.Queue[tuple[_Member, Event]] = queue.Queue(10_000)
        self._members: dict[str, _Member] = {}
        self._set = Members(0, ())
        self._set_at_s = time.monotonic()
        self._import_s = 0.0
        self._formed: set[str] = set()
        self._failures: _Failures | None = None
        self._again = False
        self._breaks: dict[str, int] = {}
        self._started = 0
        self._starting_since_s = time.monotonic()
        self._leave_by_s: float | None = None
        self._exit_code: int | None = None

    def follow(self) -> int:
        """Run to the end; return the exit code."""
        try:
            while self._exit_code is None:
                self._follow_places()
                self._judge()
                self._publish()
                try:
                    member, event = self._inbox.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                self._take(member, event)
            self._end()
            return self._exit_code
        finally:
            for member in self._members.values():
                stoker.kill(member.actor)

    # -- places ------------------------------------------------------------------------------------

    def _follow_places(self) -> None:
        leaving = self._places.leaving
        for member in self._members.values():
            if member.place in leaving and not member.leaving:
                member.leaving = True
        if leaving:
            if self._leave_by_s is None:
                self._leave_by_s = time.monotonic() + min(_LEAVE_S, self._places.leave_by_s)
            if self._set.number and not self._has_left():
                return
        self._leave_by_s = None
        for member in [one for one in self._members.values() if one.leaving]:
            self._forget(member)
        self._places.accept()
        held = self._places.held
        for member in [one for one in self._members.values() if one.place not in held]:
            self._lose(member, "its place is gone")
        taken = {member.place for member in self._members.values()}
        sound = [place for place in held if self._breaks.get(place, 0) < _MOST_BREAKS]
        if held and len(sound) < self._spec.min_nodes:
            _say(
                f"{len(sound)} of {len(held)} places are of use, and {self._spec.min_nodes} are needed"
            )
            self._exit_code = 1
            return
        for place in sound:
            if place not in taken:
                self._start(place, held[place])

    def _has_left(self) -> bool:
        """Whether all that are to leave have; or must now."""
        assert self._leave_by_s is not None
        left = all(one.ended for one in self._members.values() if one.leaving and one.joined)
        return left or time.monotonic() >= self._leave_by_s

    def _start(self, place: str, strategy: Any) -> None:
        self._started += 1
        name = f"node-{self._started}"
        needs = self._spec.bundle
        others = {key: one for key, one in needs.items() if key not in ("CPU", "GPU", "memory")}
        actor = stoker.remote(
            num_cpus=needs.get("CPU", 0.0),
            num_gpus=needs.get("GPU", 0.0),
            resources=others,
            scheduling_strategy=strategy,
        )(Node).remote()
        member = _Member(name, place, actor)
        if not any(not one.ready for one in self._members.values()):
            self._starting_since_s = time.monotonic()
        self._members[name] = member
        events = actor.run.remote(self._spec, self._run_id, name, self._namespace)
        member.listener = threading.Thread(
            target=self._listen, args=(member, events), name=f"listen-{name}", daemon=True
        )
        member.listener.start()

    def _listen(self, member: _Member, events: Iterator[Any]) -> None:
        try:
            for ref in events:
                for event in stoker.get(ref, timeout=_GATHER_S):
                    if isinstance(event, Lines):
                        _show(event)
                    else:
                        self._inbox.put((member, event))
        except StokerError as error:
            self._inbox.put((member, Ended(left=False, message=error.one_line or str(error))))

    # -- events ------------------------------------------------------------------------------------

    def _take(self, member: _Member, event: Event) -> None:
        if self._members.get(member.name) is not member:
            return
        if isinstance(event, Ready):
            member.ready = True
            # What an agent imports, the script will too: a part of what each restart costs.
            self._import_s = time.monotonic() - member.started_at_s
        elif isinstance(event, Formed):
            self._take_formed(member, event.number)
        elif isinstance(event, Failed) and event.number == self._set.number:
            settle_s = _SETTLE_S if len(self._set.members) > 1 else 0.0
            if self._failures is None:
                self._failures = _Failures(time.monotonic() + settle_s)
            self._failures.all += event.failures
        elif isinstance(event, Succeeded):
            member.succeeded_in = event.number
            if not self._unfinished():
                self._exit_code = 0
        elif isinstance(event, Ended):
            member.ended = True
            if not event.left and not member.succeeded_in:
                self._lose(member, event.message)
            elif not member.leaving and not member.succeeded_in:
                self._forget(member)  # it was in a set too few; another begins in its place

    def _take_formed(self, member: _Member, number: int) -> None:
        if number != self._set.number:
            return
        self._breaks.pop(member.place, None)
        self._formed.add(member.name)
        if self._formed >= set(self._set.members):
            met_s = time.monotonic() - self._set_at_s
            self._places.ran(len(self._formed), met_s + self._import_s)

    def _lose(self, member: _Member, why: str) -> None:
        """Go on without a member that ended by itself."""
        if member.leaving:
            return
        self._forget(member)
        _say(f"{member.name} is lost: {why}")
        self._breaks[member.place] = self._breaks.get(member.place, 0) + 1
        if self._breaks[member.place] == _MOST_BREAKS:
            _say(
                f"none is started in its place again: {_MOST_BREAKS} have ended before their workers began"
            )

    def _forget(self, member: _Member) -> None:
        del self._members[member.name]
        stoker.kill(member.actor)

    # -- sets of members ---------------------------------------------------------------------------

    def _unfinished(self) -> set[str]:
        """Return the members of the present set that have not succeeded, in it or before: none runs again."""
        done = {one.name for one in self._members.values() if one.succeeded_in}
        return set(self._set.members) - done

    def _judge(self) -> None:
        """Restart after a failure, or end the run by it, once it is clear what has failed."""
        failures = self._failures
        if failures is None or time.monotonic() < failures.judge_at_s:
            return
        self._failures = None
        if any(name not in self._members for name in self._set.members):
            self._again = True  # they failed because a node was lost
            return
        if self._set.restarts < self._spec.max_restarts:
            self._again = True
            self._set = msgspec.structs.replace(self._set, restarts=self._set.restarts + 1)
            first = _root_cause(failures.all)
            _say(f"{_summary(first)}; restart {self._set.restarts} of {self._spec.max_restarts}")
            return
        first = _root_cause(failures.all)
        _tell_end(first, self._set, self._spec)
        self._exit_code = first.exit_code if first.exit_code > 0 else _SIGNAL - first.exit_code

    def _publish(self) -> None:
        """Name the next set, if it is time for it."""
        ready = {
            one.name
            for one in self._members.values()
            if one.ready and not one.ended and not one.leaving and not one.succeeded_in
        }
        finished = len(self._set.members) - len(self._unfinished())
        gone = self._unfinished() - ready
        new = ready - set(self._set.members)
        enough = len(ready) >= max(1, self._spec.min_nodes - finished)
        if not self._again and not gone:
            is_late = time.monotonic() - self._starting_since_s > _GATHER_S
            gathers = any(not one.ready and not one.ended for one in self._members.values())
            if not new or finished or (gathers and not is_late):
                return
        if enough:
            self._name(tuple(sorted(ready, key=lambda name: int(name.rpartition("-")[2]))))
        elif gone & {one.name for one in self._members.values() if one.leaving}:
            self._name(())  # who leaves must be told; who stays begins anew when there are enough

    def _name(self, members: tuple[str, ...]) -> None:
        """Make these the next set."""
        if members and self._set.members and members != self._set.members:
            before = ", ".join(self._set.members)
            _say(f"goes on with {', '.join(members)} (before: {before})")
        self._set = Members(self._set.number + 1, members, self._set.restarts)
        self._set_at_s = time.monotonic()
        for name in members:
            self._members[name].joined = True
        self._formed, self._failures, self._again = set(), None, False
        key = members_key(self._run_id, self._set.number)
        kv.put(key, msgspec.json.encode(self._set), namespace=self._namespace, ttl_s=KEPT_S)

    def _end(self) -> None:
        """Have the agents end by themselves, so that all they still have to say is shown."""
        self._name(())
        deadline_s = time.monotonic() + _END_S
        for member in self._members.values():
            if member.listener is not None and member.joined:
                member.listener.join(max(0.0, deadline_s - time.monotonic()))


def _root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that came first; one that was told to end is no cause."""
    return min(failures, key=lambda one: (one.exit_code == -signal.SIGTERM, one.at_s))


def _summary(failure: Failure) -> str:
    if failure.exit_code < 0:
        return f"rank {failure.rank} was ended by {failure.message}"
    cause = f": {failure.message}" if failure.message else ""
    return f"rank {failure.rank} failed with exit code {failure.exit_code}{cause}"


def _tell_end(failure: Failure, members: Members, spec: Spec) -> None:
    """Print the cause, the sentence last: the job's message is made of the last lines."""
    if failure.cause:
        what = "traceback" if failure.recorded else "last output on stderr"
        _say(f"{what} of rank {failure.rank}:")
        for line in failure.cause.splitlines():
            _say(f"    {line}")
    _say(f"after {members.restarts} of {spec.max_restarts} restarts: {_summary(failure)}")


def _show(event: Lines) -> None:
    stream = sys.stderr if event.stream == "stderr" else sys.stdout
    stream.write("".join(f"{line}\n" for line in event.lines))
    stream.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"stoker launch: {text}\n")
    sys.stderr.flush()


def _with_gpus(spec: Spec) -> Spec:
    if spec.gpu is not None:
        return spec
    return msgspec.structs.replace(spec, gpu=stoker.cluster_resources().get("GPU", 0.0) > 0)


def main() -> int:
    """Run the job; return its exit code."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    stoker.init(log_to_driver=False)
    job = current.runtime().job
    run_id, namespace = f"{job.job_id}-{os.environ.get('STOKER_JOB_ATTEMPT', '1')}", job.namespace
    spec = _with_gpus(spec)
    try:
        places = open_places(spec)
    except StokerError as error:
        _say(str(error))
        return 2
    try:
        return Run(spec, places, run_id, namespace).follow()
    finally:
        places.close()
        for prefix in (f"launch/{run_id}/", f"{RENDEZVOUS}/{run_id}.", f"{STORE}/{run_id}."):
            kv.delete_prefix(prefix, namespace=namespace)


if __name__ == "__main__":
    sys.exit(main())
