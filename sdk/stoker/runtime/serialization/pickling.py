"""Pickling of values: protocol 5 with out-of-band buffers, and the refs inside.

Plain pickle first (C speed), cloudpickle where plain pickle cannot or must not (functions and
classes of ``__main__``, lambdas, closures). A value that nothing can pickle is an error that names
the path of the member at fault. Tensors go through :mod:`~stoker.runtime.serialization.tensors`, once
torch is loaded. Each thread has its own packer, so nothing here takes a lock.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import re
import sys
import threading
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from stoker.exceptions import SerializationError, StokerError

if TYPE_CHECKING:
    from stoker.runtime.serialization.tensors import TensorPickling

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, bytearray})
_BYTES = frozenset({bytes, bytearray})
_PLAIN_CLASSES = {("builtins", "bytes"): bytes, ("builtins", "bytearray"): bytearray}
OUT_OF_BAND_MIN_NBYTES = 1 << 16
"""Bytes of this size and more go outside the stream."""
_REUSE_MAX_NBYTES = 1 << 16
"""A pickler that wrote a longer stream is dropped: it keeps memory in proportion to it."""
_TENSORS = re.compile(rb"stoker\.runtime\.serialization\.tensors")
_CASTABLE = frozenset("?cbBhHiIlLqQnNfd")
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


class LargeBytes:
    """A stand-in for large bytes in what is pickled: a buffer of their own instead of a copy."""

    __slots__ = ("value",)

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return type(self.value), (pickle.PickleBuffer(self.value),)


def pack(value: Any, *, what: str, lend: Callable[[Any], Any] | None = None) -> Packed:
    """Pickle ``value``; ``what`` names it in the error if it cannot be.

    ``lend`` is given the memory of each tensor; what it returns travels in place of the bytes.
    """
    kind = type(value)
    if kind in _ATOMS:
        if kind not in _BYTES or len(value) < OUT_OF_BAND_MIN_NBYTES:
            return Packed(pickle.dumps(value, 5), [], [])
        value = LargeBytes(value)
    thread = _thread_states.state
    outer = thread.active
    packer = thread.active = (thread.idle if lend is None else None) or _Packer(lend)
    if lend is None:
        thread.idle = None
    try:
        packed = packer.pack(value)
    except Exception as error:
        packer.clear()  # it is a cycle, and would keep all until the collector runs
        if _can_be_packed(value):
            raise  # what a signal's handler raised, for one: none of the value's doing
        raise SerializationError(_diagnose(value, what, error), field=what) from error
    finally:
        thread.active = outer
    if lend is None and len(packed.data) <= _REUSE_MAX_NBYTES:
        thread.idle = packer
    return packed


@contextlib.contextmanager
def collected_refs() -> Iterator[list[Any]]:
    """Collect the refs inside what is pickled in this block by other means than :func:`pack`."""
    thread = _thread_states.state
    outer, collector = thread.active, _RefCollector()
    thread.active = collector
    try:
        yield collector.refs
    finally:
        thread.active = outer


def collect_ref(ref: Any) -> None:
    """Collect a ref inside the value being pickled; called by ``ObjectRef.__reduce__``."""
    packer = _thread_states.state.active
    if packer is not None:
        packer.refs.append(ref)


def is_packing() -> bool:
    """Return whether the refs inside what this thread pickles are collected."""
    return _thread_states.state.active is not None


class _RefCollector:
    """The refs met while something is pickled."""

    def __init__(self) -> None:
        self.refs: list[Any] = []


class _Packer(_RefCollector):
    """A pickler with all that it needs, made once a thread: making it takes longer than a small value.

    Of no use after an error.
    """

    def __init__(self, lend: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._lend = lend
        self._buffers: list[memoryview] = []
        self._chunks: list[bytes] = []
        sink = types.SimpleNamespace(write=self._chunks.append)
        self._plain = pickle.Pickler(sink, 5, buffer_callback=self._add_buffer)
        self._tensors: TensorPickling | None = None

    def pack(self, value: Any) -> Packed:
        if self._tensors is None and sys.modules.get("torch") is not None:
            from stoker.runtime.serialization.tensors import TensorPickling

            self._tensors = TensorPickling(self._lend)
        data = self._dump_plain(value) or self._dump_by_value(value)
        packed = Packed(data, self._buffers, self.refs)
        self.clear()
        return packed

    def clear(self) -> None:
        """Release the value."""
        self._buffers, self.refs = [], []
        if self._tensors is not None:
            self._tensors.forget()

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        self._buffers.append(buffer.raw())
        return False

    def _dump_plain(self, value: Any) -> bytes:
        """Return the stream of plain pickle, or b'' where that cannot or must not be used."""
        if cloudpickle.list_registry_pickle_by_value():
            return b""
        if self._tensors is not None:
            self._plain.dispatch_table = {**copyreg.dispatch_table, **self._tensors.table}
        try:
            self._plain.dump(value)
            data = b"".join(self._chunks)
        except (pickle.PicklingError, AttributeError, TypeError):
            return b""
        finally:
            self._chunks.clear()
            self._plain.clear_memo()
        # By-reference pickles of __main__ would not resolve in another process.
        return b"" if b"__main__" in data or b"__mp_main__" in data else data

    def _dump_by_value(self, value: Any) -> bytes:
        """Return the stream of cloudpickle."""
        self._buffers.clear()
        self.refs.clear()
        table = self._tensors.table if self._tensors is not None else {}
        stream = io.BytesIO()
        _ByValuePickler(stream, table, self._add_buffer).dump(value)
        return stream.getvalue()


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with Stoker's dispatch table in front of its own."""

    def __init__(
        self,
        stream: io.BytesIO,
        table: Mapping[type, Callable[[Any], Any]],
        add_buffer: Callable[[pickle.PickleBuffer], bool],
    ) -> None:
        # Read once, by the constructor.
        views = {memoryview: _reduce_view}
        self.dispatch_table = ChainMap({**table, **views}, *cloudpickle.Pickler.dispatch_table.maps)
        super().__init__(stream, 5, buffer_callback=add_buffer)


