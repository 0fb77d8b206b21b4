"""Why something waits, in words: the verdicts of ``plan`` and what would have to change.

Called for refusals, for notes in replies and by ``POST /v1/explain``; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.resources import joined, units_text
from stoker_scheduler.core.placement.feasibility import Fit, Rule
from stoker_scheduler.core.placement.plan import PlanRequest, Verdict, judge

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Need
    from stoker_scheduler.core.queueing.queue import Ask
    from stoker_scheduler.core.state import LeaseState, State

MAX_ROWS = 20
"""Nodes shown in a text; the structured verdicts have them all."""
MAX_HOLDERS = 3

NO_NODES = "no node is registered"
START_NODES = "start a nodelet that can reach the gcs (on another machine: stoker start --address)"


@dataclass(frozen=True, slots=True)
class Story:
    """Why a need waits: a sentence, what would have to change, and every node's verdict."""

    fit: Fit
    summary: str
    remedy: str
    verdicts: tuple[Verdict, ...]


def tell(
    state: State,
    need: Need,
    name: str,
    locality: Mapping[str, int] | None = None,
    kernels: str = "",
) -> Story:
    """Explain where ``need`` stands on the cluster as it is."""
    request = PlanRequest(need, locality or {}, kernels)
    verdicts = judge(state.nodes.values(), request, state.policy.score)
    what = f"{need.text}" + (f" for {name!r}" if name else "")
    if not verdicts:
        return Story(Fit.NEVER, f"{what} cannot be placed, as {NO_NODES}", START_NODES, ())
    best, count = verdicts[0], len(verdicts)
    if best.fit is Fit.FITS:
        summary = f"{what} fits on {best.node_id} now"
        return Story(Fit.FITS, summary, "nothing: it starts when its turn comes", verdicts)
    if best.fit is Fit.BUSY:
        could = sum(1 for verdict in verdicts if verdict.fit is Fit.BUSY)
        nearest = min(
            (v for v in verdicts if v.fit is Fit.BUSY), key=lambda v: (len(v.rules), v.node_id)
        )
        summary = f"{what} fits on none of {_nodes(count)} now; {_nodes(could)} could take it later"
        remedy = f"on {nearest.node_id}: {nearest.remedy}{_holders(state, nearest, need)}"
        return Story(Fit.BUSY, summary, remedy, verdicts)
    summary = f"{what} fits on none of {_nodes(count)}, even when idle"
    return Story(Fit.NEVER, summary, _never_remedy(need, verdicts), verdicts)


def infeasible_text(state: State, ask: Ask) -> str:
    """Return the whole story of a need that no node could ever satisfy: what, table, remedy."""
    story = tell(state, ask.need, ask.asked.name)
    waited_s = state.at_s - state.infeasible_since_s.get(ask.need, state.at_s)
    tried = f" (for {waited_s:.0f} s)" if waited_s >= 1 else ""
    return f"{story.summary}{tried}\n{table(story.verdicts)}to start it: {story.remedy}"


def waiting_note(state: State, ask: Ask) -> str:
    """Return one line on why an ask that ends now got nothing."""
    starting = starting_text(state, ask.need, ask.asked.job_id, ask.asked.setup)
    if starting or not ask.wanted:
        return starting or "a worker is being started"
    story = tell(state, ask.need, ask.asked.name)
    prefix = "infeasible, and on_infeasible='wait': " if ask.infeasible else ""
    return f"{prefix}{story.summary}; {story.remedy}"


def starting_text(
    state: State, need: Need, job_id: str, setup: str, *, now_s: float | None = None
) -> str:
    """Return where workers for ``need`` are being started, and since when; empty if nowhere.

    ``setup`` names what the environment of the demand needs installed first.
    """
    nodes = state.starts.since_s(need, job_id)
    if not nodes:
        return ""
    where = f"node {next(iter(nodes))}" + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")
    since_s = (state.at_s if now_s is None else now_s) - min(nodes.values())
    if setup:
        return f"its environment is being installed on {where}: {setup}, since {since_s:.0f} s"
    return f"a worker is being started on {where}, since {since_s:.0f} s"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return one line per node, and a count of those left out."""
    rows = [f"  {v.node_id}: {v.detail or 'fits'}\n" for v in verdicts[:MAX_ROWS]]
    if len(verdicts) > MAX_ROWS:
        rows.append(f"  ... and {_nodes(len(verdicts) - MAX_ROWS)} more\n")
    return "".join(rows)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _never_remedy(need: Need, verdicts: Sequence[Verdict]) -> str:
    nearest = min(verdicts, key=lambda v: (len(v.rules), v.node_id))
    wanted = need.text
    if need.terms:
        wanted += " and labels " + joined([term.text for term in need.terms])
    if need.node_id is not None and not need.soft:
        known = any(verdict.node_id == need.node_id for verdict in verdicts)
        if not known:
            return (
                f"start node {need.node_id} again, or drop the affinity to it: it is not registered"
            )
        own = next(verdict for verdict in verdicts if verdict.node_id == need.node_id)
        return f"on {own.node_id}: {own.remedy}"
    return f"start a node with {wanted}; or on {nearest.node_id}: {nearest.remedy}"


def _holders(state: State, verdict: Verdict, need: Need) -> str:
    """Name a few leases that hold what is missing on a busy node."""
    node = state.nodes[verdict.node_id]
    if Rule.AVAILABLE not in verdict.rules:
        return ""
    counted: Counter[tuple[str, str]] = Counter()
    for lease_id in node.leases:
        lease = state.leases[lease_id]
        shared = [(name, units) for name, units in lease.held if name in need.names]
        if shared:
            counted[_who(lease), units_text(shared)] += 1
    if not counted:
        return ""
    holders = [
        f"{who} holds {what}" if count == 1 else f"{count} x {who} hold {what} each"
        for (who, what), count in counted.items()
    ]
    more = f", and {len(holders) - MAX_HOLDERS} more" if len(holders) > MAX_HOLDERS else ""
    return f" ({'; '.join(holders[:MAX_HOLDERS])}{more})"


def _who(lease: LeaseState) -> str:
    what = lease.actor_id or lease.name
    return f"{lease.kind} {what}" if what else f"lease {lease.lease_id}"
