"""Values to bytes and back: pickle protocol 5 with out-of-band buffers, and the refs inside.

Plain pickle first (C speed), cloudpickle where plain pickle cannot or must not (functions and
classes of ``__main__``, lambdas, closures). A value that nothing can pickle is an error that names
the path of the member at fault.
"""

from __future__ import annotations

import pickle
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle

from stoker.exceptions import SerializationError, StokerError

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MAX_PROBES = 200


class Packed(NamedTuple):
    """A pickled value: its stream, its raw buffers, and the refs that it contains."""

    data: bytes
    buffers: list[memoryview]
    refs: list[Any]

    @property
    def nbytes(self) -> int:
        """All bytes of the value."""
        return len(self.data) + sum(view.nbytes for view in self.buffers)


class _Collector(threading.local):
    """Where refs met while pickling are noted, per thread (None: nobody is pickling)."""

    refs: list[Any] | None = None


_collector = _Collector()


def note_ref(ref: Any) -> None:
    """Called by ``ObjectRef.__reduce__``: this ref is inside the value being pickled."""
    if _collector.refs is not None:
        _collector.refs.append(ref)


def pack(value: Any, *, what: str) -> Packed:
    """Pickle ``value``; ``what`` names it in the error if it cannot be."""
    if type(value) in _ATOMS:
        return Packed(pickle.dumps(value, 5), [], [])
    outer, _collector.refs = _collector.refs, []
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = _dumps(value, buffers)
        refs = _collector.refs
    except Exception as error:
        raise SerializationError(_diagnose(value, what, error), field=what) from error
    finally:
        _collector.refs = outer
    return Packed(data, [b.raw() for b in buffers], refs)


def unpack(data: bytes, buffers: list[Any] | tuple[Any, ...], *, what: str) -> Any:
    """Return the value; arrays are read-only views of ``buffers``. ``what`` names it in the error."""
    try:
        return pickle.loads(data, buffers=buffers)
    except StokerError:
        raise
    except Exception as error:
        raise SerializationError(
            f"{what} cannot be read back in this process: {type(error).__name__}: {error}. Its type "
            "must be importable here (ship its module with runtime_env={'working_dir': ...} or "
            "'py_modules'), and its __reduce__ and __setstate__ must accept what was pickled."
        ) from error


def _dumps(value: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        buffers.append(buffer)
        return False

    if not cloudpickle.list_registry_pickle_by_value():
        try:
            data = pickle.dumps(value, 5, buffer_callback=keep)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
        else:
            # By-reference pickles of __main__ would not resolve in another process.
            if b"__main__" not in data and b"__mp_main__" not in data:
                return data
    buffers.clear()
    if _collector.refs:
        _collector.refs.clear()
    return cloudpickle.dumps(value, 5, buffer_callback=keep)  # type: ignore[no-any-return]


def _diagnose(value: Any, what: str, error: Exception) -> str:
    path, culprit, cause = what, value, error
    probes, found, seen = 0, True, {id(value)}
    while found and probes < _MAX_PROBES:
        found = False
        for step, member in _members(culprit):
            probes += 1
            if probes >= _MAX_PROBES:
                break
            if id(member) in seen:
                continue
            try:
                cloudpickle.dumps(member, 5)
            except Exception as inner:
                path, culprit, cause, found = path + step, member, inner, True
                seen.add(id(member))
                break
    return (
        f"{path} cannot be pickled: it is a {type(culprit).__module__}."
        f"{type(culprit).__qualname__} ({cause}). Make it inside the task or actor instead, or "
        "give its class a __reduce__."
    )


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield f"[{key!r}]", member
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield f"[{index}]", member
    elif isinstance(value, (set, frozenset)):
        for member in value:
            yield f"{{{member!r}}}", member
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            yield f".<closure {name}>", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__ and not isinstance(
                value.__globals__[name], types.ModuleType
            ):
                yield f".<global {name}>", value.__globals__[name]
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type):
        for name, member in vars(value).items():
            if not name.startswith("__"):
                yield f".{name}", member
    elif hasattr(value, "__dict__") and not _decides_itself(type(value)):
        for name, member in vars(value).items():
            yield f".{name}", member


def _decides_itself(cls: type) -> bool:
    """Whether a class pickles in a way of its own, so that its attributes are not at fault."""
    return any("__reduce__" in vars(c) or "__reduce_ex__" in vars(c) for c in cls.__mro__[:-1])
