"""``Pool``: ``multiprocessing.Pool`` over a cluster, by the same names."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker.api.calls import cancel, get
from stoker.exceptions import GetTimeoutError
from stoker.runtime import current
from stoker.util.completion import CallbackThread, Told
from stoker.util.functions import Functions, cluster_cpus
from stoker.util.streams import WINDOW, Stream

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from stoker.runtime.objects.refs import ObjectRef

T = TypeVar("T")
R = TypeVar("R")
_CHUNKS_PER_PROCESS = 4
Callback = Callable[[Any], object]


class Pool:
    """A pool of workers on all nodes, with the methods of ``multiprocessing.pool.Pool``.

    ::

        with stoker.util.Pool() as pool:
            print(pool.map(math.factorial, range(10)))

    Calls are tasks: they go to whichever node has room, and come back with their own errors.
    ``processes`` bounds how many run at once; None is as many as the cluster's CPUs allow. More
    processes than it has CPUs get a part of a CPU each. ``initializer(*initargs)`` runs in each worker
    process before the first call there; ``maxtasksperchild`` is the number of chunks after which a
    worker process is replaced. ``context`` is accepted for habit's sake. ``options`` are those of
    ``@stoker.remote``, such as ``num_gpus=1``.

    Nothing need be at the top level of a module: functions travel with cloudpickle. An item that is an
    ``ObjectRef`` arrives as its value.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        maxtasksperchild: int | None = None,
        context: object = None,
        **options: Any,
    ) -> None:
        if processes is not None and processes < 1:
            raise ValueError(f"processes={processes}: give a number from 1, or None for all CPUs")
        if maxtasksperchild is not None:
            options["max_calls"] = maxtasksperchild
        self._functions = Functions(
            options,
            what="Pool()",
            max_workers=processes,
            initializer=initializer,
            initargs=initargs,
        )
        self._processes = processes or cluster_cpus()
        self._callbacks = CallbackThread("stoker-pool")
        self._jobs: dict[object, AsyncResult[Any] | MapIterator[Any]] = {}
        """What is not done, or not taken."""
        self._running = True

    # -- calls -------------------------------------------------------------------------------------

    def apply(
        self,
        func: Callable[..., R],
        args: Sequence[Any] = (),
        kwds: Mapping[str, Any] | None = None,
    ) -> R:
        """Return ``func(*args, **kwds)``, called in a worker."""
        result = self.apply_async(func, args, kwds)
        try:
            return result.get()
        except KeyboardInterrupt:
            result._cancel()
            raise

    def apply_async(
        self,
        func: Callable[..., R],
        args: Sequence[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[R]:
        """Have ``func`` called. ``callback`` gets its result, or ``error_callback`` its error."""
        self._check_running()
        remote, first = self._functions.single(func)
        ref = remote.remote(*first, *args, **(kwds or {}))
        return ApplyResult(self, ref, callback, error_callback)

    def map(
        self, func: Callable[[T], R], iterable: Iterable[T], chunksize: int | None = None
    ) -> list[R]:
        """Return the list of ``func(item)``, or raise the first error and cancel the rest.

        ``chunksize`` None makes four chunks per process. Chunks that take less than a few milliseconds
        go together.
        """
        return self._stream(func, iterable, chunksize, star=False).collect()

    def map_async(
        self,
        func: Callable[[T], R],
        iterable: Iterable[T],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[R]]:
        """Begin what :meth:`map` does, in a thread of its own."""
        stream = self._stream(func, iterable, chunksize, star=False)
        return MapResult(self, stream, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[R]:
        """Return the list of ``func(*item)``."""
        return self._stream(func, iterable, chunksize, star=True).collect()

    def starmap_async(
        self,
        func: Callable[..., R],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[R]]:
        """Begin what :meth:`starmap` does."""
        stream = self._stream(func, iterable, chunksize, star=True)
        return MapResult(self, stream, callback, error_callback)

    def imap(
        self, func: Callable[[T], R], iterable: Iterable[T], chunksize: int = 1
    ) -> MapIterator[R]:
        """Return an iterator over ``func(item)``, in order.

        Items are taken as results are: at most a thousand (or four chunks per process) are under way, so
        that ``iterable`` may be without end.
        """
        return self._imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[T], R], iterable: Iterable[T], chunksize: int = 1
    ) -> MapIterator[R]:
        """Return an iterator as :meth:`imap` does, over the results as they come."""
        return self._imap(func, iterable, chunksize, ordered=False)

    # -- its life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more calls. Those that were made go on."""
        if self._running:
            self._running = False
            self._functions.close()

    def terminate(self) -> None:
        """Take no more calls, and cancel all that are not done."""
        self.close()
        for job in list(self._jobs.values()):
            job._cancel()

    def join(self) -> None:
        """Wait until all calls are done; ValueError unless the pool was closed."""
        if self._running:
            raise ValueError("the pool is still running: call close() or terminate() before join()")
        for job in list(self._jobs.values()):
            job._finish()
        self._callbacks.close()
        self._callbacks.join()

    def __enter__(self) -> Self:
        self._check_running()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.terminate()

    def __del__(self) -> None:
        if hasattr(self, "_callbacks"):
            self._functions.close()
            self._callbacks.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a pool stays in its process: make another where it is needed")

    # -- inside ------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if not self._running:
            raise ValueError("the pool was closed: make another")

    def _stream(
        self,
        func: Callable[..., R],
        iterable: Iterable[Any],
        chunksize: int | None,
        *,
        star: bool,
    ) -> Stream[R]:
        self._check_running()
        items = iterable if isinstance(iterable, (list, tuple, range)) else list(iterable)
        if chunksize is None:
            chunksize = -(-len(items) // (self._processes * _CHUNKS_PER_PROCESS))
        size, total = max(1, chunksize), len(items)
        return Stream(
            self._functions, func, items, window=None, chunksize=size, star=star, total=total
        )

    def _imap(
        self, func: Callable[..., R], iterable: Iterable[Any], chunksize: int, *, ordered: bool
    ) -> MapIterator[R]:
        self._check_running()
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize}: give a number from 1")
        window = max(WINDOW, _CHUNKS_PER_PROCESS * self._processes * chunksize)
        return MapIterator(self, func, iterable, window, chunksize, ordered=ordered)


class AsyncResult(ABC, Generic[R]):
    """A result that is not there yet."""

    def __init__(
        self, pool: Pool, callback: Callback | None, error_callback: Callback | None
    ) -> None:
        self._pool = pool
        self._callback = callback
        self._error_callback = error_callback
        self._done = threading.Event()
        pool._jobs[id(self)] = self
        if callback is not None or error_callback is not None:
            pool._callbacks.start()

    def get(self, timeout: float | None = None) -> R:
        """Return the result, or raise its error; multiprocessing.TimeoutError after ``timeout`` seconds."""
        self.wait(timeout)
        if not self._done.is_set():
            current.runtime()  # where the cluster has ended, its error says so
            raise multiprocessing.TimeoutError(f"the result is not there after {timeout:g} s")
        return self._value()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is there, or ``timeout`` seconds passed."""
        runtime = current.maybe_runtime()
        if runtime is not None and not self._done.is_set():
            with runtime.objects.waits.blocked():
                self._done.wait(timeout)

    def ready(self) -> bool:
        """Return whether it is there."""
        return self._done.is_set()

    def successful(self) -> bool:
        """Return whether it is there without an error; ValueError if it is not there."""
        if not self.ready():
            raise ValueError("the result is not ready: wait() for it")
        try:
            self._value()
        except Exception:
            return False
        return True

    @abstractmethod
    def _value(self) -> R:
        """Return the result, or raise its error."""

    @abstractmethod
    def _cancel(self) -> None:
        """Cancel what is under way."""

    def _finish(self) -> None:
        self.wait()

    def _ended(self) -> None:
        """Have it known that the result is there, after its callback, if it has one (any thread)."""
        if self._callback is None and self._error_callback is None:
            self._end()
        else:
            self._pool._callbacks.put(self._call_back)

    def _call_back(self) -> None:
        try:
            value = self._value()
        except Exception as error:
            answer: Any = error
            callback = self._error_callback
        else:
            answer, callback = value, self._callback
        self._done.set()  # the callback may ask for the result
        try:
            if callback is not None:
                callback(answer)
        except Exception:
            traceback.print_exc()  # the thread has others to serve
        finally:
            self._end()

    def _end(self) -> None:
        self._done.set()
        self._pool._jobs.pop(id(self), None)


class ApplyResult(AsyncResult[R]):
    """The result of one call."""

    def __init__(
        self,
        pool: Pool,
        ref: ObjectRef[R],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        super().__init__(pool, callback, error_callback)
        self._ref = ref
        current.runtime().objects.watch((ref,), Told(self._ended))

    def _value(self) -> R:
        return get(self._ref)

    def _cancel(self) -> None:
        if self._ref._entry.location is None:
            cancel(self._ref)


class MapResult(AsyncResult[list[R]]):
    """The results of many calls, which a thread collects."""

    def __init__(
        self,
        pool: Pool,
        stream: Stream[R],
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> None:
        super().__init__(pool, callback, error_callback)
        self._stream = stream
        self._values: list[R] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="stoker-map", daemon=True).start()

    def _run(self) -> None:
        try:
            self._values = self._stream.collect()
        except BaseException as error:
            self._error = error
        self._ended()

    def _value(self) -> list[R]:
        if self._error is not None:
            raise self._error
        return self._values

    def _cancel(self) -> None:
        self._stream.cancel()


class MapIterator(Iterator[R], Generic[R]):
    """The results of ``imap``; ``next(timeout)`` waits for no longer than so many seconds."""

    def __init__(
        self,
        pool: Pool,
        func: Callable[..., R],
        items: Iterable[Any],
        window: int,
        chunksize: int,
        *,
        ordered: bool,
    ) -> None:
        jobs, key = pool._jobs, next(_KEYS)
        self._stream: Stream[R] = Stream(
            pool._functions,
            func,
            items,
            window=window,
            ordered=ordered,
            chunksize=chunksize,
            goes_on=True,
            on_end=lambda: jobs.pop(key, None),
        )
        jobs[key] = self

    def next(self, timeout: float | None = None) -> R:
        """Return the next result, or raise its error; multiprocessing.TimeoutError."""
        try:
            return self._stream.next(timeout)
        except GetTimeoutError as error:
            raise multiprocessing.TimeoutError(str(error)) from None

    def __next__(self) -> R:
        return self._stream.next()

    def _cancel(self) -> None:
        self._stream.close()

    def _finish(self) -> None:
        self._stream.buffer_all()


_KEYS = (f"imap-{number}" for number in itertools.count())
