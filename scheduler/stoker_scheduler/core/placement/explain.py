"""Explanations in words: why a request waits, on which nodes it could fit, and what would have to change.

Made from the verdicts of ``plan`` for rejections, notes in replies and ``POST /v1/explain``; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.gangs import Gang, GangStrategy
from stoker_scheduler.core.model.requirements import ANY_BUNDLE
from stoker_scheduler.core.model.resources import joined, units_text
from stoker_scheduler.core.placement.feasibility import NodeFit, Rule, could_be_in_bundle
from stoker_scheduler.core.placement.gang import could_ever_be_placed
from stoker_scheduler.core.placement.lost_nodes import awaited
from stoker_scheduler.core.placement.verdicts import NodeVerdict, PlacementRequest, evaluate

if TYPE_CHECKING:
    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.queueing.queue import PendingRequest
    from stoker_scheduler.core.state import State

MAX_ROWS = 20
"""Nodes shown in a text; the structured verdicts have them all."""
MAX_HOLDERS = 3

NO_NODES = "no node is registered"
START_NODES = "start a nodelet that can reach the gcs (on another machine: stoker start --address)"
EXTENDER_REMEDY = "none needed: the extender answers, or its httpTimeout passes"
FITS_REMEDY = "none needed: it starts after the requests that are ahead of it in the queue"


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """The reason why requirements wait: a sentence, what would have to change, every node's verdict."""

    fit: NodeFit
    summary: str
    remedy: str
    verdicts: tuple[NodeVerdict, ...]


def explain(
    state: State,
    requirements: Requirements | Gang,
    name: str,
    locality: Mapping[str, int] | None = None,
    kernels: str = "",
) -> PlacementExplanation:
    """Return whether and where ``requirements`` fit on the cluster as it is, and why not elsewhere."""
    if isinstance(requirements, Gang):
        return _explain_gang(state, requirements, name)
    if requirements.group_id:
        return _explain_in_group(state, requirements, name)
    request = PlacementRequest(requirements, locality or {}, kernels)
    verdicts = evaluate(state.nodes.values(), request, state.policy.score)
    what = f"{requirements.text}" + (f" for {name!r}" if name else "")
    if not verdicts:
        summary = f"{what} cannot be placed, as {NO_NODES}"
        remedy = _unless_back(state, requirements, START_NODES)
        return PlacementExplanation(NodeFit.NEVER, summary, remedy, ())
    best, count = verdicts[0], len(verdicts)
    if _awaits_extenders(state, requirements):
        summary = f"{what} waits for extender {joined(requirements.extenders)}"
        return PlacementExplanation(NodeFit.BUSY, summary, EXTENDER_REMEDY, verdicts)
    if best.fit is NodeFit.FITS:
        summary = f"{what} fits on {best.node_id} now"
        return PlacementExplanation(NodeFit.FITS, summary, FITS_REMEDY, verdicts)
    if best.fit is NodeFit.BUSY:
        could = sum(1 for verdict in verdicts if verdict.fit is NodeFit.BUSY)
        nearest = nearest_of(verdicts)
        summary = f"{what} fits on none of {_nodes(count)} now; {_nodes(could)} could take it later"
        remedy = f"on {nearest.node_id}: {nearest.remedy}{_holders(state, nearest, requirements)}"
        return PlacementExplanation(NodeFit.BUSY, summary, remedy, verdicts)
    summary = f"{what} fits on none of {_nodes(count)}, even when idle"
    remedy = _unless_back(state, requirements, _never_remedy(requirements, verdicts))
    return PlacementExplanation(NodeFit.NEVER, summary, remedy, verdicts)


def _unless_back(state: State, requirements: Requirements | Gang, remedy: str) -> str:
    """Return a remedy that is not needed if a node comes back which was lost a moment ago."""
    lost = awaited(state, requirements)
    if lost is None:
        return remedy
    ago_s = state.at_s - lost.at_s
    return (
        f"none if {lost.node.node_id} comes back, which was lost {ago_s:.0f} s ago; else {remedy}"
    )


def nearest_of(verdicts: Sequence[NodeVerdict]) -> NodeVerdict:
    """Return the verdict, of those of busy nodes, with the fewest broken rules."""
    busy = (verdict for verdict in verdicts if verdict.fit is NodeFit.BUSY)
    return min(busy, key=lambda verdict: (len(verdict.rules), verdict.node_id))


