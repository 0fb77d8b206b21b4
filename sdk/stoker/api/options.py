"""The options of remote functions and classes: their names, types, defaults and what they mean.

Checked where they are given, so that a wrong option fails at the decorator or at ``.options()``,
with the nearest right name in the message. Turned into a scheduling demand by :func:`demand_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stoker.exceptions import BadRequestError, UnknownOptionError, WrongTypeError
from stoker_wire.label_selectors import parse_value
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.common import (
    MAX_NAMES,
    OnInfeasible,
    RuntimeEnv,
    SpreadPolicy,
    Strategy,
)
from stoker_wire.suggestions import suggestion

Amount = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T", bound=msgspec.Struct)
_RESERVED_NAMES = 4
"""Names that options of their own add to a request: CPU, GPU, memory; accelerator_type."""
_SAID = 200


class NodeAffinity(msgspec.Struct, frozen=True, kw_only=True):
    """Run on the node ``node_id``; with ``soft`` elsewhere if it cannot take the work."""

    node_id: str
    soft: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_cpus: Amount | None = None
    num_gpus: Amount | None = None
    memory: Amount | None = None
    resources: dict[str, Amount] | None = None
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    name: str | None = None
    scheduling_strategy: Any = None
    runtime_env: Any = None
    priority: int = 0
    on_infeasible: Literal["error", "wait"] = "error"


class TaskOptions(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a remote function.

    ``timeout`` and ``start_deadline`` and ``retry_delay`` are seconds. ``cache`` reuses the result
    of an earlier call of this process with equal function and arguments. Without
    ``enable_task_events`` the task history keeps nothing of it: for many short calls.
    """

    num_returns: Count | Literal["streaming"] | None = None
    max_retries: Annotated[int, msgspec.Meta(ge=-1)] = 3
    retry_exceptions: Any = False
    retry_delay: Amount = 0.0
    max_calls: Count = 0
    timeout: Amount | None = None
    start_deadline: Amount | None = None
    cache: bool = False
    enable_task_events: bool = True


