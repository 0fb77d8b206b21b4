"""Links between nodes, each measured once by two actors, and kept in the cluster's KV for every planner.

Called by :func:`measure_links` of a user's program or of ``stoker train links``; read by the planner's
:mod:`~stoker_train.planning.hardware.cluster_records`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any

import msgspec

from stoker.exceptions import BadRequestError, GetTimeoutError, StokerError
from stoker_train.planning.cluster_shape import Link

NAMESPACE = "stoker.planning"
_PREFIX = "links/"
_LARGE = 16 << 20
_TRIPS = 30
_SENDS = 5

Pair = tuple[str, str]


class Measured(msgspec.Struct, frozen=True):
    """A link as it was measured, between two nodes or two devices of one."""

    bytes_per_s: float
    latency_s: float
    backend: str
    at_s: float

    @property
    def link(self) -> Link:
        """The link as planners take it."""
        return Link(self.bytes_per_s, self.latency_s)


def rounds(nodes: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield rounds of pairs in which each node is once at most, until each pair was there.

    The circle method of round-robin tournaments: n - 1 rounds for an even number of nodes, else n.
    """
    ring: list[str | None] = list(nodes)
    if len(ring) % 2:
        ring.append(None)
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [
            _ordered(one, other) for one, other in pairs if one is not None and other is not None
        ]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def stored_links() -> dict[Pair, Measured]:
    """Return what was measured on the running cluster, by the ids of both nodes (twice the same: inside)."""
    from stoker import kv

    keys = kv.keys(_PREFIX, namespace=NAMESPACE)
    values = ((key, kv.get(key, namespace=NAMESPACE)) for key in keys)
    return read_links({key: value for key, value in values if value is not None})


def keys_of(nodes: Sequence[str]) -> list[str]:
    """Return the keys, in :data:`NAMESPACE`, of all links between and inside ``nodes``."""
    return [_key(pair) for pair in combinations_with_replacement(sorted(nodes), 2)]


def read_links(values: Mapping[str, bytes]) -> dict[Pair, Measured]:
    """Return the links that are kept as ``values`` by key."""
    found = {}
    for key, value in values.items():
        one, _, other = key.removeprefix(_PREFIX).partition("/")
        found[one, other] = msgspec.json.decode(value, type=Measured)
    return found


def _key(pair: Pair) -> str:
    return f"{_PREFIX}{pair[0]}/{pair[1]}"


def measure_links(
    nodes: Sequence[str] | None = None,
    *,
    again: bool = False,
    resources: Mapping[str, float] | None = None,
    timeout_s: float = 120.0,
) -> dict[Pair, Measured]:
    """Measure each pair of nodes that was not measured yet, and each node inside; return all of them.

    ``nodes`` are ids (default: all that are alive). Two actors with ``resources`` (default: a GPU each where
    the node has as many, else nothing) send to each other by NCCL or gloo: a message of 8 bytes each way for
    the latency, one of 16 MiB for the rate; medians. A pair takes some seconds, and pairs without a common
    node are measured side by side. ``again`` measures what is known too.

    GetTimeoutError names a pair that did not answer for ``timeout_s``; what was measured before is kept.
    """
    import stoker

    alive = {one["node_id"]: one for one in stoker.nodes() if one.get("state") == "ALIVE"}
    chosen = sorted(alive) if nodes is None else list(dict.fromkeys(nodes))
    for node in chosen:
        if node not in alive:
            raise BadRequestError(
                f"nodes: {node!r} is not alive\n`stoker list nodes` shows which are", field="nodes"
            )
    known = {} if again else stored_links()
    plan = [[(node, node) for node in chosen], *rounds(chosen)]
    for pairs in plan:
        missing = [pair for pair in pairs if pair not in known]
        if missing:
            known |= _measure_round(missing, alive, resources, timeout_s)
    wanted = set(chosen)
    return {pair: link for pair, link in known.items() if set(pair) <= wanted}