def _explain_gang(state: State, gang: Gang, name: str) -> PlacementExplanation:
    """Return why the bundles of a placement group wait; verdicts are for one of its largest bundles."""
    what = f"placement group {name!r}: {gang.text}" if name else gang.text
    if not state.nodes:
        summary = f"{what} cannot be placed, as {NO_NODES}"
        remedy = _unless_back(state, gang, START_NODES)
        return PlacementExplanation(NodeFit.NEVER, summary, remedy, ())
    verdicts = evaluate(state.nodes.values(), PlacementRequest(gang.kinds[0]), state.policy.score)
    if state.best_placement(gang) is not None:
        return PlacementExplanation(NodeFit.FITS, f"{what} fits now", FITS_REMEDY, verdicts)
    if _awaits_extenders(state, gang):
        summary = f"{what} waits for extender {joined(gang.extenders)}"
        return PlacementExplanation(NodeFit.BUSY, summary, EXTENDER_REMEDY, verdicts)
    lacks = [
        f"{count - room} of {count} x {{{kind.text}}} have no room"
        for kind, count, room in zip(gang.kinds, gang.counts, state.gang_room(gang), strict=True)
        if room < count
    ]
    why = joined(lacks) or f"each has room, but not {_TOGETHER[gang.strategy]}"
    count = _nodes(len(state.nodes))
    if could_ever_be_placed(state.nodes, gang, state.policy.score):
        summary = f"{what} does not fit on {count} now: {why}"
        remedy = "leases must end until all bundles have room at once; it is placed as a whole"
        return PlacementExplanation(NodeFit.BUSY, summary, remedy, verdicts)
    summary = f"{what} does not fit on {count}, even when idle: {why}"
    remedy = f"start nodes until there is room for {gang.text}, or ask for less"
    remedy = _unless_back(state, gang, remedy)
    return PlacementExplanation(NodeFit.NEVER, summary, remedy, verdicts)


_TOGETHER = {
    GangStrategy.PACK: "all at once",
    GangStrategy.SPREAD: "all at once",
    GangStrategy.STRICT_PACK: "all on one node",
    GangStrategy.STRICT_SPREAD: "each on a node of its own",
}


def _awaits_extenders(state: State, requirements: Requirements | Gang) -> bool:
    kinds = requirements.kinds if requirements.extenders else ()
    return any(kind.extenders and kind not in state.extender_answers for kind in kinds)


def _explain_in_group(state: State, requirements: Requirements, name: str) -> PlacementExplanation:
    """Return why requirements wait that go into a bundle; verdicts are of bundles."""
    group_id, group = requirements.group_id, state.groups.get(requirements.group_id)
    what = requirements.text + (f" for {name!r}" if name else "")
    where = "a bundle" if requirements.bundle == ANY_BUNDLE else f"bundle {requirements.bundle}"
    where += f" of placement group {group_id}"
    if group is None:
        summary = f"{what} is to be in {where}, which is not known"
        remedy = "create the placement group again: it was removed, or its job has ended"
        return PlacementExplanation(NodeFit.NEVER, summary, remedy, ())
    if not could_be_in_bundle(group, requirements):
        sizes = joined([f"{{{bundle.text}}}" for bundle in dict.fromkeys(group.gang.bundles)])
        summary = f"{what} does not fit in {where}, even when it is empty (its bundles: {sizes})"
        remedy = "ask for less, or for a bundle that the group has"
        return PlacementExplanation(NodeFit.NEVER, summary, remedy, ())
    places = list(group.places(requirements))
    if not places:
        summary = f"{what} waits for {where}, which is not placed yet"
        remedy = f"none needed once the group is placed: stoker explain {group_id}"
        return PlacementExplanation(NodeFit.BUSY, summary, remedy, ())
    verdicts = evaluate(places, PlacementRequest(requirements), state.policy.score)
    if verdicts[0].fit is NodeFit.FITS:
        return PlacementExplanation(NodeFit.FITS, f"{what} fits in {where}", FITS_REMEDY, verdicts)
    summary = f"{what} does not fit in {where} now"
    remedy = f"on {verdicts[0].node_id}: {verdicts[0].remedy}"
    return PlacementExplanation(NodeFit.BUSY, summary, remedy, verdicts)


