"""Functions that nobody decorated, as tasks: those that executors, pools and streams are given.

A function that travels once serves all calls of it, so it is made a remote function once
(:class:`Functions`) and named in lists and logs as the user named it. What runs around it in the worker is
here too; its frames are left out of tracebacks.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import sys
import threading
import time
import types
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.api.remote import RemoteFunction
from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime.options.demands import check_options
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.serialization.exceptions import encode_exception
from stoker.runtime.tasks.task_spec import Share

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.tasks.task_spec import FunctionSpec
    from stoker_wire.messages.data import Failed

_KEPT = 64
"""So many functions are kept as remote functions: what is called again need not be pickled again."""
_SMALLEST_CPU = 0.001
YIELD_S = 0.05
"""Chunks that were sent together are given back unstarted when those before took this long."""


# -- in the worker ---------------------------------------------------------------------------------


class Setup:
    """The initializer of a pool: run in each worker before the first call there.

    One that is defined in a script or a notebook travels by value, as its functions do, and they share
    globals only with what travelled with them: such an initializer is run once per function.
    """

    _done: ClassVar[set[str]] = set()

    def __init__(self, initializer: Callable[..., object], initargs: Sequence[Any]) -> None:
        self._initializer = initializer
        self._initargs = tuple(initargs)
        self._id = uuid.uuid4().hex
        self._ran = False

    def __call__(self) -> None:
        """Run the initializer, unless it ran here before."""
        if self._ran:
            return
        module = sys.modules.get(getattr(self._initializer, "__module__", None) or "")
        name = getattr(self._initializer, "__name__", "")
        importable = getattr(module, name, None) is self._initializer
        if not (importable and self._id in self._done):
            self._initializer(*self._initargs)
            self._done.add(self._id)
        self._ran = True


class Single:
    """A function that is called as it is; or, of None, the function that is its first argument."""

    # A remote function takes over the attributes of what it wraps: it finds none.
    __slots__ = ("_function", "_setup")

    def __init__(self, function: Callable[..., Any] | None, setup: Setup | None) -> None:
        self._function = function
        self._setup = setup

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._setup is not None:
            self._setup()
        if self._function is None:
            function, *rest = args
            return function(*rest, **kwargs)
        return self._function(*args, **kwargs)


class Chunk:
    """A function that is called for several items, in groups of ``size``, the user's chunks.

    Returns (seconds, for each group the list of its results or its error), perhaps not of all groups:
    after ``YIELD_S`` the others are left to other workers.
    """

    __slots__ = ("_function", "_setup", "_star")

    def __init__(self, function: Callable[..., Any], setup: Setup | None, *, star: bool) -> None:
        self._function = function
        self._setup = setup
        self._star = star

    def __call__(
        self, start: int, size: int, items: Sequence[Any], /, *loose: Any
    ) -> tuple[float, list[list[Any] | Failed]]:
        items = items or loose  # those that were refs came as arguments, to arrive as values
        if self._setup is not None:
            self._setup()
        began_s = time.perf_counter()
        if len(items) <= size:
            results = self._group(start, items)
            return time.perf_counter() - began_s, [results]
        groups: list[list[Any] | Failed] = []
        for at in range(0, len(items), size):
            try:
                groups.append(self._group(start + at, items[at : at + size]))
            except Exception as error:
                name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
                groups.append(encode_exception(error, task=name))
            if time.perf_counter() - began_s > YIELD_S:
                break
        return time.perf_counter() - began_s, groups

    def _group(self, start: int, items: Sequence[Any]) -> list[Any]:
        function, results = self._function, []
        try:
            if self._star:
                for item in items:
                    results.append(function(*item))  # noqa: PERF401 (an error must tell where)
            else:
                for item in items:
                    results.append(function(item))  # noqa: PERF401
        except Exception as error:
            note_item(error, start + len(results))
            raise
        return results


def note_item(error: BaseException, index: int, until: int | None = None) -> None:
    """Say in an error which item it is of (``item_index``, and a note), or of which items up to ``until``."""
    if hasattr(error, "item_index"):
        return
    which = (
        f"item {index}" if until is None or until <= index + 1 else f"items {index}..{until - 1}"
    )
    with contextlib.suppress(Exception):
        error.item_index = index  # type: ignore[attr-defined]
        error.add_note(f"stoker: {which} of the iterable")


# -- in the caller ---------------------------------------------------------------------------------


class _Shares:
    """Numbers for the shares of leases, used again: a scheduling class is kept for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = 1

    def take(self) -> int:
        """Return a number that nobody has."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._next += 1
            return self._next - 1

    def give_back(self, number: int) -> None:
        """Let others have a number again."""
        with self._lock:
            heapq.heappush(self._free, number)


_SHARES = _Shares()


class _Function(RemoteFunction[..., Any]):
    """A remote function of a pool: its leases are those of the pool."""

    def __init__(self, function: Any, options: TaskOptions, share: Share | None) -> None:
        super().__init__(function, options)
        self._share = share

    def _make_spec(self, runtime: Runtime) -> FunctionSpec:
        spec = super()._make_spec(runtime)
        if self._share is not None:
            spec.take_share(self._share)
        return spec


class Functions:
    """Plain functions as remote ones, with one set of options: those of an executor, a pool or a stream.

    ``max_workers`` bounds how many calls run at once, in the whole cluster. More of them than the cluster
    has CPUs get a part of a CPU each, as processes would. ``close()`` when no more calls are made.
    """

    def __init__(
        self,
        options: TaskOptions | dict[str, Any],
        *,
        what: str,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
    ) -> None:
        if isinstance(options, dict):
            options = check_options(TaskOptions, options, what=what)
        if initializer is not None and not callable(initializer):
            raise WrongTypeError(f"{what}: initializer must be callable", field="initializer")
        self._share: Share | None = None
        self._setup = Setup(initializer, initargs) if initializer is not None else None
        self.max_workers = max_workers
        if max_workers is not None:
            if isinstance(max_workers, bool) or not isinstance(max_workers, int):
                raise WrongTypeError(f"{what}: {max_workers!r} is no number of workers")
            if max_workers < 1:
                raise BadRequestError(f"{what}: give a number of workers from 1, or None")
            options = _fitting(options, max_workers)
            self._share = Share(_SHARES.take(), max_workers)
        self._options = options
        self._workers = 0
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, str], RemoteFunction[..., Any]] = OrderedDict()

    @property
    def workers(self) -> int:
        """About how many calls the cluster can run at once."""
        if not self._workers:
            cpus = cluster_cpus() / (self._options.num_cpus or 1.0)
            self._workers = max(1, min(self.max_workers or 1 << 20, int(cpus)))
        return self._workers

    @property
    def may_join(self) -> bool:
        """Whether chunks may share a call: what is counted or tried again per call keeps them apart."""
        o = self._options
        return not (o.timeout or o.retry_exceptions or o.max_calls or o.max_retries == 0)

    def single(
        self, function: Callable[..., Any]
    ) -> tuple[RemoteFunction[..., Any], tuple[Any, ...]]:
        """Return a remote function, and the arguments to put before those of a call of ``function``."""
        if _is_constant(function):
            return self._remote(function, "single", lambda: Single(function, self._setup)), ()
        # It may have changed by the next call: it is pickled with each.
        return self._remote(None, "single", lambda: Single(None, self._setup)), (function,)

    def chunk(
        self, function: Callable[..., Any], *, star: bool = False
    ) -> RemoteFunction[..., Any]:
        """Return a :class:`Chunk` of ``function`` as a remote function."""
        if not callable(function):
            raise WrongTypeError(f"{function!r} is not callable", field="fn")

        def make() -> Chunk:
            return Chunk(function, self._setup, star=star)

        if _is_constant(function):
            return self._remote(function, "star" if star else "chunk", make)
        return self._new(function, make())

    def close(self) -> None:
        """Give the place among the shares back. Calls that were made go on."""
        if self._share is not None:
            _SHARES.give_back(self._share.number)
            self._share = None

    def _remote(
        self, function: Callable[..., Any] | None, kind: str, make: Callable[[], Any]
    ) -> RemoteFunction[..., Any]:
        with self._lock:
            key = (function, kind)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._new(function, make())
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            return known

    def _new(self, function: Callable[..., Any] | None, wrapped: Any) -> RemoteFunction[..., Any]:
        options = self._options
        if options.name is None:
            import msgspec

            named = function if function is not None else wrapped
            name = getattr(named, "__qualname__", type(named).__qualname__)
            options = msgspec.structs.replace(options, name=name)
        return _Function(wrapped, options, self._share)


def _is_constant(function: object) -> bool:
    """Return whether a function is the same at the next call: no closure, no object with a state."""
    if isinstance(function, types.FunctionType):
        return function.__closure__ is None
    return isinstance(function, type) or (
        isinstance(function, types.BuiltinFunctionType)
        and isinstance(function.__self__, (types.ModuleType, type(None)))
    )


def _fitting(options: TaskOptions, max_workers: int) -> TaskOptions:
    """Return options with which ``max_workers`` calls fit the CPUs of the cluster, if these can be shared."""
    if options.num_cpus is not None or options.num_gpus or options.gpu_memory or options.resources:
        return options
    import msgspec

    part = math.floor(cluster_cpus() / max_workers / _SMALLEST_CPU) * _SMALLEST_CPU
    if part >= 1.0:
        return options
    return msgspec.structs.replace(options, num_cpus=max(_SMALLEST_CPU, round(part, 3)))


def cluster_cpus() -> int:
    """Return the CPUs of the cluster, 1 at least."""
    from stoker.api.calls import cluster_resources

    return max(1, int(cluster_resources().get("CPU", 1)))
