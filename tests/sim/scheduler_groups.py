"""The gcs's half of placement groups in a simulated cluster: made, placed, placed again, removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from tests.sim.scheduler_queues import QUEUES, USERS
from tests.sim.scheduler_runtimes import ASK_WAIT_S, Owner, Runtimes, Wish

if TYPE_CHECKING:
    from random import Random

    from tests.sim.late_messages import Faults

OWNER = "gcs"


@dataclass
class Group:
    """A placement group's record: the bundles that were granted, with their nodes' incarnations."""

    group_id: str
    job_id: str
    gang: Gang
    whole: bool
    """Whether the loss of one bundle gives up the others."""
    preemptible: bool = False
    attempt: int = 0
    held: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    was_on: set[str] = field(default_factory=set)
    """The nodes that have ever held one of its bundles."""
    removed: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.gang.bundles)) if i not in self.held)

    @property
    def request_id(self) -> str:
        return f"r_{self.group_id}.{self.attempt}"


class Groups(Runtimes):
    """All placement groups of a world. What the gcs writes down reaches the scheduler in order."""

    def __init__(self, random: Random, faults: Faults) -> None:
        super().__init__(random, faults)
        self.groups: list[Group] = []
        self.placed_groups = 0
        self.preempted_groups = 0
        self.emptied: set[str] = set()
        """Nodes that an operator has had emptied."""

    def make_group(self, job_id: str) -> Group:
        random = self.random
        bundles = [
            make_requirements(
                random.choice([{"CPU": 1.0}, {"CPU": 2.0}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5}]),
                extenders=("x",) if random.random() < 0.2 else (),
            )
            for _ in range(random.choice([1, 2, 2, 3, 4]))
        ]
        gang = make_gang(bundles, random.choice(list(GangStrategy)))
        whole = gang.strategy is GangStrategy.STRICT_PACK or random.random() < 0.3
        preemptible = random.random() < 0.5
        group = Group(f"pg{len(self.groups)}", job_id, gang, whole, preemptible)
        self.groups.append(group)
        self.feed(self.added(group))
        self.ask_group(group)
        return group

    def added(self, group: Group) -> ev.GroupAdded:
        return ev.GroupAdded(
            at_s=self.at_s, group_id=group.group_id, job_id=group.job_id, gang=group.gang
        )

    def preempt_group(self, group_id: str, lease_id: str) -> None:
        """The gcs writes down that all bundles are to be placed again, and asks for them."""
        group = next(one for one in self.groups if one.group_id == group_id)
        # It leaves as a whole, whichever of its bundles is on the node that is emptied.
        assert group.preemptible or group.was_on & self.emptied, f"{group_id} is not preemptible"
        if lease_id in (held for held, _, _ in group.held.values()):
            group.attempt += 1
            group.held.clear()
            self.preempted_groups += 1
            self.ask_group(group)

    def bundle_held(self, group_id: str, node_id: str) -> None:
        """Note what a nodelet holds, of which the gcs may hear late, or never."""
        next(one for one in self.groups if one.group_id == group_id).was_on.add(node_id)

    def remove_group(self, group: Group) -> None:
        if not group.removed:
            group.removed = True
            self.feed(ev.GroupRemoved(at_s=self.at_s, group_id=group.group_id))

    def wish_in_group(self, owner: Owner, group: Group) -> None:
        """Have ``owner`` want leases in a bundle of the group."""
        random = self.random
        bundle = random.choice([-1, random.randrange(len(group.gang.bundles))])
        resources = random.choice([{"CPU": 1.0}, {"CPU": 1.0}, {"GPU": 0.5}, {}])
        requirements = make_requirements(resources, group_id=group.group_id, bundle=bundle)
        wish = Wish(owner, requirements, random.choice([1, 2]), random.uniform(0.05, 2.0), 0)
        self.wishes.append(wish)
        self.ask(wish)

    def ask_group(self, group: Group) -> None:
        missing, request_id = group.missing, group.request_id
        if group.removed or not missing:
            return
        bundles: list[Requirements] = [group.gang.bundles[index] for index in missing]
        taken = [node_id for _, node_id, _ in group.held.values()]
        gang = make_gang(bundles, group.gang.strategy, taken=taken)
        self.counts[request_id] = len(missing)

        def arrive() -> None:
            self.feed(
                ev.LeaseRequested(
                    at_s=self.at_s,
                    request_id=request_id,
                    owner_id=OWNER,
                    job_id=group.job_id,
                    requirements=gang,
                    class_key=request_id,
                    count=1,
                    deadline_s=self.at_s + ASK_WAIT_S,
                    kind=ev.Kind.BUNDLE,
                    group_id=group.group_id,
                    indices=missing,
                    user=USERS[group.job_id],
                    queue=QUEUES[group.job_id],
                    preemptible=group.preemptible,
                    preemption_grace_s=0.5,
                )
            )

        def again() -> None:
            if group.request_id == request_id:
                self.ask_group(group)

        self.message(arrive)
        self.later(ASK_WAIT_S + 3.0, again)

    def group_answered(self, request_id: str, granted: dict[int, tuple[str, str, int]]) -> None:
        """Write down what a request for a gang was granted; nothing if its wait has passed."""
        group = next((one for one in self.groups if one.request_id == request_id), None)
        if group is None or group.removed or not group.missing or not granted:
            return
        assert tuple(sorted(granted)) == group.missing, f"{request_id} is not whole: {granted}"
        nodes = [node_id for _, node_id, _ in (*group.held.values(), *granted.values())]
        if group.gang.strategy is GangStrategy.STRICT_PACK:
            assert len(set(nodes)) == 1, f"{request_id}: {nodes}"
        if group.gang.strategy is GangStrategy.STRICT_SPREAD:
            assert len(set(nodes)) == len(nodes), f"{request_id}: {nodes}"

        def arrive() -> None:
            if group.request_id == request_id and not group.removed and group.missing:
                group.held.update(granted)
                self.placed_groups += 1

        self.message(arrive)

    def group_refused(self, request_id: str) -> None:
        """Remove a group that can never be placed, as a user would."""
        for group in self.groups:
            if group.request_id == request_id:
                self.later(0.1, lambda group=group: self.remove_group(group))

    def bundles_lost(self, node_id: str, before_incarnation: int) -> None:
        """Have the bundles on a node that died placed again, after the gcs has heard of it."""
        for group in self.groups:
            lost = [
                index
                for index, (_, on, incarnation) in group.held.items()
                if on == node_id and incarnation < before_incarnation
            ]
            if lost:
                self.lose_bundles(group, lost)

    def lease_lost(self, lease_id: str) -> None:
        """Have a bundle placed again that its nodelet gave up."""
        for group in self.groups:
            lost = [index for index, (held, _, _) in group.held.items() if held == lease_id]
            if lost:
                self.lose_bundles(group, lost)

    def lose_bundles(self, group: Group, lost: list[int]) -> None:
        given_up = [lease_id for lease_id, _, _ in group.held.values()] if group.whole else []
        for index in list(group.held) if group.whole else lost:
            del group.held[index]
        group.attempt += 1
        if given_up and not group.removed:
            released = tuple(given_up)
            self.feed(ev.LeaseReleased(at_s=self.at_s, lease_ids=released, kill=True))
        self.later(0.1, lambda: self.ask_group(group))