def infeasible_text(state: State, pending: PendingRequest) -> str:
    """Return the error text of requirements that no node could ever satisfy: what, table, remedy."""
    explanation = explain(state, pending.requirements, pending.request.name)
    waited_s = state.at_s - state.infeasible_since_s.get(pending.requirements, state.at_s)
    tried = f" (for {waited_s:.0f} s)" if waited_s >= 1 else ""
    return f"{explanation.summary}{tried}\n{table(explanation.verdicts)}to start it: {explanation.remedy}"


def waiting_note(state: State, pending: PendingRequest) -> str:
    """Return one line on why a request whose wait has passed got nothing."""
    starting = starting_text(
        state, pending.requirements, pending.request.job_id, pending.request.setup
    )
    if starting or not pending.wanted:
        return starting or "a worker is being started"
    hold = state.hold(pending.account, pending.requirements)
    if hold is not None:
        return f"{hold.text}; {hold.remedy}"
    explanation = explain(state, pending.requirements, pending.request.name)
    prefix = "infeasible, and on_infeasible='wait': " if state.is_infeasible(pending) else ""
    return f"{prefix}{explanation.summary}; {explanation.remedy}"


def starting_text(
    state: State,
    requirements: Requirements | Gang,
    job_id: str,
    setup: str,
    *,
    now_s: float | None = None,
) -> str:
    """Return in words where workers for ``requirements`` start, and since when; empty if nowhere.

    ``setup`` names what the environment of the demand needs installed first.
    """
    if isinstance(requirements, Gang):
        return ""
    nodes = state.starting.since_s(requirements, job_id)
    if not nodes:
        return ""
    where = f"node {next(iter(nodes))}" + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")
    since_s = (state.at_s if now_s is None else now_s) - min(nodes.values())
    if setup:
        return f"its environment is being installed on {where}: {setup}, since {since_s:.0f} s"
    return f"a worker is being started on {where}, since {since_s:.0f} s"


def table(verdicts: Sequence[NodeVerdict]) -> str:
    """Return one line per node, and a count of those left out."""
    rows = [f"  {v.node_id}: {v.detail or 'fits'}\n" for v in verdicts[:MAX_ROWS]]
    if len(verdicts) > MAX_ROWS:
        rows.append(f"  ... and {_nodes(len(verdicts) - MAX_ROWS)} more\n")
    return "".join(rows)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _never_remedy(requirements: Requirements, verdicts: Sequence[NodeVerdict]) -> str:
    nearest = min(verdicts, key=lambda v: (len(v.rules), v.node_id))
    wanted = requirements.text
    if requirements.terms:
        wanted += " and labels " + joined([term.text for term in requirements.terms])
    if requirements.node_filters:
        wanted += " and " + " AND ".join(one.text for one in requirements.node_filters)
    if requirements.node_id is not None and not requirements.soft:
        known = any(verdict.node_id == requirements.node_id for verdict in verdicts)
        if not known:
            return (
                f"start node {requirements.node_id} again, or drop the affinity to it: "
                "it is not registered"
            )
        own = next(verdict for verdict in verdicts if verdict.node_id == requirements.node_id)
        return f"on {own.node_id}: {own.remedy}"
    return f"start a node with {wanted}; or on {nearest.node_id}: {nearest.remedy}"


def _holders(state: State, verdict: NodeVerdict, requirements: Requirements) -> str:
    """Name a few leases that hold what is missing on a busy node."""
    node = state.nodes[verdict.node_id]
    if Rule.AVAILABLE not in verdict.rules:
        return ""
    counted: Counter[tuple[str, str]] = Counter()
    for lease_id in node.leases:
        lease = state.leases[lease_id]
        shared = [(name, units) for name, units in lease.allocated if name in requirements.names]
        if shared:
            counted[holder_text(lease), units_text(shared)] += 1
    if not counted:
        return ""
    holders = [
        f"{holder} holds {resources}" if count == 1 else f"{count} x {holder} hold {resources} each"
        for (holder, resources), count in counted.items()
    ]
    more = f", and {len(holders) - MAX_HOLDERS} more" if len(holders) > MAX_HOLDERS else ""
    return f" ({'; '.join(holders[:MAX_HOLDERS])}{more})"


def holder_text(lease: LeaseState) -> str:
    """Return a lease in words: its kind, and what runs on it."""
    what = lease.actor_id or lease.name
    return f"{lease.kind} {what}" if what else f"lease {lease.lease_id}"
