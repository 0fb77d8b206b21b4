"""A newer minor version of a component: ``python -m tests.chaos.versions.next_minor STEPS MODULE [OPTIONS]``.

It announces a version and a protocol that many minor steps ahead. Every message that it sends or stores, in
requests, replies, streams, frames, records and history, has one more field at each depth, which others
of that version know. The workers of a nodelet are of its version.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

FIELD = "of_the_next_minor"
MODULE = "tests.chaos.versions.next_minor"
_STEPS = "TESTS_MINOR_STEPS_AHEAD"
_REPO = str(Path(__file__).parents[3])


def launcher(steps: int) -> tuple[str, ...]:
    """Return what stands before the module of a service that is to be that many minor versions ahead."""
    return (MODULE, str(steps)) if steps else ()


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


def narrowed(document: Any) -> Any:
    """A document of plain values without that field."""
    if isinstance(document, list | tuple):
        return [narrowed(one) for one in document]
    if isinstance(document, dict):
        return {key: narrowed(one) for key, one in document.items() if key != FIELD}
    return document


def _alter(codec: Any) -> None:
    """Have all that a module of msgspec encodes widened; what it decodes may have that field."""
    real_encoder, real_decoder, encode, decode = (
        codec.Encoder, codec.Decoder, codec.encode, codec.decode
    )  # fmt: skip

    def known(decoded: Callable[[], Any], raw: bytes, type_: Any) -> Any:
        try:
            return decoded()
        except msgspec.ValidationError as error:
            if FIELD not in str(error):
                raise
        return msgspec.convert(narrowed(decode(raw)), type_, str_keys=True)

    class Encoder:
        def __init__(self, **given: Any) -> None:
            self._real = real_encoder(**given)

        def encode(self, value: Any) -> Any:
            return self._real.encode(widened(value))

    class Decoder:
        def __init__(self, type_: Any = Any, **given: Any) -> None:
            self._real, self._type = real_decoder(type_, **given), type_

        def decode(self, raw: bytes) -> Any:
            return known(lambda: self._real.decode(raw), raw, self._type)

        def __class_getitem__(cls, _: Any) -> Any:
            return cls

    codec.Encoder, codec.Decoder = Encoder, Decoder
    codec.encode = lambda value, **given: encode(widened(value), **given)
    codec.decode = lambda raw, *, type=Any, **given: known(
        lambda: decode(raw, type=type, **given), raw, type
    )


def become(steps: int) -> None:
    """Be that many minor versions ahead from now on; to be called before anything else is imported."""
    for codec in (msgspec.json, msgspec.msgpack):
        _alter(codec)
    from stoker_wire import version

    major, minor = version.PROTOCOL
    version.PROTOCOL = (major, minor + steps)
    version.PROTOCOL_TEXT = f"{major}.{minor + steps}"
    version.VERSION = next_version(version.VERSION, steps)


def next_version(of: str, steps: int) -> str:
    """``"0.1.0"`` as ``"0.2.0"``."""
    major, minor, patch = of.split(".")
    return f"{major}.{int(minor) + steps}.{patch}"


def prepare() -> None:
    """Become what the nodelet is, in its fork server, before that imports what workers need."""
    become(int(os.environ[_STEPS]))
    from stoker.runtime.worker.main import prepare

    prepare()


def work(boot: Any) -> None:
    """Be a worker (the fork server's target)."""
    from stoker.runtime.worker.main import main

    main(boot)


def main(steps: str, module: str, *options: str) -> None:
    become(int(steps))
    if module == "stoker_nodelet":
        os.environ[_STEPS] = steps
        paths = [_REPO, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        options = (*options, "--target", f"{MODULE}:work")
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
