"""JSON and msgpack bodies: the one place that turns bytes into messages, and failures into fields.

Called by the HTTP server and the clients. A body that does not decode becomes a BadRequestError whose
``field`` is the path of the bad member and whose message names the nearest known field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.suggestions import suggestion

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
BYTES = "application/octet-stream"
NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"
PROBLEM = "application/problem+json"

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode

_PATH = re.compile(r" - at `(?:key` in `)?\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class Codec(Generic[T]):
    """Decoders of one type, built once."""

    def __init__(self, type_: type[T]) -> None:
        self.type = type_
        self._json = msgspec.json.Decoder(type_)
        self._msgpack = msgspec.msgpack.Decoder(type_)

    def decode(self, raw: bytes, content_type: str) -> T:
        """Decode a request body; BadRequestError names what is wrong with it."""
        if MSGPACK in content_type or "x-msgpack" in content_type:
            return self._decode(raw or b"\x80", self._msgpack, msgspec.msgpack.decode, "msgpack")
        return self._decode(raw or b"{}", self._json, msgspec.json.decode, "JSON")

    def _decode(
        self,
        raw: bytes,
        typed: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T],
        untyped: Callable[[bytes], Any],
        name: str,
    ) -> T:
        try:
            try:
                return typed.decode(raw)
            except msgspec.ValidationError as error:
                # A body may be invalid and, after that, malformed, which only this decoding finds.
                raise explain_invalid(error, untyped(raw), self.type) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequestError(f"the body is not {name}\n{error}") from None
        except RecursionError:
            raise BadRequestError("the body is nested too deeply") from None

    def decode_reply(self, raw: bytes, content_type: str) -> T:
        """Decode a reply's body (of a peer that we trust to speak the same types)."""
        if MSGPACK in content_type:
            return self._msgpack.decode(raw)
        return self._json.decode(raw)


def explain_invalid(
    error: msgspec.ValidationError, document: object, type_: Any, *, lax: bool = False
) -> BadRequestError:
    """Return an error that names the member of ``document`` that does not fit ``type_``, and the fix."""
    text = str(error)
    path = _PATH.search(text)
    steps = _steps(path.group(1) if path else "", document, type_, text, lax)
    reason = text[: path.start()] if path else text
    field = ".".join(steps)
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name = unknown.group(1)
        known = _fields_at(type_, steps)
        full = ".".join([*steps, name])
        return BadRequestError(f"unknown field {full!r}\n{suggestion(name, known)}", field=full)
    missing = _MISSING.search(text)
    if missing is not None:
        field = ".".join([*steps, missing.group(1)])
        return BadRequestError(f"the field {field!r} is required", field=field)
    where = f"{field}: " if field else "the body: "
    return BadRequestError(where + reason[:1].lower() + reason[1:], field=field or None)


def _steps(path: str, document: object, type_: Any, text: str, lax: bool) -> list[str]:
    """Read a msgspec path; ``[...]`` (some member of a mapping) is found by trying each alone."""
    steps: list[str] = []
    at: Any = document
    for name, index, some in _STEP.findall(path):
        if some:
            if not isinstance(at, dict):
                break
            key = _culprit(document, steps, at, type_, text, lax)
            if key is None:
                break
            steps.append(str(key))
            at = at[key]
            continue
        step = name or index
        steps.append(step)
        try:
            at = at[int(index)] if index else at[name]
        except (KeyError, IndexError, TypeError):
            at = None
    return steps


def _culprit(
    document: object, steps: list[str], mapping: Mapping[Any, Any], type_: Any, text: str, lax: bool
) -> Any:
    for key in list(mapping)[:1000]:
        alone = _with(document, steps, {key: mapping[key]})
        try:
            msgspec.convert(alone, type_, strict=not lax)
        except msgspec.ValidationError as error:
            if str(error) == text:
                return key
    return None


def _with(document: Any, steps: list[str], value: object) -> Any:
    """Copy ``document`` with the member at ``steps`` replaced by ``value``."""
    if not steps:
        return value
    head, rest = steps[0], steps[1:]
    if isinstance(document, list):
        index = int(head)
        return [_with(v, rest, value) if i == index else v for i, v in enumerate(document)]
    return {k: _with(v, rest, value) if str(k) == head else v for k, v in document.items()}


def _fields_at(type_: Any, steps: list[str]) -> list[str]:
    """Return the field names of the struct at ``steps`` below ``type_``; of all members of a union."""
    import msgspec.inspect as inspect

    level = [inspect.type_info(type_)]
    for step in [*steps, None]:
        structs, others = _unfold(level)
        if step is None:
            return sorted({field.encode_name for struct in structs for field in struct.fields})
        level = [f.type for struct in structs for f in struct.fields if f.encode_name == step]
        for other in others:
            if isinstance(other, inspect.DictType):
                level.append(other.value_type)
            elif isinstance(other, (inspect.ListType, inspect.VarTupleType, inspect.SetType)):
                level.append(other.item_type)
    return []


def _unfold(types: list[Any]) -> tuple[list[Any], list[Any]]:
    import msgspec.inspect as inspect

    structs, others, queue = [], [], list(types)
    while queue:
        info = queue.pop()
        if isinstance(info, inspect.UnionType):
            queue.extend(info.types)
        elif isinstance(info, inspect.Metadata):
            queue.append(info.type)
        elif isinstance(info, inspect.StructType):
            structs.append(info)
        else:
            others.append(info)
    return structs, others
