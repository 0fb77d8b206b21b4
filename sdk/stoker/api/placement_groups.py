"""Placement groups: resources reserved together, on one node or on several, before work runs in them.

::

    group = stoker.placement_group([{"GPU": 1, "CPU": 4}] * 8, strategy="PACK")
    group.wait(timeout_s=60)
    ranks = [
        Rank.options(
            num_gpus=1,
            scheduling_strategy=stoker.PlacementGroupSchedulingStrategy(group, i),
        ).remote(i)
        for i in range(8)
    ]

All bundles are reserved at once, or none: two groups never hold halves of what both need.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from stoker.exceptions import (
    BadRequestError,
    PlacementGroupRemovedError,
    WrongTypeError,
)
from stoker.runtime import current
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy
from stoker_wire.constraints import node_filters
from stoker_wire.ids import Prefix, new_id

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker_wire.messages import groups as wire

_CALL_S = 30.0
_POLL_S = 20.0
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class PlacementGroup:
    """A handle to a placement group; it may be sent to tasks and actors, and stored."""

    __slots__ = ("_bundles", "_id")

    def __init__(self, group_id: str, bundles: Sequence[Mapping[str, float]]) -> None:
        self._id = group_id
        self._bundles = tuple(dict(bundle) for bundle in bundles)

    @property
    def id(self) -> str:
        """The group's id, as in ``stoker list placement-groups``."""
        return self._id

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        """The resources of each bundle."""
        return [dict(bundle) for bundle in self._bundles]

    @property
    def bundle_count(self) -> int:
        """The number of bundles."""
        return len(self._bundles)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """Return a ref to this handle that is there once all bundles are reserved.

        ``get()`` of it raises ``PlacementGroupRemovedError`` if the group is removed before.
        """
        from stoker.api.remote import remote

        inside = PlacementGroupSchedulingStrategy(self)
        ready = remote(num_cpus=0, scheduling_strategy=inside, name="placement_group.ready")
        ref: ObjectRef[PlacementGroup] = ready(_self).remote(self)
        return ref

    def wait(self, timeout_s: float | None = 30.0) -> bool:
        """Return True once all bundles are reserved, False if ``timeout_s`` pass before (None: never).

        Raises ``PlacementGroupRemovedError`` if the group is removed meanwhile.
        """
        if timeout_s is not None:
            _check_seconds(timeout_s)
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            group = _get(self._id, min(left_s, _POLL_S))
            if group.state == "CREATED":
                return True
            if group.state == "REMOVED":
                raise PlacementGroupRemovedError(
                    f"placement group {self._id} was removed\n{group.reason or 'no reason is known'}"
                )
            if time.monotonic() >= deadline_s:
                return False

    def __repr__(self) -> str:
        return f"PlacementGroup({self._id!r}, {list(self._bundles)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self._id)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementGroup, (self._id, self._bundles)


def _self(group: PlacementGroup) -> PlacementGroup:
    return group


def placement_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str = "PACK",
    name: str = "",
    lifetime: str | None = None,
    *,
    namespace: str | None = None,
    reschedule: str = "bundles",
    preemptible: bool = False,
    preemption_grace: float | None = None,
    bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
    node_filter: str = "",
    tolerations: Sequence[str | Mapping[str, Any]] = (),
) -> PlacementGroup:
    """Reserve ``bundles`` of resources, all or none, and return a handle at once.

    A bundle is on one node: ``{"CPU": 4, "GPU": 1}`` (memory in bytes). ``strategy`` says how bundles
    share nodes: ``PACK`` on as few as can be, ``SPREAD`` on as many, ``STRICT_PACK`` on one,
    ``STRICT_SPREAD`` each on its own. ``bundle_label_selector`` has the conditions on each bundle's node,
    like ``label_selector`` of a task; ``node_filter`` is the condition on all of them, as
    ``"labels.rack != 'r7'"``, and ``tolerations`` are of the taints of any. A
    ``name`` is unique in the ``namespace`` (default: the job's). The group
    ends with the actor or job that made it, unless ``lifetime="detached"``. When a node dies, its
    ``bundles`` are placed again, or with ``reschedule="group"`` all, which ends what runs in the others; with
    ``"never"`` the group goes on without them. A
    ``preemptible`` group gives way, as a whole, to work with a better claim: what runs in it gets notice, and
    ends ``preemption_grace`` seconds later (default: the setting ``preemption_grace_s``).

    A group that fits nowhere waits: ``stoker explain`` says for what. Raises ``BadRequestError`` for
    bundles that make no sense, ``NameTakenError``.
    """
    from stoker.runtime.options.checks import checked_grace
    from stoker_wire.messages import groups as wire

    runtime = current.runtime()
    body = wire.CreatePlacementGroup(
        group_id=new_id(Prefix.GROUP),
        job_id=runtime.job.job_id,
        bundles=_checked_bundles(bundles, bundle_label_selector, node_filter, tolerations),
        strategy=wire.GroupStrategy(_one_of("strategy", strategy, STRATEGIES)),
        name=name or "",
        namespace=namespace or runtime.job.namespace,
        detached=_one_of("lifetime", lifetime, (None, "detached")) == "detached",
        reschedule=wire.Reschedule(
            _one_of("reschedule", reschedule, ("bundles", "group", "never"))
        ),
        # A worker that runs tasks may end before the group that one of them made: its job owns that.
        owner=runtime.job.owner() if runtime.job.actor is not None else None,
        preemptible=preemptible,
        preemption_grace_s=checked_grace(preemption_grace, "a placement group"),
    )
    created = _call("POST", "/v1/placement-groups", body)
    return _handle(created)


