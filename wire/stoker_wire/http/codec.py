"""JSON and msgpack bodies: the one place that turns bytes into messages, and failures into fields.

Called by the HTTP server and the clients. A body that does not decode becomes a BadRequestError whose
``field`` is the path of the bad member and whose message names the nearest known field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.http.tolerant import UNKNOWN, TolerantDecoder, convert_known, steps_to
from stoker_wire.suggestions import suggestion

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
BYTES = "application/octet-stream"
NDJSON = "application/x-ndjson"
TEXT = "text/plain"
TAR = "application/x-tar"
EVENT_STREAM = "text/event-stream"
PROBLEM = "application/problem+json"
ANY = "*/*"
"""In a document: the reply says which it is."""

EXPLAINED_NBYTES = 1 << 20
"""Of a longer body that does not fit its type the error may name a member less exactly: to find it takes
the whole body as objects, many times its size."""

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode

_MISSING = re.compile(r"missing required field `([^`]*)`")


def without_env_vars(value: object) -> Any:
    """Return a message as plain values, in which the values of environment variables are ``***``."""
    return _masked(msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview)))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: dict.fromkeys(part, "***")
            if name == "env_vars" and isinstance(part, dict)
            else _masked(part)
            for name, part in value.items()
        }
    return [_masked(part) for part in value] if isinstance(value, list | tuple) else value


class Codec(Generic[T]):
    """Decoders of one type, built once."""

    def __init__(self, type_: type[T]) -> None:
        self.type = type_
        self._json = msgspec.json.Decoder(type_)
        self._msgpack = msgspec.msgpack.Decoder(type_)
        self._json_reply = TolerantDecoder(type_, json=True)
        self._msgpack_reply = TolerantDecoder(type_)

    def decode(self, raw: bytes, content_type: str, *, newer: bool = False) -> T:
        """Decode a request body; BadRequestError names what is wrong with it.

        Of a ``newer`` sender fields are ignored that this version does not know.
        """
        if MSGPACK in content_type or "x-msgpack" in content_type:
            untyped: Callable[[bytes], Any] = msgspec.msgpack.decode
            return self._decode(raw or b"\x80", self._msgpack, untyped, "msgpack", newer)
        return self._decode(raw or b"{}", self._json, msgspec.json.decode, "JSON", newer)

    def _decode(
        self,
        raw: bytes,
        typed: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T],
        untyped: Callable[[bytes], Any],
        name: str,
        newer: bool,
    ) -> T:
        try:
            try:
                return typed.decode(raw)
            except msgspec.ValidationError as error:
                if len(raw) > EXPLAINED_NBYTES and not newer:
                    raise explain_invalid(error, None, self.type) from None
                # A body may be invalid and, after that, malformed, which only this decoding finds.
                document = untyped(raw)
                if not newer:
                    raise explain_invalid(error, document, self.type) from None
            try:
                return convert_known(document, self.type)
            except msgspec.ValidationError as error:
                raise explain_invalid(error, document, self.type) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequestError(f"the body is not {name}\n{error}") from None
        except RecursionError:
            raise BadRequestError("the body is nested too deeply") from None

    def decode_reply(self, raw: bytes, content_type: str) -> T:
        """Decode a reply's body; fields that a newer peer adds are ignored."""
        if MSGPACK in content_type:
            return self._msgpack_reply.decode(raw)
        return self._json_reply.decode(raw)


def explain_invalid(
    error: msgspec.ValidationError, document: object, type_: Any, *, lax: bool = False
) -> BadRequestError:
    """Return an error that names the member of ``document`` that does not fit ``type_``, and the fix."""
    text = str(error)
    reason, steps = steps_to(text, document, type_, lax=lax)
    field = ".".join(steps)
    unknown = UNKNOWN.search(text)
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