def slowest(links: Mapping[Pair, Measured], nodes: Sequence[str]) -> Link | None:
    """Return the slowest rate and the longest latency between any two of ``nodes``; None if none is known.

    A ring passes every node, so its slowest link binds it.
    """
    wanted = set(nodes)
    found = [one for pair, one in links.items() if pair[0] != pair[1] and set(pair) <= wanted]
    return _bound(found)


def inside(links: Mapping[Pair, Measured], nodes: Sequence[str]) -> Link | None:
    """Return the slowest link inside any of ``nodes``; None if none is known."""
    return _bound([links[node, node] for node in nodes if (node, node) in links])


def _bound(found: Sequence[Measured]) -> Link | None:
    if not found:
        return None
    return Link(min(one.bytes_per_s for one in found), max(one.latency_s for one in found))


def _ordered(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


def _measure_round(
    pairs: Sequence[Pair],
    alive: Mapping[str, Mapping[str, Any]],
    resources: Mapping[str, float] | None,
    timeout_s: float,
) -> dict[Pair, Measured]:
    """Measure pairs side by side, and keep what was found."""
    import stoker
    from stoker import kv

    ends: list[Any] = []
    try:
        waiting = {}
        for pair in pairs:
            gpus = 2 if pair[0] == pair[1] else 1
            actors = [_end(alive[node], resources, gpus) for node in pair]
            ends += actors
            name = f"{_key(pair)}/{time.time_ns()}"
            calls = [
                actor.measure.remote(name, rank, timeout_s) for rank, actor in enumerate(actors)
            ]
            waiting[pair] = calls
        found = {}
        for pair, calls in waiting.items():
            try:
                found[pair] = stoker.get(calls, timeout=timeout_s)[0]
            except GetTimeoutError:
                raise GetTimeoutError(
                    f"the link of {pair[0]} and {pair[1]} was not measured within {timeout_s:g} s\n"
                    "`stoker explain` of the actors says what they wait for; give timeout_s, or "
                    "resources that both nodes have"
                ) from None
            kv.put(_key(pair), msgspec.json.encode(found[pair]), namespace=NAMESPACE)
        return found
    finally:
        for actor in ends:
            _kill(actor)


def _end(node: Mapping[str, Any], resources: Mapping[str, float] | None, gpus: int) -> Any:
    """Start an end of a link on a node; with a GPU where the node has the ``gpus`` that all its ends need."""
    import stoker

    wanted = dict(resources or {})
    if resources is None and node.get("resources", {}).get("GPU", 0) >= gpus:
        wanted = {"GPU": 1.0}
    return (
        stoker.remote(End)
        .options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            resources=wanted,
            scheduling_strategy=stoker.NodeAffinity(node_id=node["node_id"]),
        )
        .remote()
    )


def _kill(actor: Any) -> None:
    import stoker

    try:
        stoker.kill(actor)
    except StokerError:
        return  # it is dead already


class End:
    """The actor at one end of a link."""

    def measure(self, name: str, rank: int, timeout_s: float) -> Measured | None:
        """Measure with the other end of the group ``name``; rank 0 returns what was found."""
        import torch
        import torch.distributed as dist

        import stoker.train

        stoker.train.init_process_group(name, rank, 2, timeout_s=timeout_s)
        try:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            latency_s = _median_s(torch.zeros(1, device=device, dtype=torch.int64), rank, _TRIPS)
            large = torch.zeros(_LARGE, device=device, dtype=torch.uint8)
            whole_s = _median_s(large, rank, _SENDS)
            if rank:
                return None
            carried_s = max(1e-9, whole_s - latency_s)
            return Measured(_LARGE / carried_s, latency_s, dist.get_backend(), time.time())
        finally:
            stoker.train.destroy_process_group()


def _median_s(values: Any, rank: int, trips: int) -> float:
    """Return half the median of the seconds of a trip to the other end and back."""
    import torch
    import torch.distributed as dist

    took = []
    for _ in range(trips + 1):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(values, 1 - rank)
            else:
                dist.recv(values, 1 - rank)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:]) / 2
