"""Checks of the ``kernels`` of a ``runtime_env``, which are compiled before a worker starts.

The form is checked here, at the call. Only the kernels themselves know the ops and sizes, and they need
torch: those are checked on the node, before anything is compiled.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.common import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("bfloat16", "float16", "float32")
_OP = re.compile(r"[A-Za-z_]\w*")
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EXPECTED = (
    "an op such as 'rms_norm', a function 'module:function' that runs a step, or a mapping such as "
    "{'op': 'rms_norm', 'dtype': 'bfloat16', 'columns': 4096}"
)


def kernel_specs(value: Any) -> tuple[KernelSpec, ...]:
    """Return the entries of ``kernels`` as they travel; BadRequestError names the wrong one."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or hasattr(value, "keys") or not hasattr(value, "__iter__"):
        raise _wrong("kernels", value, f"a list of {_EXPECTED}")
    return tuple(_spec(f"kernels[{index}]", entry) for index, entry in enumerate(value))


def _spec(where: str, entry: Any) -> KernelSpec:
    if isinstance(entry, KernelSpec):
        return entry
    if isinstance(entry, str):
        return _call(where, entry) if ":" in entry else _op(where, {"op": entry})
    if hasattr(entry, "keys"):
        if "call" not in entry:
            return _op(where, entry)
        if len(entry) > 1:
            raise _wrong(where, dict(entry), "'call' alone: a function has no dtype and no sizes")
        return _call(f"{where}.call", entry["call"])
    if callable(entry):
        return _call(where, _path_of(where, entry))
    raise _wrong(where, entry, _EXPECTED)


def _call(where: str, path: Any) -> KernelSpec:
    if not isinstance(path, str) or not _CALL.fullmatch(path):
        raise _wrong(where, path, "'module:function'")
    return KernelSpec(call=path)


def _path_of(where: str, function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<" in name or not name:
        raise _wrong(where, function, "a function at the top of a module that the node can import")
    return f"{module}:{name}"


def _op(where: str, entry: Mapping[Any, Any]) -> KernelSpec:
    rest = dict(entry)
    op: Any = rest.pop("op", None)
    dtype: Any = rest.pop("dtype", "")
    if not isinstance(op, str) or not _OP.fullmatch(op):
        raise _wrong(f"{where}.op" if op is not None else where, dict(entry), _EXPECTED)
    # torch.bfloat16 is welcome too, and torch need not be imported here to see it.
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name and name not in DTYPES:
        raise _wrong(f"{where}.dtype", dtype, f"one of {', '.join(DTYPES)}")
    for size, amount in rest.items():
        if not isinstance(size, str) or not size.isidentifier():
            raise _wrong(where, size, "sizes by name, as {'op': 'rms_norm', 'columns': 4096}")
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
            raise _wrong(f"{where}.{size}", amount, "a whole number from 1")
    return KernelSpec(op=op, dtype=name, sizes=rest)


def _wrong(key: str, value: Any, expected: str) -> BadRequestError:
    field = f"runtime_env.{key}"
    return BadRequestError(f"{field}: expected {expected}, got {repr(value)[:200]}", field=field)
