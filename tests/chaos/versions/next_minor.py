"""A newer minor version of a component: ``python -m tests.chaos.versions.next_minor STEPS MODULE [OPTIONS]``.

It announces a protocol that many minor steps ahead, and every message that it sends, in requests, replies,
streams and frames, has one more field at each depth.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import msgspec

FIELD = "of_the_next_minor"


def widened(value: Any) -> Any:
    """``value`` with one more field in every message inside of it."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        fields = {wire: widened(getattr(value, name)) for name, wire in names}
        config = value.__struct_config__
        if config.array_like:
            tag = () if config.tag is None else (config.tag,)
            return [*tag, *fields.values(), FIELD]
        if config.tag_field is not None:
            fields[config.tag_field] = config.tag
        return {**fields, FIELD: {"deep": 1}}
    if isinstance(value, list | tuple):
        return [widened(one) for one in value]
    if isinstance(value, dict):
        return {key: widened(one) for key, one in value.items()}
    return value


def become(steps: int) -> None:
    """Be that many minor versions ahead from now on; to be called before anything else is imported."""
    from stoker_wire import version

    major, minor = version.PROTOCOL
    version.PROTOCOL = (major, minor + steps)
    version.PROTOCOL_TEXT = f"{major}.{minor + steps}"
    from stoker_wire.http import codec

    for name in ("encode_json", "encode_msgpack"):
        encode = getattr(codec, name)
        setattr(codec, name, lambda value, encode=encode: encode(widened(value)))
    from stoker_wire.data.frames import FrameCodec

    parts = FrameCodec.encode_parts
    FrameCodec.encode_parts = lambda self, messages: parts(self, widened(messages))  # type: ignore[method-assign]


if __name__ == "__main__":
    become(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv[:3] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
