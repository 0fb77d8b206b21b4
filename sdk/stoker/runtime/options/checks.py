"""Checks of single options whose values say nothing by their type: amounts, labels, times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker_wire.amounts import parse_amount
from stoker_wire.constraints import node_filters
from stoker_wire.constraints.label_selectors import parse_value
from stoker_wire.messages.cluster import MAX_GRACE_S

if TYPE_CHECKING:
    from stoker_wire.constraints.taints import Toleration

_MAX_SHOWN = 200


def short_text(value: Any) -> str:
    """Return a value for an error's text, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def checked_gpus(num_gpus: float) -> float:
    """Return a number of GPUs, or a part of one; raise BadRequestError for parts of several."""
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise BadRequestError(
            f"num_gpus={num_gpus}: above 1 only whole GPUs can be given", field="num_gpus"
        )
    return num_gpus


def checked_gpu_memory(gpu_memory: str | float, num_gpus: float | None) -> float:
    """Return a part of a GPU in bytes; raise BadRequestError for one that makes no sense."""
    try:
        nbytes = parse_amount(gpu_memory)
    except ValueError:
        raise BadRequestError(
            f"gpu_memory={gpu_memory!r} is no amount\nwrite it like 10GiB, or in bytes",
            field="gpu_memory",
        ) from None
    if not 0 < nbytes < math.inf:
        raise BadRequestError(
            f"gpu_memory={gpu_memory!r}: give more than 0 bytes", field="gpu_memory"
        )
    if num_gpus:
        raise BadRequestError("give num_gpus or gpu_memory, not both", field="gpu_memory")
    return nbytes


def label_conditions(
    label_selector: Mapping[str, str] | None, accelerator_type: str | None
) -> dict[str, str]:
    """Return the conditions on the labels of nodes; the kind of accelerator is one."""
    kind = {"accelerator_type": accelerator_type} if accelerator_type else {}
    return {**(label_selector or {}), **kind}


def check_labels(conditions: Mapping[str, str], what: str) -> None:
    """Raise BadRequestError for a condition on a label that cannot be read."""
    for label, written in conditions.items():
        try:
            parse_value(label, written)
        except ValueError as error:
            raise BadRequestError(
                f"option 'label_selector' of {what} cannot be read\n{error}", field="label_selector"
            ) from None


def checked_grace(grace_s: float | None, what: str) -> float | None:
    """Return the grace of a preemption; raise BadRequestError for one that makes no sense."""
    if grace_s is not None and not 0 <= grace_s <= MAX_GRACE_S:
        raise BadRequestError(
            f"option 'preemption_grace' of {what} is {grace_s}: give 0 to {MAX_GRACE_S:.0f} s",
            field="preemption_grace",
        )
    return grace_s


def checked_tolerations(given: Any) -> tuple[Toleration, ...]:
    """Return tolerations of texts such as ``gpu=a100:NoSchedule`` and of mappings."""
    from stoker_wire.constraints.taints import MAX_TAINTS, Toleration, parse_toleration

    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise WrongTypeError(
            f"tolerations: {short_text(given)}\ngive a list, as ['key=value:NoSchedule']",
            field="tolerations",
        )
    found = []
    for one in given:
        try:
            found.append(
                parse_toleration(one)
                if isinstance(one, str)
                else msgspec.convert(one, Toleration, from_attributes=True)
            )
        except ValueError as error:
            raise BadRequestError(
                f"tolerations: one cannot be read\n{error}", field="tolerations"
            ) from None
    if len(found) > MAX_TAINTS:
        raise BadRequestError(
            f"tolerations: {len(found)} are too many\ngive {MAX_TAINTS} at most",
            field="tolerations",
        )
    return tuple(found)


def check_node_filter(node_filter: str, what: str, *, in_group: bool) -> None:
    """Raise BadRequestError for a filter that cannot be read, or of work in a placement group."""
    if node_filter and in_group:
        raise BadRequestError(
            f"option 'node_filter' of {what} has no meaning in a placement group\n"
            "its nodes were chosen with it: give the filter to stoker.placement_group()",
            field="node_filter",
        )
    node_filters.check(node_filter)
