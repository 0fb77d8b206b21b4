"""``remote`` with Ray's options: those that Stoker calls otherwise, and those without effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from stoker.api.actors import ActorClass as StokerActorClass
from stoker.api.actors import method as stoker_method
from stoker.api.remote import RemoteFunction as StokerRemoteFunction
from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.ray.mapping.lacking import warn_once
from stoker.ray.runtime_env import mapped_env
from stoker.ray.util.scheduling_strategies import (
    HEAD,
    LABELS,
    NODE,
    NodeLabelSchedulingStrategy,
)
from stoker.runtime.options.actor_options import ActorOptions
from stoker.runtime.options.demands import check_options
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.options.strategies import PlacementGroupSchedulingStrategy

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

WITHOUT_EFFECT = {
    "object_store_memory": "shared memory is not reserved; it spills to disk",
    "enable_tensor_transport": "tensors travel out of band anyway",
    "tensor_transport": "tensors travel out of band anyway",
    "_tensor_transport": "tensors travel out of band anyway",
    "_generator_backpressure_num_objects": "a generator runs 256 values ahead at most",
    "_actor_generator_backpressure_num_objects": "a generator runs 256 values ahead at most",
    "_num_objects_per_yield": "a generator yields one value at a time",
    "_labels": "labels are of nodes",
    "_metadata": "",
    "isolate_process": "",
    "memory_monitor": "",
}
GROUP = (
    "placement_group",
    "placement_group_bundle_index",
    "placement_group_capture_child_tasks",
)


class RemoteFunction(StokerRemoteFunction[P, R], Generic[P, R]):
    """A remote function whose ``options`` are Ray's."""

    def options(self, **options: Any) -> RemoteFunction[P, R]:
        """Return this function with other options."""
        super_options = super().options(**mapped_options(options))
        assert isinstance(super_options, RemoteFunction)
        return super_options


class ActorClass(StokerActorClass[C], Generic[C]):
    """A remote class whose ``options`` are Ray's."""

    def options(self, **options: Any) -> ActorClass[C]:
        """Return this class with other options."""
        super_options = super().options(**mapped_options(options, of_actor=True))
        assert isinstance(super_options, ActorClass)
        return super_options


def remote(*args: Any, **options: Any) -> Any:
    """Make a function a task, or a class an actor: ``@remote`` or ``@remote(num_gpus=1, ...)``."""
    if len(args) == 1 and not options and callable(args[0]):
        return _decorated(args[0], {})
    if args:
        raise WrongTypeError("@remote takes its options by keyword: @remote(num_cpus=1)")
    return lambda target: _decorated(target, options)


def _decorated(target: Any, options: Mapping[str, Any]) -> Any:
    name = getattr(target, "__qualname__", repr(target))
    if isinstance(target, type):
        mapped = mapped_options(options, of_actor=True)
        return ActorClass(target, check_options(ActorOptions, mapped, what=f"remote class {name}"))
    if not callable(target):
        raise TypeError(f"@remote takes a function or a class, not {type(target).__name__}")
    mapped = mapped_options(options)
    return RemoteFunction(
        target, check_options(TaskOptions, mapped, what=f"remote function {name}")
    )


def method(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """Give a method of a remote class options: ``@method(num_returns=2)``."""
    if args or not options:
        raise BadRequestError("@method takes options: @method(num_returns=2)")
    return stoker_method(**_with_effect(options))


def mapped_options(options: Mapping[str, Any], *, of_actor: bool = False) -> dict[str, Any]:
    """Return Ray's options of a task or an actor as Stoker's."""
    mapped = _with_effect(options)
    group = {name: mapped.pop(name) for name in GROUP if name in mapped}
    if group.get("placement_group") not in (None, "default"):
        mapped["scheduling_strategy"] = PlacementGroupSchedulingStrategy(**group)
    for name in ("num_cpus", "name", "max_concurrency", "max_retries", "max_restarts"):
        if name in mapped and mapped[name] is None and name not in ("num_cpus", "max_concurrency"):
            del mapped[name]
    if of_actor:
        mapped.pop("num_returns", None)
    if "runtime_env" in mapped:
        mapped["runtime_env"] = mapped_env(mapped["runtime_env"])
    _map_labels(mapped)
    return mapped


def _with_effect(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, why in WITHOUT_EFFECT.items():
        if why and options.get(name):
            warn_once(f"option {name!r} has no effect in Stoker: {why}", stacklevel=6)
    return {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}


def _map_labels(mapped: dict[str, Any]) -> None:
    """Make conditions on the node of what Ray has as strategies, alternatives and resources."""
    strategy = mapped.get("scheduling_strategy")
    conditions: list[str] = []
    if isinstance(strategy, NodeLabelSchedulingStrategy):
        del mapped["scheduling_strategy"]
        conditions += [strategy.node_filter] if strategy.node_filter else []
    selector = {
        LABELS.get(name, name): value
        for name, value in (mapped.get("label_selector") or {}).items()
    }
    for name in list(mapped.get("resources") or ()):
        if name.startswith(NODE):
            mapped["resources"] = {n: a for n, a in mapped["resources"].items() if n != name}
            place = name.removeprefix(NODE)
            selector |= (
                {"stoker.io/head": "true"} if place == HEAD else {"stoker.io/address": place}
            )
    fallbacks = mapped.pop("fallback_strategy", None)
    if fallbacks:
        if selector:
            conditions.append(any_of([{"label_selector": selector}, *fallbacks]))
        selector = {}
    if selector or "label_selector" in mapped:
        mapped["label_selector"] = selector or None
    if conditions:
        given = mapped.get("node_filter")
        mapped["node_filter"] = " and ".join(f"({one})" for one in (given, *conditions) if one)


def any_of(alternatives: Sequence[Mapping[str, Any]]) -> str:
    """Return the node filter that holds on nodes that one of the label selectors admits."""
    filters = []
    for one in alternatives:
        unknown = set(one) - {"label_selector"}
        if unknown or not isinstance(one.get("label_selector"), Mapping):
            raise BadRequestError(
                f"fallback_strategy: {dict(one)!r}\ngive mappings with a label_selector",
                field="fallback_strategy",
            )
        parts = [condition(name, text) for name, text in one["label_selector"].items()]
        filters.append(" and ".join(parts) or "1 = 1")
    return " or ".join(f"({one})" for one in filters)


def condition(label: str, text: str) -> str:
    """Return one condition of a label selector as a node filter."""
    field = f'labels."{LABELS.get(label, label)}"'
    negated, value = text.startswith("!"), text.removeprefix("!")
    if value.startswith("in(") and value.endswith(")"):
        values = ", ".join(_quoted(each.strip()) for each in value[3:-1].split(","))
        positive, negative = f"{field} in ({values})", f"{field} not in ({values})"
    else:
        positive, negative = f"{field} = {_quoted(value)}", f"{field} != {_quoted(value)}"
    return f"({negative} or {field} is null)" if negated else positive


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