def remove_placement_group(group: PlacementGroup) -> None:
    """Give the bundles back; tasks and actors in them are ended. Removing it again does nothing."""
    _check_group(group, "remove_placement_group")
    _call("DELETE", f"/v1/placement-groups/{group.id}")


def get_placement_group(name: str, namespace: str | None = None) -> PlacementGroup:
    """Return the living group of this name; ``NotFoundError`` if there is none."""
    if not name:
        raise BadRequestError(f"get_placement_group({name!r}): give a name", field="name")
    in_namespace = namespace or current.runtime().job.namespace
    path = f"/v1/named-placement-groups/{quote(in_namespace, safe='')}/{quote(name, safe='')}"
    return _handle(_call("GET", path))


def get_current_placement_group() -> PlacementGroup | None:
    """Return the placement group in which the calling code runs, or None."""
    lease = current.runtime().job.lease
    if lease is None or not lease.group_id:
        return None
    return _handle(_get(lease.group_id, 0.0))


def placement_group_table(group: PlacementGroup | None = None) -> dict[str, Any]:
    """Return the record of one group, or of all by their ids, as the HTTP API shows them."""
    if group is not None:
        _check_group(group, "placement_group_table")
        record: dict[str, Any] = msgspec.to_builtins(_get(group.id, 0.0))
        return record
    from stoker.api.calls import list_all

    return {one["group_id"]: one for one in list_all("/v1/placement-groups")}


def _handle(group: wire.PlacementGroup) -> PlacementGroup:
    return PlacementGroup(group.group_id, [bundle.resources for bundle in group.bundles])


def _get(group_id: str, wait_s: float) -> wire.PlacementGroup:
    path = f"/v1/placement-groups/{group_id}"
    return _call("GET", path, query={"wait_s": wait_s}, timeout_s=wait_s + _CALL_S)


def _call(
    method: str,
    path: str,
    body: object = None,
    *,
    query: dict[str, object] | None = None,
    timeout_s: float = _CALL_S,
) -> wire.PlacementGroup:
    from stoker_wire.messages.groups import PlacementGroup as Reply

    runtime = current.runtime()
    request = runtime.clients.gcs.call(
        method, path, body, reply=Reply, query=query, timeout_s=timeout_s
    )
    return runtime.io.run(request, timeout_s)


def _checked_bundles(
    bundles: Any,
    selectors: Sequence[Mapping[str, str]] | None,
    node_filter: str,
    tolerations: Any,
) -> tuple[wire.Bundle, ...]:
    from stoker.runtime.options.checks import checked_tolerations
    from stoker_wire.messages import groups as wire

    tolerated = checked_tolerations(tolerations)
    if not isinstance(bundles, (list, tuple)):
        raise WrongTypeError(
            f"bundles: {type(bundles).__name__}\ngive a list of resources: [{{'CPU': 1}}, ...]",
            field="bundles",
        )
    if not bundles or len(bundles) > wire.MAX_BUNDLES:
        raise BadRequestError(
            f"bundles: {len(bundles)}\ngive from 1 to {wire.MAX_BUNDLES}", field="bundles"
        )
    node_filters.check(node_filter)
    if selectors is not None and len(selectors) != len(bundles):
        raise BadRequestError(
            f"bundle_label_selector: {len(selectors)} for {len(bundles)} bundles\n"
            "give one for each, {} for none",
            field="bundle_label_selector",
        )
    for index, bundle in enumerate(bundles):
        if not isinstance(bundle, Mapping):
            raise WrongTypeError(
                f"bundles[{index}]: {bundle!r}\ngive resources, like {{'CPU': 1}}",
                field=f"bundles.{index}",
            )
        for name, amount in bundle.items():
            _check_amount(index, name, amount)
        if not any(bundle.values()):
            raise BadRequestError(
                f"bundles[{index}] asks for nothing\ngive it a resource", field=f"bundles.{index}"
            )
    return tuple(
        wire.Bundle(
            resources={name: float(amount) for name, amount in bundle.items() if amount},
            label_selector=dict(selectors[index]) if selectors is not None else {},
            node_filter=node_filter,
            tolerations=tolerated,
        )
        for index, bundle in enumerate(bundles)
    )


def _check_amount(index: int, name: Any, amount: Any) -> None:
    field = f"bundles.{index}.{name}"
    if not isinstance(name, str) or not name:
        raise WrongTypeError(
            f"bundles[{index}]: {name!r} is not the name of a resource", field=field
        )
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise WrongTypeError(f"bundles[{index}][{name!r}]: {amount!r} is not a number", field=field)
    if not 0 <= float(amount) < math.inf:
        raise BadRequestError(
            f"bundles[{index}][{name!r}]: {amount!r} is not an amount\ngive 0 or more", field=field
        )
    if name == "GPU" and float(amount) > 1 and not float(amount).is_integer():
        raise BadRequestError(
            f"bundles[{index}]['GPU']: {amount!r} is not possible\nabove 1, only whole GPUs can be given",
            field=field,
        )


def _one_of(field: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        names = ", ".join(repr(one) for one in known)
        raise BadRequestError(f"{field}: {value!r} is none\nuse one of {names}", field=field)
    return value


def _check_group(group: Any, what: str) -> None:
    if not isinstance(group, PlacementGroup):
        raise WrongTypeError(
            f"{what}({group!r}): give the placement group, as placement_group() returned it",
            field="group",
        )


def _check_seconds(timeout_s: Any) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        raise WrongTypeError(
            f"wait(timeout_s={timeout_s!r}): give seconds, or None for ever", field="timeout_s"
        )
    if not float(timeout_s) >= 0:
        raise BadRequestError(
            f"wait(timeout_s={timeout_s!r}): give seconds from 0, or None", field="timeout_s"
        )
