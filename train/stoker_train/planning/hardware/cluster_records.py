"""The shape of the running cluster, by its nodes' records."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from stoker_train.planning.cluster_shape import ClusterShape, Link
from stoker_train.planning.hardware.gpu_kinds import KINDS, PRODUCTS_REACH, kind_of
from stoker_train.planning.hardware.links import inside, slowest, stored_links
from stoker_wire.messages.cluster import NodeState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_train.planning.hardware.gpu_kinds import GpuKind
    from stoker_train.planning.hardware.links import Measured, Pair

_PCIE = Link(20e9, 10e-6)
_NETWORK = Link(25e9, 20e-6)
_LINKS_REACH = 0.8
_COPIES_REACH = 0.85
_MEMORY = "memory"


def running_cluster() -> ClusterShape:
    """Return the shape of the cluster that this process is connected to; see :func:`cluster_of`.

    Links are those that :func:`stoker.train.measure_links` has measured on it, if any.
    """
    import stoker

    return cluster_of(stoker.nodes(), links=stored_links())


def cluster_of(
    nodes: Sequence[dict[str, Any]],
    *,
    between: Link | None = None,
    links: Mapping[Pair, Measured] | None = None,
) -> ClusterShape:
    """Return the shape of the largest part of a cluster that is equal: one kind of GPU, as many on each node.

    ``nodes`` are records as ``stoker.nodes()`` returns them. ``between`` is the network of a node, which
    records do not tell: by default the slowest of the measured ``links`` between the nodes, or 25 GB/s (200
    Gbit/s) where none was measured. ValueError where no node has a GPU of a known kind.
    """
    links = links or {}
    groups: Counter[tuple[str, int]] = Counter()
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    unknown: set[str] = set()
    for node in nodes:
        if node.get("state") != NodeState.ALIVE:
            continue
        devices = [
            one
            for one in node.get("devices", ())
            if not one.get("quarantine") and not one.get("mig_profile")
        ]
        names = Counter(str(one.get("name", "")) for one in devices)
        for name, count in names.items():
            if kind_of(name) is None:
                unknown.add(name)
                continue
            groups[name, count] += 1
            found.setdefault((name, count), []).append(node)
    if not groups:
        seen = f"; its GPUs are {', '.join(sorted(unknown))}" if unknown else ""
        raise ValueError(
            f"plan_training(): the cluster has no GPU of a known kind{seen}\n"
            "give cluster=ClusterShape(nodes, gpus_per_node, memory_bytes, flops_per_s)"
        )
    name, count = max(groups, key=lambda one: (groups[one] * one[1], one))
    kind = kind_of(name)
    assert kind is not None
    node = found[name, count][-1]
    ids = [str(one.get("node_id", "")) for one in found[name, count]]
    devices = [one for one in node["devices"] if one.get("name") == name]
    linked = count > 1 and all(
        set(dict(one.get("links", {})).values()) == {"nvlink"} for one in devices
    )
    memory = min(int(one.get("memory_bytes", 0)) for one in devices) or kind.memory_bytes
    return ClusterShape(
        nodes=groups[name, count],
        gpus_per_node=count,
        memory_bytes=float(memory),
        flops_per_s=PRODUCTS_REACH * kind.flops_per_s,
        inside=inside(links, ids) or (_nvlink(kind) if linked else _PCIE),
        between=between or slowest(links, ids) or _NETWORK,
        host_bytes=0.7 * float(node.get("resources", {}).get(_MEMORY, 0.0)),
        memory_bytes_per_s=_COPIES_REACH * kind.memory_bytes_per_s,
    )


def cluster_of_kind(
    name: str, nodes: int, gpus_per_node: int, between: Link | None = None
) -> ClusterShape:
    """Return a cluster of GPUs of a known kind, joined by NVLink in a node where they have it.

    ValueError for an unknown kind.
    """
    kind = kind_of(name)
    if kind is None:
        known = ", ".join(one.name for one in KINDS)
        raise ValueError(f"GPU {name!r} is not known\ngive one of {known}, or a ClusterShape")
    linked = kind.nvlink_bytes_per_s and gpus_per_node > 1
    return ClusterShape(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory_bytes=kind.memory_bytes,
        flops_per_s=PRODUCTS_REACH * kind.flops_per_s,
        inside=_nvlink(kind) if linked else _PCIE,
        between=between or _NETWORK,
        memory_bytes_per_s=_COPIES_REACH * kind.memory_bytes_per_s,
    )


def _nvlink(kind: GpuKind) -> Link:
    return Link(_LINKS_REACH * kind.nvlink_bytes_per_s, 5e-6)
