"""Node filters, already parsed: ``wire_types`` reads what the user wrote.

They have SQL's three values: a comparison with a label that the node does not have is unknown (None), and
only what is true lets a node pass. There is no NOT: each operator has an opposite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, Protocol

from stoker_scheduler.core.model.resources import GPU, UNIT, to_amount

if TYPE_CHECKING:
    from stoker_scheduler.core.model.devices import Devices


class FilteredSpec(Protocol):
    """The description of a node, as far as filters ask for it."""

    @property
    def node_id(self) -> str:
        """Its id."""

    @property
    def hostname(self) -> str:
        """The name of its host."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""

    @property
    def total(self) -> Mapping[str, int]:
        """All units of it without GPUs."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """The indices of its GPUs."""


class FilteredNode(Protocol):
    """A node, as far as filters ask for it."""

    @property
    def spec(self) -> FilteredSpec:
        """Its description."""

    @property
    def available(self) -> Mapping[str, int]:
        """The units that no lease has, without GPUs."""

    @property
    def devices(self) -> Devices:
        """Its GPUs."""

    @property
    def slow_ranks(self) -> Mapping[str, float]:
        """The slow ranks that were reported on it."""


class Attribute(StrEnum):
    """Attributes of a node, as users write them."""

    LABELS = "labels"
    TOTAL = "total"
    FREE = "free"
    NODE_ID = "node_id"
    HOSTNAME = "hostname"
    SLOW_RANKS = "slow_ranks"


_PASSING = frozenset({Attribute.FREE, Attribute.SLOW_RANKS})
"""Attributes that change while the node stays as it is."""


class Operator(StrEnum):
    """The operators, as in SQL."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    LESS_EQUAL = "<="
    GREATER = ">"
    GREATER_EQUAL = ">="
    IN = "IN"
    NOT_IN = "NOT IN"
    LIKE = "LIKE"
    NOT_LIKE = "NOT LIKE"
    BETWEEN = "BETWEEN"
    NOT_BETWEEN = "NOT BETWEEN"
    IS_NULL = "IS NULL"
    IS_NOT_NULL = "IS NOT NULL"


Value = str | float | None
_ORDERS: dict[Operator, Callable[[Any, Any], bool]] = {
    Operator.LESS: lt,
    Operator.LESS_EQUAL: le,
    Operator.GREATER: gt,
    Operator.GREATER_EQUAL: ge,
}


@dataclass(frozen=True, slots=True)
class Field:
    """An attribute of a node; ``name`` is that of the label or resource."""

    attribute: Attribute
    name: str = ""

    @property
    def text(self) -> str:
        """The field as users write it."""
        if not self.name:
            return self.attribute.value
        plain = re.fullmatch(r"\w[\w-]*([./]\w[\w-]*)*", self.name)
        return f"{self.attribute}.{self.name}" if plain else f'{self.attribute}."{self.name}"'

    def value(self, node: FilteredNode) -> Value:
        """Return what the node has; None for a label that it does not have."""
        match self.attribute:
            case Attribute.LABELS:
                return node.spec.labels.get(self.name)
            case Attribute.TOTAL:
                return _total(node, self.name)
            case Attribute.FREE:
                units = (
                    node.devices.free_units
                    if self.name == GPU
                    else node.available.get(self.name, 0)
                )
                return to_amount(self.name, units)
            case Attribute.NODE_ID:
                return node.spec.node_id
            case Attribute.HOSTNAME:
                return node.spec.hostname
            case Attribute.SLOW_RANKS:
                return float(len(node.slow_ranks))

    def range(self, node: FilteredNode) -> tuple[float, float]:
        """Return the least and the most that a passing attribute can come to be."""
        return -math.inf, _total(node, self.name) if self.attribute is Attribute.FREE else math.inf


def _total(node: FilteredNode, name: str) -> float:
    units = UNIT * len(node.spec.gpus) if name == GPU else node.spec.total.get(name, 0)
    return to_amount(name, units)


