"""The entries of a request to compile: their forms, and the function that each one runs.

An entry names an op's workload or a user's function; what is asked for is checked before anything is
compiled, and a mistake is one line that names it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The sdk checks the same forms at the call, before anything travels, with a table and a pattern of its own:
# this package imports nothing of ours, and the sdk nothing of this one.
DTYPES = ("bfloat16", "float16", "float32")
_CALL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class SpecError(ValueError):
    """A request that cannot be carried out; the message names the entry and the fix."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One entry: a workload (``op``) at a dtype and sizes, or a function (``call``)."""

    where: str
    op: str = ""
    dtype: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    call: str = ""


def make_spec(entry: Any, where: str) -> Spec:
    """Return ``entry`` (a name, "module:function", or a mapping) as a Spec. Raises SpecError."""
    if isinstance(entry, str):
        return make_spec({"call" if ":" in entry else "op": entry}, where)
    if not isinstance(entry, dict):
        raise SpecError(f"{where}: expected a name, 'module:function' or a mapping, got {entry!r}")
    rest = dict(entry)
    op, call, dtype = (rest.pop(name, "") for name in ("op", "call", "dtype"))
    if bool(op) == bool(call):
        raise SpecError(f"{where}: give either 'op' or 'call', got {entry!r}")
    if call:
        if rest or dtype:
            raise SpecError(f"{where}: a 'call' takes no dtype and no sizes, got {entry!r}")
        if not isinstance(call, str) or not _CALL.fullmatch(call):
            raise SpecError(f"{where}.call: expected 'module:function', got {call!r}")
        return Spec(where, call=call)
    if dtype and dtype not in DTYPES:
        raise SpecError(f"{where}.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    for name, size in rest.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SpecError(f"{where}.{name}: expected a whole number from 1, got {size!r}")
    return Spec(where, op=op, dtype=dtype, sizes=rest)


def step_of(spec: Spec) -> Callable[[], Any]:
    """Return the function that ``spec`` runs. Raises SpecError for an unknown name or size."""
    if spec.call:
        return _function(spec)
    import torch

    from stoker_kernels.workloads import workloads

    work = workloads().get(spec.op)
    if work is None:
        raise SpecError(f"{spec.where}.op: no op {spec.op!r}{_near(spec.op, list(workloads()))}")
    for name in spec.sizes:
        if name not in work.shape:
            hint = _near(name, list(work.shape))
            raise SpecError(f"{spec.where}.{name}: {spec.op} has no size {name!r}{hint}")
    dtype = getattr(torch, spec.dtype) if spec.dtype else work.dtypes[0]
    return lambda: work.call("meta", dtype, **spec.sizes)


def _function(spec: Spec) -> Callable[[], Any]:
    module, _, path = spec.call.partition(":")
    try:
        value: Any = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except SystemExit as error:
        raise SpecError(
            f"{spec.where}.call: importing {module} ends the program (exit {error.code}); guard what "
            'it runs with if __name__ == "__main__"'
        ) from None
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{spec.where}.call: {spec.call} cannot be imported on this node ({error}); ship its "
            "module with working_dir or py_modules"
        ) from None
    if not callable(value):
        raise SpecError(f"{spec.where}.call: {spec.call} is no function")
    return lambda: value()


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
