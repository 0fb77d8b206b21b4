"""The grammar of node filters, as in ``node_filter="labels.rack != 'r7' and free.gpu >= 2"``.

The condition of a SQL ``WHERE``, over the attributes of a node. The sdk and the gcs check what they are given
by it, and the scheduler reads it by it: one parser, so that what is accepted is what is evaluated. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker_wire.amounts import parse_amount
from stoker_wire.errors import BadRequestError
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from lark import Lark, Token

MAX_LENGTH = 4096
MAX_DEPTH = 32
"""Parentheses within one another."""


class Attribute(StrEnum):
    """Attributes of a node; a filter gives the first three a name: ``labels.rack``."""

    LABELS = "labels"
    TOTAL = "total"
    FREE = "free"
    NODE_ID = "node_id"
    HOSTNAME = "hostname"
    SLOW_RANKS = "slow_ranks"


_NAMED = (Attribute.LABELS, Attribute.TOTAL, Attribute.FREE)
_NUMBERS = (Attribute.TOTAL, Attribute.FREE, Attribute.SLOW_RANKS)
_RESOURCES = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}
"""Resources that may be written in any case."""
IDENTIFIERS = (
    "labels.NAME",
    "total.RESOURCE",
    "free.RESOURCE",
    *(a for a in Attribute if a not in _NAMED),
)
GRAMMAR = (
    "write a condition like \"labels.rack != 'r7' and free.gpu >= 2\", of "
    f"{', '.join(IDENTIFIERS)}, numbers, 'texts', comparisons, IN, LIKE, BETWEEN, IS NULL, AND, OR, NOT "
    "and parentheses"
)

_RULES = r"""
?start: disjunction
disjunction: conjunction (_OR conjunction)*
conjunction: negation (_AND negation)*
?negation: _NOT negation -> negated
         | condition
?condition: "(" disjunction ")"
          | operand COMPARISON operand -> comparison
          | operand _IN "(" operand ("," operand)* ")" -> among
          | operand _NOT _IN "(" operand ("," operand)* ")" -> not_among
          | operand _LIKE operand -> like
          | operand _NOT _LIKE operand -> not_like
          | operand _BETWEEN operand _AND operand -> between
          | operand _NOT _BETWEEN operand _AND operand -> not_between
          | operand _IS _NULL -> is_null
          | operand _IS _NOT _NULL -> is_not_null
?operand: FIELD -> field
        | TEXT -> text
        | NUMBER -> number