Operand = Field | str | float


@dataclass(frozen=True, slots=True)
class Condition:
    """``operands[0] OPERATOR operands[1:]``."""

    operator: Operator
    operands: tuple[Operand, ...]

    @property
    def text(self) -> str:
        """The condition as a user would write it."""
        left, *right = [_operand_text(one) for one in self.operands]
        if self.operator in (Operator.IN, Operator.NOT_IN):
            return f"{left} {self.operator} ({', '.join(right)})"
        return " ".join((left, self.operator, " AND ".join(right))).rstrip()

    @property
    def is_passing(self) -> bool:
        """Whether its value changes while the node stays as it is."""
        return any(isinstance(one, Field) and one.attribute in _PASSING for one in self.operands)

    def truth(self, node: FilteredNode) -> bool | None:
        """Return whether it holds on the node as it is; None if that is unknown."""
        left, *right = [one.value(node) if isinstance(one, Field) else one for one in self.operands]
        return _truth(self.operator, left, right)

    def may_hold(self, node: FilteredNode) -> bool:
        """Return whether it holds, or could when other work ends or starts."""
        if not self.is_passing:
            return self.truth(node) is True
        (low, high), *others = [_range(one, node) for one in self.operands]
        match self.operator:
            case Operator.LESS | Operator.LESS_EQUAL:
                return _ORDERS[self.operator](low, others[0][1])
            case Operator.GREATER | Operator.GREATER_EQUAL:
                return _ORDERS[self.operator](high, others[0][0])
            case Operator.EQUAL | Operator.IN:
                return any(low <= most and least <= high for least, most in others)
            case Operator.BETWEEN:
                return high >= others[0][0] and low <= others[1][1]
            case _:
                return True

    def why_not(self, node: FilteredNode) -> str:
        """Return in words why it does not hold: ``labels.rack != 'r7' is false: rack is r7``."""
        facts = [_fact(one, node) for one in self.operands if isinstance(one, Field)]
        verdict = "unknown" if self.truth(node) is None else "false"
        return f"{self.text} is {verdict}: {', '.join(dict.fromkeys(facts))}"


@dataclass(frozen=True, slots=True)
class AllOf:
    """Expressions of which each must hold."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Expressions of which one must hold."""

    parts: tuple[Expression, ...]


Expression = Condition | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """A filter of a demand, or of the ``queue`` that its job is in."""

    expression: Expression
    queue: str = ""

    @property
    def reads(self) -> frozenset[str]:
        """The resources of which it asks how much is free."""
        fields = (one for part in _conditions(self.expression) for one in part.operands)
        return frozenset(
            one.name for one in fields if isinstance(one, Field) and one.attribute is Attribute.FREE
        )

    def holds(self, node: FilteredNode) -> bool:
        """Return whether the node passes now."""
        return _holds(self.expression, node)

    def may_hold(self, node: FilteredNode) -> bool:
        """Return whether the node passes, or could when other work ends or starts."""
        return _may_hold(self.expression, node)

    def why_not(self, node: FilteredNode) -> str:
        """Return in words which conditions keep the node from passing."""
        whose = f"node_filter of queue {self.queue!r}: " if self.queue else "node_filter: "
        return whose + _why_not(self.expression, node)

    @property
    def text(self) -> str:
        """The whole filter as a user would write it."""
        return _text(self.expression)


def _holds(expression: Expression, node: FilteredNode) -> bool:
    match expression:
        case Condition():
            return expression.truth(node) is True
        case AllOf(parts):
            return all(_holds(part, node) for part in parts)
        case AnyOf(parts):
            return any(_holds(part, node) for part in parts)


def _may_hold(expression: Expression, node: FilteredNode) -> bool:
    match expression:
        case Condition():
            return expression.may_hold(node)
        case AllOf(parts):
            return all(_may_hold(part, node) for part in parts)
        case AnyOf(parts):
            return any(_may_hold(part, node) for part in parts)


