"""Nodes of the simulated world: how they are closed and opened, and what must hold for what starts there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT
from stoker_scheduler.core.model.taints import FORBIDDING, Effect, Taint, untolerated

if TYPE_CHECKING:
    from random import Random

    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.nodes import NodeSpec
    from tests.sim.scheduler_world import FakeNode

OPEN: dict[str, Any] = {"cordon": "", "drain_until_s": None, "taints": ()}


def openness(random: Random, at_s: float, *, calm: bool) -> dict[str, Any]:
    """Return how a node is closed, the fields of its spec; it is open when all is calm, and else often."""
    roll = 1.0 if calm else random.random()
    if roll < 0.2:
        return {**OPEN, "cordon": "cordoned"}
    if roll < 0.4:
        return {**OPEN, "cordon": "draining", "drain_until_s": at_s + random.uniform(0.0, 60.0)}
    if roll < 0.6:
        return {**OPEN, "taints": (Taint("gpu", "yes", random.choice(list(Effect)), at_s),)}
    return OPEN


def must_empty(spec: NodeSpec) -> bool:
    """Return whether what runs on a node has to leave it, preemptible or not."""
    evicts = any(taint.effect is Effect.NO_EXECUTE for taint in spec.taints)
    return spec.drain_until_s is not None or evicts


def check_open(spec: NodeSpec, lease: LeaseState) -> None:
    """Check that what starts may be on its node; what is in a bundle only leaves when the node drains."""
    if lease.in_bundle:
        assert spec.drain_until_s is None, (
            f"{lease.lease_id} starts on {spec.node_id}, which drains"
        )
        return
    assert not spec.cordon, f"{lease.lease_id} starts on {spec.node_id}, which is {spec.cordon}"
    forbidding = untolerated(spec.taints, lease.requirements.tolerations, FORBIDDING)
    assert not forbidding, f"{lease.lease_id} does not tolerate {forbidding} of {spec.node_id}"


def check_gpus(node: FakeNode, started: ev.LeaseAdopted) -> None:
    """Check that nothing shares a GPU, nor a bundle's part of one, with more than there is of it."""
    used: dict[tuple[str, int, int], int] = {}
    limits: dict[tuple[str, int, int], int] = {}
    for lease_id, gpus in node.held.items():
        if lease_id in node.prepared:
            continue  # nothing is in it before it is committed
        facts = node.facts[lease_id]
        inside = facts.group_id and facts.kind is not ev.Kind.BUNDLE
        for index, units in gpus.items():
            key = (facts.group_id, facts.bundle, index) if inside else ("", -1, index)
            used[key] = used.get(key, 0) + units
            if facts.kind is ev.Kind.BUNDLE:
                limits[facts.group_id, facts.bundle, index] = units
    over = {key: units for key, units in used.items() if units > limits.get(key, UNIT)}
    assert not over, f"{started.lease_id} uses a GPU of {started.node_id} that others hold: {over}"
