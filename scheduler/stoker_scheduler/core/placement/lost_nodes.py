"""Nodes that were lost a moment ago and may come back: what only they could run waits for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.nodes import Health, LostNode, NodeInfo
from stoker_scheduler.core.placement.feasibility import could_ever_fit
from stoker_scheduler.core.placement.gang import could_ever_be_placed
from stoker_scheduler.core.state import Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.state import State


def remember_lost(state: State, node: NodeInfo) -> None:
    """Note that a node was lost; those that have been away for too long are forgotten."""
    horizon_s = state.at_s - state.policy.node_return_s
    for node_id in [i for i, lost in state.lost_nodes.items() if lost.at_s <= horizon_s]:
        del state.lost_nodes[node_id]
    state.lost_nodes.pop(node.node_id, None)  # the last one is the last in the table
    idle = NodeInfo(
        replace(
            node.spec,
            health=Health.ALIVE,
            cordon="",
            drain_until_s=None,
            taints=(),
            pressure="",
        )
    )
    idle.answers = state.extender_answers
    state.lost_nodes[node.node_id] = LostNode(idle, state.at_s)
    state.set_timer(state.at_s + state.policy.node_return_s, Timer.CYCLE)


def awaited(state: State, requirements: Requirements | Gang) -> LostNode | None:
    """Return the last of the lost nodes with which ``requirements`` could be placed, if one may come back."""
    horizon_s = state.at_s - state.policy.node_return_s
    for lost in reversed(state.lost_nodes.values()):
        if lost.at_s <= horizon_s:
            return None
        if isinstance(requirements, Gang):
            together = {i: one.node for i, one in state.lost_nodes.items() if one.at_s > horizon_s}
            nodes = {**together, **state.nodes}
            is_enough = could_ever_be_placed(nodes, requirements, state.policy.score)
            return lost if is_enough else None
        if could_ever_fit(lost.node, requirements):
            return lost
    return None
