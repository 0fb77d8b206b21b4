"""joblib over a cluster: ``parallel_backend("stoker")``, and with it scikit-learn.

joblib has no entry points: :func:`register_stoker` makes the name known to it.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from joblib._parallel_backends import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)
from joblib.parallel import register_parallel_backend

from stoker.api.calls import put
from stoker.runtime import current
from stoker.util.executor import Executor
from stoker.util.functions import cluster_cpus

if TYPE_CHECKING:
    import concurrent.futures

    from stoker.runtime.objects.refs import ObjectRef

_SHARED_MIN_NBYTES = 100 << 10
"""An argument from this size is put once for all calls of a Parallel that have it."""


def register_stoker() -> None:
    """Make ``"stoker"`` a backend of joblib.

    ::

        stoker.util.register_stoker()
        with joblib.parallel_config(backend="stoker"):
            GridSearchCV(SVC(), grid, n_jobs=-1).fit(X, y)

    ``parallel_config(backend="stoker", num_gpus=1)``: other keywords are options of ``@stoker.remote``.
    """
    register_parallel_backend("stoker", StokerBackend)


class StokerBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Batches of calls as tasks. Large arrays among the arguments go to shared memory, once per Parallel.

    Workers see such arrays read-only, as with loky's memory maps. A nested Parallel that asks for
    several jobs has them in the cluster as well; one that does not say runs in its task.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = False

    def __init__(self, nesting_level: int | None = None, **options: Any) -> None:
        options.pop("inner_max_num_threads", None)
        super().__init__(nesting_level=nesting_level)
        self._options = options
        self._executor: Executor | None = None
        self._shared: dict[int, tuple[Any, ObjectRef[Any]]] = {}
        """By identity: arguments that were put, and their refs."""
        self._futures: weakref.WeakSet[concurrent.futures.Future[Any]] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return _backend, (self.nesting_level, self._options)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls run at once: -1 is as many as the cluster has CPUs."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, cluster_cpus() + 1 + n_jobs)

    def configure(
        self,
        n_jobs: int | None = 1,
        parallel: Any = None,
        prefer: str | None = None,
        require: str | None = None,
        **options: Any,
    ) -> int:
        """Get ready for one Parallel."""
        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        bound = None if n_jobs is not None and n_jobs < 0 else count
        ours = {k: v for k, v in options.items() if k not in _OF_OTHER_BACKENDS}
        self._executor = Executor(bound, **{**self._options, **ours})
        return count

    def submit(
        self, func: Any, callback: Callable[[Any], object] | None = None
    ) -> concurrent.futures.Future[Any]:
        """Have a batch of calls made."""
        assert self._executor is not None
        refs: list[ObjectRef[Any]] = []
        batch = copy.copy(func)
        batch.items = [
            (
                function,
                tuple(self._to_share(arg, refs) for arg in args),
                {name: self._to_share(arg, refs) for name, arg in kwargs.items()},
            )
            for function, args, kwargs in func.items
        ]
        future = self._executor.submit(_run_batch, batch, *refs)
        self._futures.add(future)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: concurrent.futures.Future[Any]) -> Any:
        """Return the results of a batch."""
        return out.result()

    @contextlib.contextmanager
    def retrieval_context(self) -> Iterator[None]:
        """Give the CPU back while a task waits for a Parallel of its own: joblib waits by polling."""
        with current.runtime().objects.waits.blocked():
            yield

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel what is under way."""
        if self._executor is not None:
            self._executor.cancel_all()

    def stop_call(self) -> None:
        """Forget what one Parallel shared."""
        self._shared.clear()

    def terminate(self) -> None:
        """End the executor, which waits for nothing."""
        self._shared.clear()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
        self.reset_batch_stats()

    def get_nested_backend(self) -> tuple[Any, int | None]:
        """Return the backend of a Parallel inside of a call."""
        return _backend((self.nesting_level or 0) + 1, self._options), None

    def _to_share(self, arg: Any, refs: list[ObjectRef[Any]]) -> Any:
        if _nbytes_of(arg) < _SHARED_MIN_NBYTES:
            return arg
        known = self._shared.get(id(arg))
        if known is None:
            known = self._shared[id(arg)] = arg, put(arg)
        refs.append(known[1])
        return _Shared(len(refs) - 1)


_OF_OTHER_BACKENDS = {
    "idle_worker_timeout",
    "max_nbytes",
    "mmap_mode",
    "temp_folder",
    "timeout",
    "context",
    "verbose",
}


def _backend(nesting_level: int | None, options: dict[str, Any]) -> StokerBackend:
    return StokerBackend(nesting_level=nesting_level, **options)


class _Shared:
    """The place of an argument that comes as a ref."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _run_batch(batch: Any, *values: Any) -> Any:
    def value_of(arg: Any) -> Any:
        return values[arg.index] if type(arg) is _Shared else arg

    batch.items = [
        (
            function,
            tuple(value_of(arg) for arg in args),
            {name: value_of(arg) for name, arg in kwargs.items()},
        )
        for function, args, kwargs in batch.items
    ]
    return batch()


def _nbytes_of(value: Any) -> int:
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if hasattr(value, "memory_usage"):  # a table of pandas
        usage = value.memory_usage()
        return int(usage.sum()) if hasattr(usage, "sum") else int(usage)
    if hasattr(value, "data") and hasattr(value, "indptr"):  # a sparse matrix
        return int(value.data.nbytes) + int(value.indptr.nbytes)
    return len(value) if isinstance(value, (bytes, bytearray)) else 0
