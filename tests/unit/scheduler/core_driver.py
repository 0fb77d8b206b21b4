"""The scheduler core with nodelets that obey at once: what its tests drive."""

from __future__ import annotations

import itertools
from typing import Any

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.state import SchedulingPolicy, State

POLICY = SchedulingPolicy(infeasible_grace_s=2.0, lease_ttl_s=10.0, reserve_after_s=5.0)


class Core:
    """A core whose nodelets obey at once, unless ``slow``."""

    def __init__(self, *nodes: dict[str, float], slow: bool = False) -> None:
        self.state = State(policy=POLICY, term="1")
        self.slow = slow
        self.at_s = 0.0
        self.out: list[cmd.Command] = []
        self._numbers = itertools.count(1)
        for index, resources in enumerate(nodes):
            self.feed(ev.NodeJoined(at_s=0.0, spec=make_node_spec(f"n_{index + 1}", resources)))

    def feed(self, event: ev.Event) -> list[cmd.Command]:
        """Apply an event and what obedient nodelets answer; return all commands."""
        done: list[cmd.Command] = []
        events = [event]
        while events:
            out = step(self.state, events.pop(0))
            self.state.check()
            done += out
            for command in [] if self.slow else out:
                answer = _answer(command, self.at_s)
                if answer is not None:
                    events.append(answer)
        self.out += done
        return done

    def ask(self, owner: str = "p_1", count: int = 1, wait_s: float = 100.0, **options: Any) -> str:
        """Ask for leases of the resources among ``options``; return the request's id."""
        request_id = options.pop("request_id", f"r_{next(self._numbers)}")
        event = {n: options.pop(n) for n in list(options) if n in ev.LeaseRequested.__slots__}
        requirements = event.pop("requirements", None) or make_requirements(options)
        self.feed(
            ev.LeaseRequested(
                **{
                    "at_s": self.at_s,
                    "request_id": request_id,
                    "owner_id": owner,
                    "job_id": "job_1",
                    "requirements": requirements,
                    "class_key": requirements.text,
                    "count": count,
                    "deadline_s": self.at_s + wait_s,
                    **event,
                }
            )
        )
        return request_id

    def group(
        self, strategy: str, *bundles: dict[str, float], group_id: str = "pg_1", **options: Any
    ) -> str:
        """Add a placement group and ask for its bundles; return the request's id."""
        gang = make_gang([make_requirements(b) for b in bundles], GangStrategy(strategy))
        self.feed(ev.GroupAdded(at_s=self.at_s, group_id=group_id, job_id="job_1", gang=gang))
        return self.ask_gang(gang, group_id=group_id, **options)

    def ask_gang(
        self,
        gang: Gang,
        *,
        group_id: str = "pg_1",
        indices: tuple[int, ...] | None = None,
        **options: Any,
    ) -> str:
        """Ask for bundles of a group that was added."""
        return self.ask(
            owner="gcs",
            requirements=gang,
            class_key=group_id,
            kind=ev.Kind.BUNDLE,
            group_id=group_id,
            indices=tuple(range(len(gang.bundles))) if indices is None else indices,
            wait_if_infeasible=True,
            **options,
        )

    def held(self, group_id: str = "pg_1") -> dict[int, str]:
        """Return the node of each bundle of a group that is held."""
        return {i: place.node_id for i, place in self.state.groups[group_id].bundles.items()}

    def granted(self, request_id: str) -> tuple[str, ...] | None:
        """Return what a request was granted last, or None if nothing yet."""
        replies = [c.lease_ids for c in self.out if is_reply(c, cmd.Reply, request_id)]
        return replies[-1] if replies else None

    def wait(self, seconds: float, renew: bool = True) -> list[cmd.Command]:
        """Let time pass; owners renew what they hold."""
        done = []
        for _ in range(int(seconds * 4)):
            self.at_s += 0.25
            if renew:
                owners: dict[str, list[str]] = {}
                for lease in self.state.leases.values():
                    owners.setdefault(lease.owner_id, []).append(lease.lease_id)
                for owner_id, ids in owners.items():
                    self.poll(owner_id, *ids)
            done += self.feed(ev.Tick(at_s=self.at_s))
        return done

    def poll(self, owner: str, *ids: str, idle: tuple[str, ...] = ()) -> list[cmd.Command]:
        return self.feed(
            ev.OwnerPolled(at_s=self.at_s, owner_id=owner, lease_ids=ids, idle_lease_ids=idle)
        )

    def release(self, *ids: str) -> list[cmd.Command]:
        return self.feed(ev.LeaseReleased(at_s=self.at_s, lease_ids=ids))


def _answer(command: cmd.Command, at_s: float) -> ev.Event | None:
    """Return what an obedient nodelet answers."""
    match command:
        case cmd.StartWorker():
            return ev.LeaseStarted(at_s=at_s, lease_id=command.lease_id)
        case cmd.HoldBundles():
            return ev.BundlesHeld(at_s=at_s, lease_ids=command.lease_ids)
        case cmd.CommitBundles():
            return ev.BundlesCommitted(at_s=at_s, lease_ids=command.lease_ids)
        case cmd.ReleaseLease():
            return ev.LeaseEnded(at_s=at_s, lease_id=command.lease_id)
        case _:
            return None


def is_reply(command: cmd.Command, kind: type, request_id: str) -> bool:
    return isinstance(command, kind) and getattr(command, "request_id", "") == request_id


def of(kind: type, out: list[cmd.Command]) -> list[Any]:
    return [command for command in out if isinstance(command, kind)]