def _reduce_view(view: memoryview) -> tuple[Any, ...]:
    if not view.nbytes or not view.c_contiguous or view.format not in _CASTABLE:
        return bytes, (view.tobytes(),)
    return restore_view, (pickle.PickleBuffer(view), view.format, view.shape)


def restore_view(buffer: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    """Return a pickled memoryview over the bytes that arrived."""
    return memoryview(buffer).cast("B").cast(format, shape)  # type: ignore[call-overload, no-any-return]


class _ThreadState:
    """The packers of one thread: the active one (None: nothing is being pickled), and one to reuse."""

    __slots__ = ("active", "idle")

    def __init__(self) -> None:
        self.active: _RefCollector | None = None
        self.idle: _Packer | None = None


class _ThreadStates(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread_states = _ThreadStates()


def unpack(data: bytes, buffers: list[Any] | tuple[Any, ...], *, what: str) -> Any:
    """Unpickle a value; arrays are read-only views of ``buffers``. ``what`` names it in the error."""
    try:
        if buffers and _TENSORS.search(data):
            from stoker.runtime.serialization.tensors import map_privately

            buffers = map_privately(buffers)
        return pickle.loads(data, buffers=buffers)
    except StokerError:
        raise
    except Exception as error:
        if _can_be_unpickled(data, buffers):
            raise  # as in pack
        raise SerializationError(
            f"{what} cannot be read back in this process\n{type(error).__name__}: {error}\n"
            "its type must be importable here (ship its module with runtime_env="
            "{'working_dir': ...} or 'py_modules'), and its __reduce__ and __setstate__ must accept "
            "what was pickled"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes numbers, texts, bytes and containers of them, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN_CLASSES:
            return _PLAIN_CLASSES[module, name]
        raise SerializationError(f"it holds a {module}.{name}, which is made of code")


def unpack_plain(data: bytes, buffers: Sequence[Any], *, what: str) -> Any:
    """Read a value of plain types that another process packed, whoever that is: it runs no code of it.

    SerializationError, which ``what`` begins, for any other.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data), buffers=buffers).load()
    except Exception as error:
        reason = error.message if isinstance(error, SerializationError) else f"{error!r}"
        raise SerializationError(f"{what} is not of plain types\n{reason}") from None


def _can_be_unpickled(data: bytes, buffers: Sequence[Any]) -> bool:
    try:
        pickle.loads(data, buffers=buffers)
    except Exception:
        return False
    return True


def _can_be_packed(value: Any) -> bool:
    thread = _thread_states.state
    packer = thread.active = _Packer()
    try:
        packer.pack(value)
    except Exception:
        return False
    finally:
        packer.clear()
    return True


def _diagnose(value: Any, what: str, error: Exception) -> str:
    path, culprit, cause = what, value, error
    probes, descended, seen = 0, True, {id(value)}
    while descended and probes < _MAX_PROBES:
        descended = False
        for step, member in _members(culprit):
            probes += 1
            if probes >= _MAX_PROBES:
                break
            if id(member) in seen:
                continue
            try:
                cloudpickle.dumps(member, 5)
            except Exception as inner:
                path, culprit, cause, descended = path + step, member, inner, True
                seen.add(id(member))
                break
    cls = type(culprit)
    kind = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    return (
        f"{path} cannot be pickled: it is a {kind}\n{cause}\n"
        "make it inside the task or actor instead, or give its class a __reduce__"
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
    elif hasattr(value, "__dict__") and not _reduces_itself(type(value)):
        for name, member in vars(value).items():
            yield f".{name}", member


def _reduces_itself(cls: type) -> bool:
    """Return whether a class defines its pickling, so that its attributes are not at fault."""
    return any("__reduce__" in vars(c) or "__reduce_ex__" in vars(c) for c in cls.__mro__[:-1])