_OR.2: /or\b/i
_AND.2: /and\b/i
_NOT.2: /not\b/i
_IN.2: /in\b/i
_LIKE.2: /like\b/i
_BETWEEN.2: /between\b/i
_IS.2: /is\b/i
_NULL.2: /null\b/i
COMPARISON: /<=|>=|<>|!=|==|=|<|>/
FIELD: /[A-Za-z_]\w*(\.("[^"]+"|\w[\w-]*([.\/]\w[\w-]*)*))?/
TEXT: /'([^']|'')*'/
NUMBER: /[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?/
%ignore /\s+/
"""


class NodeFilterError(ValueError):
    """A node filter that cannot be read; the text says where, why and what to write."""


@dataclass(frozen=True, slots=True)
class Field:
    """An attribute of a node; ``name`` is that of the label or resource."""

    attribute: Attribute
    name: str = ""


Operand = Field | str | float


@dataclass(frozen=True, slots=True)
class Condition:
    """``operands[0] OPERATOR operands[1:]``; an operator is one of SQL, in capitals, as ``NOT IN``."""

    operator: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Expressions of which each must hold."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Expressions of which one must hold."""

    parts: tuple[Expression, ...]


Expression = Condition | AllOf | AnyOf

_OPPOSITE = {"=": "!=", "<": ">=", ">": "<="}
_OPPOSITE |= {
    "IN": "NOT IN",
    "LIKE": "NOT LIKE",
    "BETWEEN": "NOT BETWEEN",
    "IS NULL": "IS NOT NULL",
}
_OPPOSITE |= {opposite: operator for operator, opposite in _OPPOSITE.items()}


def check(text: str, field: str = "node_filter") -> None:
    """Raise BadRequestError, with the position, unless ``text`` is empty or can be read."""
    if not text:
        return
    try:
        parse(text)
    except NodeFilterError as error:
        raise BadRequestError(f"{field} cannot be read\n{error}", field=field) from None


def parse(text: str) -> Expression:
    """Return what a filter says, without NOT: conditions have an opposite, as SQL's three values allow.

    Raises NodeFilterError, with the position.
    """
    from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

    if len(text) > MAX_LENGTH:
        raise NodeFilterError(f"it has {len(text)} characters\nuse {MAX_LENGTH} at most")
    _check_depth(text)
    try:
        parsed: Expression = _parser().parse(text)  # type: ignore[assignment]
    except UnexpectedCharacters as error:
        raise _unreadable(text, error.pos_in_stream) from None
    except UnexpectedToken as error:
        at = error.pos_in_stream if error.token.type != "$END" else len(text)
        raise _unreadable(text, at) from None
    except UnexpectedInput:
        raise _unreadable(text, len(text)) from None
    return parsed


def _check_depth(text: str) -> None:
    depth = 0
    for index, letter in enumerate(re.sub(r"'[^']*'", lambda m: "_" * len(m[0]), text)):
        depth += (letter == "(") - (letter == ")")
        if depth > MAX_DEPTH:
            raise NodeFilterError(
                f"it has more than {MAX_DEPTH} parentheses within one another at position {index + 1}"
                "\nuse fewer"
            )


def _unreadable(text: str, at: int | None) -> NodeFilterError:
    at = len(text) if at is None else at
    if not text[at:].strip():
        return NodeFilterError(f"it ends too early, at position {len(text) + 1}\n{GRAMMAR}")
    near = text[at : at + 20]
    fix = "write texts in single quotes" if near.startswith('"') else GRAMMAR
    return NodeFilterError(f"it cannot be read at position {at + 1}, from {near!r} on\n{fix}")


class _Builder:
    """Makes expressions of what the parser finds: a method for each rule, and its parts in a list."""

    def disjunction(self, parts: list[Expression]) -> Expression:
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def conjunction(self, parts: list[Expression]) -> Expression:
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def negated(self, parts: list[Expression]) -> Expression:
        return _negated(parts[0])

    def comparison(self, parts: list[Any]) -> Condition:
        left, operator, right = parts
        return _condition({"<>": "!=", "==": "="}.get(operator, str(operator)), [left, right])

    def among(self, parts: list[_Located]) -> Condition:
        return _condition("IN", parts)

    def not_among(self, parts: list[_Located]) -> Condition:
        return _condition("NOT IN", parts)

    def like(self, parts: list[_Located]) -> Condition:
        return _condition("LIKE", parts)

    def not_like(self, parts: list[_Located]) -> Condition:
        return _condition("NOT LIKE", parts)

    def between(self, parts: list[_Located]) -> Condition:
        return _condition("BETWEEN", parts)

    def not_between(self, parts: list[_Located]) -> Condition:
        return _condition("NOT BETWEEN", parts)

    def is_null(self, parts: list[_Located]) -> Condition:
        return _condition("IS NULL", parts)

    def is_not_null(self, parts: list[_Located]) -> Condition:
        return _condition("IS NOT NULL", parts)

    def field(self, parts: list[Token]) -> _Located:
        return _Located(_field(parts[0]), _position(parts[0]))

    def text(self, parts: list[Token]) -> _Located:
        return _Located(parts[0][1:-1].replace("''", "'"), _position(parts[0]))

    def number(self, parts: list[Token]) -> _Located:
        return _Located(float(parts[0]), _position(parts[0]))


class _Located(NamedTuple):
    """An operand and its position, from 1."""

    operand: Operand
    at: int


def _position(token: Token) -> int:
    return (token.start_pos or 0) + 1


def _field(token: Token) -> Field:
    head, dot, name = token.partition(".")
    name = name.strip('"')
    known = next((one for one in Attribute if one == head.lower()), None)
    if known is None or (known in _NAMED) != bool(dot):
        raise NodeFilterError(
            f"{str(token)!r} at position {_position(token)} is no attribute of a node\n"
            f"{suggestion(str(token), IDENTIFIERS)}"
        )
    if known in (Attribute.TOTAL, Attribute.FREE):
        name = _RESOURCES.get(name.lower(), name)
    return Field(known, name)


def _condition(operator: str, located: list[_Located]) -> Condition:
    """Return a condition whose operands can be compared; amounts may be texts, such as '64GiB'."""
    fields = [one for one in located if isinstance(one.operand, Field)]
    if not fields:
        raise NodeFilterError(
            f"the condition at position {located[0].at} names no attribute of a node\n{GRAMMAR}"
        )
    if operator.endswith("NULL"):
        if (
            not isinstance(located[0].operand, Field)
            or located[0].operand.attribute is not Attribute.LABELS
        ):
            raise NodeFilterError(
                f"{operator} at position {located[0].at} can only be asked of a label\n"
                "every node has the other attributes"
            )
        return Condition(operator, (located[0].operand,))
    is_number = any(one.operand.attribute in _NUMBERS for one in fields)  # type: ignore[union-attr]
    is_text = any(
        one.operand.attribute in (Attribute.NODE_ID, Attribute.HOSTNAME)  # type: ignore[union-attr]
        for one in fields
    )
    if operator.endswith("LIKE") and (is_number or not isinstance(located[1].operand, str)):
        raise NodeFilterError(
            f"LIKE at position {located[0].at} is for texts\n"
            "write it like labels.rack LIKE 'r%'; compare numbers with <, = and >"
        )
    operands = [_amount(one) if is_number else one.operand for one in located]
    if is_text and (is_number or any(isinstance(one, float) for one in operands)):
        raise NodeFilterError(
            f"the condition at position {located[0].at} compares a text with a number\n"
            "write the text in single quotes"
        )
    return Condition(operator, tuple(operands))


def _amount(one: _Located) -> Operand:
    if not isinstance(one.operand, str):
        return one.operand
    try:
        return parse_amount(one.operand)
    except ValueError as error:
        raise NodeFilterError(f"{error}, at position {one.at}\nwrite a number") from None


def _negated(expression: Expression) -> Expression:
    match expression:
        case AllOf(parts):
            return AnyOf(tuple(_negated(part) for part in parts))
        case AnyOf(parts):
            return AllOf(tuple(_negated(part) for part in parts))
        case Condition(operator, operands):
            return Condition(_OPPOSITE[operator], operands)


@cache
def _parser() -> Lark:
    from lark import Lark

    return Lark(_RULES, parser="lalr", transformer=_Builder(), maybe_placeholders=False)
