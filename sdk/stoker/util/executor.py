"""``Executor``: the cluster as a ``concurrent.futures.Executor``, for all that takes one."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from stoker.api.calls import cancel
from stoker.exceptions import GetTimeoutError
from stoker.runtime import current
from stoker.runtime.objects.waiters import ValueFuture
from stoker.runtime.tasks.task_spec import Phase
from stoker.util.completion import CallbackThread, Outstanding, Told
from stoker.util.drains import Drain
from stoker.util.functions import Functions, cluster_cpus
from stoker.util.streams import Stream
from stoker_wire.messages.data import Stored

if TYPE_CHECKING:
    from types import TracebackType

    from stoker.runtime.objects.refs import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")
_CANCEL_S = 10.0


class Executor(concurrent.futures.Executor):
    """Calls as tasks of the cluster, by the interface of ``concurrent.futures``.

    ::

        with stoker.Executor() as executor:
            futures = [executor.submit(pow, 2, n) for n in range(8)]
            print([f.result() for f in futures])

    ``max_workers`` bounds how many calls run at once; None leaves that to the cluster's resources.
    ``initializer(*initargs)`` runs in each worker before the first call there; ``max_tasks_per_child``
    is the number of calls after which a worker is replaced. ``options`` are those of
    ``@stoker.remote``, such as ``num_gpus=1`` or ``max_retries=0``: as of every task, calls whose
    worker died are tried again 3 times.

    Functions travel with cloudpickle, lambdas and closures too. An argument that is an ``ObjectRef`` arrives
    as its value.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        max_tasks_per_child: int | None = None,
        **options: Any,
    ) -> None:
        if max_tasks_per_child is not None:
            options["max_calls"] = max_tasks_per_child
        self._functions = Functions(
            options,
            what="Executor()",
            max_workers=max_workers,
            initializer=initializer,
            initargs=initargs,
        )
        self._callbacks = CallbackThread("stoker-executor")
        self._outstanding = Outstanding()
        self._futures: weakref.WeakSet[TaskFuture] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Stream[Any]] = weakref.WeakSet()
        self._drains: list[Drain[Any]] = []
        self._shut_down = False

    @property
    def _max_workers(self) -> int:
        """Dask and others look here for how much to submit at once."""
        return self._functions.max_workers or cluster_cpus()

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]:
        """Have ``fn(*args, **kwargs)`` called, and return a future of its result.

        ``cancel()`` of the future succeeds until the call was sent to a worker, as with processes.
        Callbacks run on a thread of the executor. RuntimeError after ``shutdown``.
        """
        self._check_open()
        remote, first = self._functions.single(fn)
        ref = remote.remote(*first, *args, **kwargs)
        future = TaskFuture(ref, self._callbacks)
        self._futures.add(future)
        self._callbacks.start()
        future.follow()
        self._outstanding.add(ref)
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        window: int | None = None,
        **unknown: Any,
    ) -> Iterator[R]:
        """Return an iterator over ``fn``'s results, in order; ``chunksize`` items go in one call.

        All calls are made at once, as the standard library does, unless there is a ``window`` (the same
        as Python 3.14's ``buffersize``): then no more than so many items are under way, and
        ``iterables`` may be without end. ``timeout`` counts in seconds from here: TimeoutError. An
        error of ``fn`` ends the iterator, which cancels the rest, as does ``close()``.
        """
        window = unknown.pop("buffersize", window)
        if unknown:
            raise TypeError(f"map() got an unexpected keyword argument {next(iter(unknown))!r}")
        self._check_open()
        deadline_s = None if timeout is None else time.monotonic() + timeout
        one = len(iterables) == 1
        stream: Stream[R] = Stream(
            self._functions,
            fn,
            iterables[0] if one else zip(*iterables),  # noqa: B905 (as the standard library)
            star=not one,
            window=window,
            chunksize=chunksize,
            goes_on=window is None,
        )
        if window is not None:
            self._streams.add(stream)
            return _results(stream, deadline_s)
        drain = Drain(stream)
        self._drains = [known for known in self._drains if known.is_alive()] + [drain]
        return drain.results(timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those that were made, or cancel those that do not run yet."""
        if not self._shut_down:
            self._shut_down = True
            self._functions.close()
            self._outstanding.when_done(self._callbacks.close)
        if cancel_futures:
            for future in list(self._futures):
                future.cancel()
            for source in self._sources():
                for ref in source.stop():
                    _cancel_unsent(ref)
        if wait:
            self._outstanding.wait()
            for source in self._sources():
                source.settle()
            self._callbacks.join()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        if exc_type is not None and not issubclass(exc_type, Exception):
            self.cancel_all()  # Ctrl-C: what runs is not waited for
        return super().__exit__(exc_type, exc_val, exc_tb)

    def __del__(self) -> None:
        if hasattr(self, "_outstanding"):
            self._functions.close()
            self._outstanding.when_done(self._callbacks.close)

    def cancel_all(self) -> None:
        """Cancel all calls that are not done: those that run are interrupted as by Ctrl-C."""
        for future in list(self._futures):
            if not future.done() and not future.cancel():
                cancel(future.ref)
        for stream in list(self._streams):
            stream.close()
        for drain in self._drains:
            drain.cancel()

    def _sources(self) -> list[Stream[Any] | Drain[Any]]:
        return [*self._streams, *self._drains]

    def _check_open(self) -> None:
        if self._shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")


class TaskFuture(ValueFuture):
    """The future of a task, which can be cancelled until it is sent to a worker."""

    def __init__(self, ref: ObjectRef[Any], callbacks: CallbackThread) -> None:
        super().__init__(current.runtime().objects.waits)
        self.ref = ref
        self._callbacks = callbacks
        self._cancelling = threading.Lock()
        self._was_cancelled = False

    def follow(self) -> None:
        """Set the result once it is there."""
        current.runtime().objects.watch((self.ref,), Told(self._on_settled))

    def cancel(self) -> bool:
        """Cancel the call if no worker has it yet; return whether that is so."""
        if self.cancelled():
            return True
        with self._cancelling:
            if self.done() or not _cancel_unsent(self.ref):
                return False
            self._was_cancelled = True
        return super().cancel() and not self.set_running_or_notify_cancel()

    def running(self) -> bool:
        """Return whether the call was sent to a worker and has not ended."""
        return not self.done() and _phase(self.ref) is Phase.SENT

    def _on_settled(self) -> None:
        if type(self.ref._entry.location) is Stored:
            # Of another node it takes long, and others would wait for it.
            current.runtime().io.loop.run_in_executor(None, self._load)
        else:
            self._callbacks.put(self._load)

    def _load(self) -> None:
        with self._cancelling:
            if self._was_cancelled or not self.set_running_or_notify_cancel():
                return
        try:
            value = current.runtime().objects.load(self.ref._entry)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(value)


def _results(stream: Stream[R], deadline_s: float | None) -> Iterator[R]:
    try:
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                value = stream.next(left_s)
            except StopIteration:
                return
            except GetTimeoutError as error:
                raise TimeoutError(str(error)) from None
            yield value
    finally:
        stream.close()


def _phase(ref: ObjectRef[Any]) -> Phase | None:
    task = current.runtime().pending.by_id.get(ref.task_id)
    return None if task is None else task.phase


def _cancel_unsent(ref: ObjectRef[Any]) -> bool:
    """Cancel a call that no worker has; return whether it was so."""
    runtime = current.maybe_runtime()
    if runtime is None or _phase(ref) in (None, Phase.SENT, Phase.ENDED):
        return False

    async def decide() -> bool:
        if _phase(ref) in (None, Phase.SENT, Phase.ENDED):
            return False
        runtime.pending.cancel(ref.task_id, force=False, recursive=True)
        return True

    return runtime.io.run(decide(), _CANCEL_S)