class ActorOptions(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a remote class. ``max_concurrency`` defaults to 1, or 1000 for async actors.

    ``allow_out_of_order_execution``: whether a call may start before earlier calls of its caller
    whose arguments are not there yet. By default it may where several calls run at once anyway, and
    may not in an actor, or a concurrency group, that runs one call at a time.
    """

    namespace: str | None = None
    get_if_exists: bool = False
    lifetime: Literal["detached", "non_detached"] | None = None
    max_restarts: Annotated[int, msgspec.Meta(ge=-1)] = 0
    max_task_retries: Annotated[int, msgspec.Meta(ge=-1)] = 0
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrency_groups: dict[str, Annotated[int, msgspec.Meta(ge=1)]] | None = None
    max_pending_calls: Annotated[int, msgspec.Meta(ge=-1)] = -1
    allow_out_of_order_execution: bool | None = None


class MethodOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one method of an actor, given by ``@stoker.method`` or ``.options()``.

    ``timeout`` is seconds from its start: then it is told to stop, and its caller gets
    ``TaskTimeoutError``, within a second even if its code does not stop. ``enable_task_events`` as of
    tasks.
    """

    num_returns: Count | Literal["streaming"] | None = None
    concurrency_group: str = ""
    name: str | None = None
    timeout: Amount | None = None
    max_task_retries: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    retry_exceptions: Any = False
    enable_task_events: bool = True


def check_options(kind: type[T], given: Mapping[str, Any], *, what: str) -> T:
    """Return ``given`` as ``kind``; an unknown name or a wrong type is an error that names it."""
    known = kind.__struct_fields__
    for key in given:
        if key not in known:
            raise UnknownOptionError(
                f"{what} has no option {key!r}\n{suggestion(key, known)}", field=key
            )
    if given.get("name") == "" or str(given.get("name")).isspace():
        raise BadRequestError(
            f"option 'name' of {what} is {given['name']!r}: give a name, or leave it out",
            field="name",
        )
    try:
        found = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        value = given.get(field.split(".")[0].split("[")[0])
        if text.startswith("Invalid enum value") and (words := _words(kind, field)):
            text += f"; of texts it takes {' or '.join(map(repr, words))}"
        # msgspec: "Expected `int`, got `str`", but "Expected `int` >= 0" for a value out of range.
        kind_of = WrongTypeError if ", got `" in text else BadRequestError
        raise kind_of(
            f"option {field!r} of {what} is {_short(value)}: {text[:1].lower()}{text[1:]}",
            field=field,
        ) from None
    if isinstance(found, _Common):
        _check_demand(found, what)
    return found


def _words(kind: type[msgspec.Struct], field: str) -> list[str]:
    """Return the texts that the annotation of ``field`` names."""
    from msgspec import inspect

    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    found = next((f.type for f in info.fields if f.name == field), None)
    kinds = found.types if isinstance(found, inspect.UnionType) else (found,)
    return [str(v) for k in kinds if isinstance(k, inspect.LiteralType) for v in k.values]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SAID else f"{text[:_SAID]}..."


def _check_demand(options: _Common, what: str) -> None:
    """Raise for what no demand can say, where it is given."""
    resources_of(options, default_cpus=0.0)
    strategy_of(options.scheduling_strategy)
    for field in ("resources", "label_selector"):
        count = len(getattr(options, field) or ())
        if count > MAX_NAMES - _RESERVED_NAMES:
            raise BadRequestError(
                f"option {field!r} of {what} has {count} names: one request may have "
                f"{MAX_NAMES - _RESERVED_NAMES}",
                field=field,
            )
    conditions = dict(options.label_selector or {})
    if options.accelerator_type:
        conditions["accelerator_type"] = options.accelerator_type
    for label, written in conditions.items():
        try:
            parse_value(label, written)
        except ValueError as error:
            raise BadRequestError(
                f"option 'label_selector' of {what} cannot be read\n{error}", field="label_selector"
            ) from None


def merged(options: T, given: Mapping[str, Any], *, what: str) -> T:
    """Return ``options`` with those ``given`` in their place."""
    both = {name: getattr(options, name) for name in options.__struct_fields__}
    return check_options(type(options), {**both, **given}, what=what)


def resources_of(options: _Common, *, default_cpus: float) -> dict[str, float]:
    """Return the resource vector: CPU, GPU, memory in bytes, and the custom ones."""
    reserved = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    found: dict[str, float] = {}
    for key, amount in (options.resources or {}).items():
        if key in reserved:
            raise BadRequestError(
                f"resources[{key!r}]: use the option {reserved[key]}= for it", field="resources"
            )
        if amount:
            found[key] = amount
    cpus = default_cpus if options.num_cpus is None else options.num_cpus
    if cpus:
        found["CPU"] = cpus
    if options.num_gpus:
        if options.num_gpus > 1 and options.num_gpus != int(options.num_gpus):
            raise BadRequestError(
                f"num_gpus={options.num_gpus}: above 1 only whole GPUs can be given",
                field="num_gpus",
            )
        found["GPU"] = options.num_gpus
    if options.memory:
        found["memory"] = options.memory
    for key, amount in found.items():
        if not math.isfinite(amount):
            name = reserved.get(key, f"resources[{key!r}]")
            raise BadRequestError(f"{name}={amount} is not an amount", field=name)
    return found


def strategy_of(value: Any) -> Strategy:
    """Return the scheduling strategy that a user wrote as a name or a ``NodeAffinity``."""
    if value is None or value == "DEFAULT":
        return Strategy()
    if value == "SPREAD":
        return Strategy(policy=SpreadPolicy.SPREAD)
    if isinstance(value, NodeAffinity):
        return Strategy(node_id=value.node_id, soft=value.soft)
    raise BadRequestError(
        f"scheduling_strategy={value!r} is no strategy\n"
        "use 'DEFAULT', 'SPREAD' or NodeAffinity(node_id=...)",
        field="scheduling_strategy",
    )


def demand_of(
    options: _Common,
    *,
    job_id: str,
    kind: LeaseKind,
    runtime_env: RuntimeEnv,
    default_cpus: float,
    name: str,
) -> Demand:
    """Return what the scheduler is asked for: equal demands are interchangeable to it."""
    labels = dict(options.label_selector or {})
    if options.accelerator_type:
        labels["accelerator_type"] = options.accelerator_type
    return Demand(
        job_id=job_id,
        kind=kind,
        resources=resources_of(options, default_cpus=default_cpus),
        runtime_env=runtime_env,
        label_selector=labels,
        strategy=strategy_of(options.scheduling_strategy),
        priority=options.priority,
        on_infeasible=OnInfeasible(options.on_infeasible),
        name=name,
    )
