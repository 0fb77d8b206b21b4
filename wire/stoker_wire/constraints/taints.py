"""Taints of nodes and tolerations of work, as in Kubernetes: types, and the text in which people write them.

A taint is written ``key=value:Effect`` or ``key:Effect``. A toleration is written the same way, or shorter:
without a value it tolerates every value, without an effect every effect.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.common import Message, Record, Seconds, Time, stated

MAX_TAINTS = 64
"""Taints of a node, or tolerations of a request."""
_NAME = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?"
_VALUE = rf"({_NAME})?"
_TEXT = re.compile(r"(?P<key>[^=:]*)(?:=(?P<value>[^:]*))?(?::(?P<effect>.*))?", re.DOTALL)

TaintKey = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}$")]
TaintValue = Annotated[str, msgspec.Meta(pattern=rf"^{_VALUE}$")]


class TaintEffect(StrEnum):
    """Effect of a taint on work that does not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    """Nothing more is placed on the node."""
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    """Other nodes that fit are taken first."""
    NO_EXECUTE = "NoExecute"
    """Nothing more is placed on the node, and what is there is ended, with notice, and goes elsewhere."""


_EFFECTS = f"({'|'.join(TaintEffect)})"
TaintText = Annotated[str, stated(pattern=rf"^{_NAME}(={_VALUE})?:{_EFFECTS}$")]
TaintRemoval = Annotated[str, stated(pattern=rf"^{_NAME}(:{_EFFECTS})?-$")]


class Taint(Record):
    """A taint of a node; ``at_s`` is since when."""

    key: TaintKey
    effect: TaintEffect
    value: TaintValue = ""
    at_s: Time = 0.0

    @property
    def text(self) -> str:
        """The taint as it is written."""
        return (
            f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"
        )


class Toleration(Message):
    """A toleration of taints: of one key, or of all (``key`` empty); of one value and effect, or all (null).

    ``toleration_seconds`` is how long a NoExecute taint is tolerated from when it was set; null: for ever.
    """

    key: Annotated[str, msgspec.Meta(pattern=rf"^({_NAME})?$")] = ""
    value: TaintValue | None = None
    effect: TaintEffect | None = None
    toleration_seconds: Seconds | None = None


Tolerations = Annotated[tuple[Toleration, ...], msgspec.Meta(max_length=MAX_TAINTS)]


def parse_taint(text: str) -> Taint:
    """Return the taint of a text such as ``gpu=a100:NoSchedule``; ValueError says what is wrong."""
    key, value, effect = _parts(text)
    if effect is None:
        raise ValueError(f"{text!r} has no effect: write it like key=value:NoSchedule")
    return Taint(key=_key(text, key), value=value or "", effect=effect)


def parse_toleration(text: str) -> Toleration:
    """Return the toleration of a text such as ``gpu=a100:NoSchedule`` or ``gpu``; else ValueError."""
    key, value, effect = _parts(text)
    return Toleration(key=_key(text, key), value=value, effect=effect)


def parse_removal(text: str) -> tuple[str, TaintEffect | None]:
    """Return key and effect (None: any) of the taints that ``key-`` or ``key:Effect-`` removes."""
    if not text.endswith("-"):
        raise ValueError(f"{text!r} removes nothing: write it like key- or key:NoSchedule-")
    key, value, effect = _parts(text[:-1])
    if value is not None:
        raise ValueError(f"{text!r}: a taint is removed by its key, without the value")
    return _key(text, key), effect


def _parts(text: str) -> tuple[str, str | None, TaintEffect | None]:
    found = _TEXT.fullmatch(text)
    assert found is not None  # it takes every text
    value, effect = found["value"], found["effect"]
    if value is not None and not re.fullmatch(_VALUE, value):
        raise ValueError(f"{text!r}: the value {value!r} has to be letters, digits, '-', '_', '.'")
    if effect is None:
        return found["key"], value, None
    try:
        return found["key"], value, TaintEffect(effect)
    except ValueError:
        known = ", ".join(TaintEffect)
        raise ValueError(f"{text!r}: the effect {effect!r} is none of {known}") from None


def _key(text: str, key: str) -> str:
    if not re.fullmatch(_NAME, key):
        raise ValueError(f"{text!r}: the key {key!r} has to be letters, digits, '-', '_', '.', '/'")
    return key


def taints_of_setting(text: str) -> tuple[Taint, ...]:
    """Return the taints of STOKER_TAINTS, separated by commas; BadRequestError says what is wrong."""
    try:
        return tuple(parse_taint(one.strip()) for one in text.split(",") if one.strip())
    except ValueError as error:
        raise BadRequestError(f"STOKER_TAINTS cannot be read\n{error}", field="taints") from None