def _why_not(expression: Expression, node: FilteredNode) -> str:
    match expression:
        case Condition():
            return expression.why_not(node)
        case AllOf(parts):
            return "; ".join(_why_not(part, node) for part in parts if not _holds(part, node))
        case AnyOf(parts):
            return " and ".join(_why_not(part, node) for part in parts)


def _text(expression: Expression) -> str:
    match expression:
        case Condition():
            return expression.text
        case AllOf(parts):
            return " AND ".join(
                f"({_text(part)})" if isinstance(part, AnyOf) else _text(part) for part in parts
            )
        case AnyOf(parts):
            return " OR ".join(_text(part) for part in parts)


def _conditions(expression: Expression) -> Iterator[Condition]:
    if isinstance(expression, Condition):
        yield expression
        return
    for part in expression.parts:
        yield from _conditions(part)


def _truth(operator: Operator, left: Value, right: Sequence[Value]) -> bool | None:
    match operator:
        case Operator.IS_NULL:
            return left is None
        case Operator.IS_NOT_NULL:
            return left is not None
        case Operator.EQUAL | Operator.IN:
            return _any(_compare(Operator.EQUAL, left, one) for one in right)
        case Operator.NOT_EQUAL | Operator.NOT_IN:
            return _not(_any(_compare(Operator.EQUAL, left, one) for one in right))
        case Operator.LIKE | Operator.NOT_LIKE:
            pattern = right[0]
            if not isinstance(left, str) or not isinstance(pattern, str):
                return None
            return (_like(pattern).fullmatch(left) is not None) is (operator is Operator.LIKE)
        case Operator.BETWEEN | Operator.NOT_BETWEEN:
            outside = _any(
                (
                    _compare(Operator.LESS, left, right[0]),
                    _compare(Operator.GREATER, left, right[1]),
                )
            )
            return outside if operator is Operator.NOT_BETWEEN else _not(outside)
        case _:
            return _compare(operator, left, right[0])


def _any(truths: Iterable[bool | None]) -> bool | None:
    known = list(truths)
    return True if True in known else None if None in known else False


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _compare(operator: Operator, left: Value, right: Value) -> bool | None:
    """Compare two values; the text of a label is taken for a number beside one, if it is one."""
    if isinstance(left, float) and isinstance(right, str):
        right = _number(right)
    elif isinstance(left, str) and isinstance(right, float):
        left = _number(left)
    if left is None or right is None:
        return None
    if operator is Operator.EQUAL:
        return left == right
    return _ORDERS[operator](left, right)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@lru_cache(maxsize=1024)
def _like(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: ``%`` is any text, ``_`` any letter."""
    parts = {"%": ".*", "_": "."}
    return re.compile(
        "".join(parts.get(letter) or re.escape(letter) for letter in pattern), re.DOTALL
    )


def _range(operand: Operand, node: FilteredNode) -> tuple[float, float]:
    """Return the least and the most that an operand can come to be; of a text, what no number is."""
    if isinstance(operand, Field) and operand.attribute in _PASSING:
        return operand.range(node)
    value = operand.value(node) if isinstance(operand, Field) else operand
    number = _number(value) if isinstance(value, str) else value
    return (math.nan, math.nan) if number is None else (number, number)


def _operand_text(operand: Operand) -> str:
    match operand:
        case Field():
            return operand.text
        case str():
            return "'" + operand.replace("'", "''") + "'"
        case _:
            return f"{operand:.15g}"


def _fact(field: Field, node: FilteredNode) -> str:
    value = field.value(node)
    name = field.name if field.attribute is Attribute.LABELS else field.text
    if value is None:
        return f"the node has no label {name}"
    return f"{name} is {value if isinstance(value, str) else format(value, '.15g')}"
