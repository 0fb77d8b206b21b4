"""Options as they are given become checked ones, and those a demand to the scheduler.

Checked where they are given, so that a wrong option fails at the decorator or at ``.options()``, with the
nearest right name in the message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from stoker.exceptions import BadRequestError, UnknownOptionError, WrongTypeError
from stoker.runtime.options.checks import (
    check_labels,
    check_node_filter,
    checked_gpu_memory,
    checked_gpus,
    checked_grace,
    checked_tolerations,
    label_conditions,
    short_text,
)
from stoker.runtime.options.documentation import words_of
from stoker.runtime.options.options import MAX_OWN_NAMES, CommonOptions
from stoker.runtime.options.strategies import strategy_of
from stoker_wire.messages.cluster import Demand, LeaseKind
from stoker_wire.messages.common import OnInfeasible, RuntimeEnv, Strategy
from stoker_wire.suggestions import suggestion

T = TypeVar("T", bound=msgspec.Struct)


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
        options = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        value = given.get(field.split(".")[0].split("[")[0])
        if text.startswith("Invalid enum value") and (words := words_of(kind, field)):
            text += f"; of texts it takes {' or '.join(map(repr, words))}"
        # msgspec: "Expected `int`, got `str`", but "Expected `int` >= 0" for a value out of range.
        kind_of = WrongTypeError if ", got `" in text else BadRequestError
        raise kind_of(
            f"option {field!r} of {what} is {short_text(value)}: {text[:1].lower()}{text[1:]}",
            field=field,
        ) from None
    if isinstance(options, CommonOptions):
        _check_demand(options, what)
    return options


def _check_demand(options: CommonOptions, what: str) -> None:
    """Raise, where the options are given, for what no demand can hold."""
    resources_of(options, default_cpus=0.0)
    in_group = bool(strategy_of(options.scheduling_strategy).group_id)
    check_node_filter(options.node_filter or "", what, in_group=in_group)
    checked_grace(options.preemption_grace, what)
    checked_tolerations(options.tolerations or ())
    if options.background and in_group:
        raise BadRequestError(
            f"option 'background' of {what} has no meaning in a placement group\n"
            "what is in it has its bundle for itself: leave out one of the two",
            field="background",
        )
    for field in ("resources", "label_selector"):
        count = len(getattr(options, field) or ())
        if count > MAX_OWN_NAMES:
            raise BadRequestError(
                f"option {field!r} of {what} has {count} names: one request may have "
                f"{MAX_OWN_NAMES}",
                field=field,
            )
    check_labels(label_conditions(options.label_selector, options.accelerator_type), what)


def merged(options: T, given: Mapping[str, Any], *, what: str) -> T:
    """Return ``options`` with those ``given`` in their place."""
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    return check_options(type(options), {**values, **given}, what=what)


def resources_of(options: CommonOptions, *, default_cpus: float) -> dict[str, float]:
    """Return the resource vector: CPU, GPU, memory in bytes, and the custom ones."""
    reserved = {
        "CPU": "num_cpus",
        "GPU": "num_gpus",
        "gpu_memory": "gpu_memory",
        "memory": "memory",
    }
    resources: dict[str, float] = {}
    for key, amount in (options.resources or {}).items():
        if key in reserved:
            raise BadRequestError(
                f"resources[{key!r}]: use the option {reserved[key]}= for it", field="resources"
            )
        if amount:
            resources[key] = amount
    cpus = default_cpus if options.num_cpus is None else options.num_cpus
    if cpus:
        resources["CPU"] = cpus
    if options.num_gpus:
        resources["GPU"] = checked_gpus(options.num_gpus)
    if options.gpu_memory is not None:
        resources["gpu_memory"] = checked_gpu_memory(options.gpu_memory, options.num_gpus)
    if options.memory:
        resources["memory"] = options.memory
    for key, amount in resources.items():
        if not math.isfinite(amount):
            name = reserved.get(key, f"resources[{key!r}]")
            raise BadRequestError(f"{name}={amount} is not an amount", field=name)
    return resources


def demand_of(
    options: CommonOptions,
    *,
    job_id: str,
    kind: LeaseKind,
    runtime_env: RuntimeEnv,
    strategy: Strategy,
    default_cpus: float,
    name: str,
) -> Demand:
    """Return the demand to send to the scheduler, to which equal ones are interchangeable."""
    background = options.background and not strategy.group_id  # a bundle is for nobody else
    return Demand(
        job_id=job_id,
        kind=kind,
        resources=resources_of(options, default_cpus=default_cpus),
        runtime_env=runtime_env,
        label_selector=label_conditions(options.label_selector, options.accelerator_type),
        node_filter=options.node_filter or "",
        tolerations=checked_tolerations(options.tolerations or ()),
        strategy=strategy,
        priority=options.priority,
        on_infeasible=OnInfeasible(options.on_infeasible),
        name=name,
        preemptible=options.preemptible or background,
        preemption_grace_s=options.preemption_grace,
        background=background,
    )
