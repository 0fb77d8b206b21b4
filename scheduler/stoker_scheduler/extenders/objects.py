"""Requirements and nodes as the objects of Kubernetes that extenders know: a Pod, and Nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.model.nodes import Health
from stoker_scheduler.core.model.resources import COUNTED_IN_BYTES, UNIT

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements

NAMES = {"CPU": "cpu", "GPU": "nvidia.com/gpu"}
"""The names of resources that Kubernetes knows under others."""
NAMESPACE = "stoker"


def pod_of(requirements: Requirements) -> dict[str, Any]:
    """Return the Pod that stands for all leases of equal requirements."""
    parts = (requirements.vector, requirements.terms, requirements.node_id, requirements.env)
    filters = [one.text for one in requirements.node_filters]
    name = f"stoker-{hashlib.sha256(repr((parts, filters)).encode()).hexdigest()[:16]}"
    amounts = quantities(requirements.vector)
    selector = {
        term.label: term.values[0]
        for term in requirements.terms
        if len(term.values) == 1 and not term.negated
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": name,
            "labels": {"app.kubernetes.io/managed-by": "stoker"},
        },
        "spec": {
            "schedulerName": "stoker",
            "nodeSelector": selector,
            "containers": [
                {"name": "worker", "resources": {"requests": amounts, "limits": amounts}}
            ],
        },
        "status": {"phase": "Pending"},
    }


def node_of(node: NodeInfo) -> dict[str, Any]:
    """Return a Node. Its allocatable resources are all that it has: what is free changes too often."""
    spec = node.spec
    amounts = quantities(spec.total_units.items())
    ready = "True" if spec.health is Health.ALIVE else "False"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": spec.node_id,
            "uid": spec.node_id,
            "labels": {"kubernetes.io/hostname": spec.hostname, **spec.labels},
        },
        "spec": {"unschedulable": bool(spec.cordon or spec.pressure)},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": ready}],
            "addresses": [{"type": "Hostname", "address": spec.hostname}],
        },
    }


def quantities(units: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return resources as Kubernetes writes them: ``2``, ``500m``, bytes; under its names for them."""
    return {NAMES.get(name, name): _quantity(name, count) for name, count in units}


def _quantity(name: str, count: int) -> str:
    if name in COUNTED_IN_BYTES:
        return str(count)
    return str(count // UNIT) if count % UNIT == 0 else f"{-(-count * 1000 // UNIT)}m"
