"""The rules of the key-value store: what a conditional operation makes of a key, or why it is refused.

A rule takes the key as it is (None: it does not exist, or has expired) and returns what follows, or
raises the error that the caller gets. It knows nothing of stores and clocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stoker_wire.errors import BadRequestError, ConflictError, NotFoundError

if TYPE_CHECKING:
    from stoker_wire.messages.control import (
        KvAdd,
        KvCompareSet,
        KvDelete,
        KvItem,
        KvPut,
    )

_WHOLE_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_LARGEST = 2**63 - 1
_SHOWN_BYTES = 40


@dataclass(frozen=True, slots=True)
class Write:
    """Setting of the key. ``shown`` is in the reply, for a caller that cannot know it."""

    value: bytes
    expires_at_s: float | None
    shown: bytes | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Removal of the key, as it is now."""


@dataclass(frozen=True, slots=True)
class Keep:
    """No change; the reply says what the key holds."""

    shown: bytes


Decision: TypeAlias = Write | Remove | Keep


def put(
    namespace: str, body: KvPut, held: KvItem | None, *, expires_at_s: float | None
) -> Decision:
    """Set the key if it is as the conditions say."""
    if body.if_absent and held is not None:
        raise _conflict(f"the key {body.key!r} exists in namespace {namespace!r}", held)
    _check_revision(namespace, body.key, body.if_revision, held)
    if body.if_value is not None and (held is None or held.value != body.if_value):
        has = "does not exist" if held is None else "has another value than if_value"
        raise _conflict(f"the key {body.key!r} in namespace {namespace!r} {has}", held)
    return Write(body.value, expires_at_s)


def add(body: KvAdd, held: KvItem | None, *, expires_at_s: float | None) -> Decision:
    """Add to the number that the key holds; it expires when it did, unless ``expires_at_s`` is given."""
    value = b"0" if held is None else held.value
    if not _WHOLE_NUMBER.fullmatch(value):
        raise BadRequestError(
            f"the key {body.key!r} holds no whole number\n"
            f"its value is {value[:_SHOWN_BYTES]!r}; add works on ASCII decimals",
            field="key",
        )
    total = int(value) + body.amount
    if not -_LARGEST - 1 <= total <= _LARGEST:
        raise BadRequestError(
            f"the key {body.key!r} cannot hold {total}\nnumbers have 64 bits", field="amount"
        )
    if expires_at_s is None and held is not None:
        expires_at_s = held.expires_at_s
    text = b"%d" % total
    return Write(text, expires_at_s, text)


def compare_set(body: KvCompareSet, held: KvItem | None, *, expires_at_s: float | None) -> Decision:
    """Set the key if it holds what is expected; an empty expectation also fits a key that is absent."""
    if held is None:
        return Keep(body.expected) if body.expected else Write(body.desired, expires_at_s)
    if held.value != body.expected:
        return Keep(held.value)
    return Write(body.desired, expires_at_s)


def delete(namespace: str, body: KvDelete, held: KvItem | None) -> Decision:
    """Remove the key if its last change was the one that is expected."""
    if held is None:
        raise absent(namespace, body.key)
    _check_revision(namespace, body.key, body.if_revision, held)
    return Remove()


def absent(namespace: str, key: str) -> NotFoundError:
    """Return the error of a key that is not there."""
    return NotFoundError(f"there is no key {key!r} in namespace {namespace!r}")


def _check_revision(namespace: str, key: str, wanted: int | None, held: KvItem | None) -> None:
    found = 0 if held is None else held.revision
    if wanted is None or wanted == found:
        return
    has = f"has revision {found}, not {wanted}" if found else f"does not exist at revision {wanted}"
    raise _conflict(f"the key {key!r} in namespace {namespace!r} {has}", held)


def _conflict(message: str, held: KvItem | None) -> ConflictError:
    return ConflictError(message, extra={"revision": 0 if held is None else held.revision})
