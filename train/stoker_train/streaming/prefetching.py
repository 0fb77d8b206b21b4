"""Have the next batches ready, on the device, while the loop computes.

A thread takes items from an iterable into a bounded queue. For CUDA it copies them into pinned memory and
to the device on a stream of its own; the consumer's stream waits for that copy, and for nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker.exceptions import BadRequestError, GetTimeoutError

if TYPE_CHECKING:
    from typing import Self

    import torch

__all__ = ("Prefetch", "prefetch")

T = TypeVar("T")
_POLL_S = 0.1
_JOIN_S = 10.0


def prefetch(
    items: Iterable[T], *, depth: int = 2, device: Any = None, timeout_s: float = 300.0
) -> Prefetch[T]:
    """Return an iterator over ``items`` that has ``depth`` of them ready, on ``device`` if one is given.

    Tensors in dicts, lists and tuples are moved. GetTimeoutError where the next item is not there within
    ``timeout_s``. ``close()``, the end of a ``with`` block, an error and the loss of the last reference end
    the thread.
    """
    return Prefetch(items, depth=depth, device=device, timeout_s=timeout_s)


class Prefetch(Iterator[T], Generic[T]):
    """The items of another iterable, taken ahead by a thread; see :func:`prefetch`.

    ``interrupt`` is called by ``close()``, so that a thread that waits for an item does not go on waiting.
    ``progress`` returns a number that grows while the source comes nearer to its next item: only a source
    that does not is late.
    """

    def __init__(
        self,
        items: Iterable[T],
        *,
        depth: int = 2,
        device: Any = None,
        timeout_s: float = 300.0,
        interrupt: Callable[[], None] | None = None,
        progress: Callable[[], int] | None = None,
    ) -> None:
        self._thread: threading.Thread | None = None
        if depth < 1:
            raise BadRequestError(f"depth={depth} of a prefetch\ngive 1 or more", field="depth")
        self._timeout_s, self._interrupt, self._progress = timeout_s, interrupt, progress
        self._mover = _mover(device)
        self._queue: queue.Queue[tuple[str, Any, Any]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(iter(items), self._queue, self._stop, self._mover),
            name="stoker-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next item, or raise what the iterable did."""
        if self._thread is None:
            raise StopIteration
        entry = None
        while entry is None:
            reached = self._reached()
            try:
                entry = self._queue.get(timeout=self._timeout_s)
            except queue.Empty:
                if self._reached() != reached:
                    continue
                self.close()
                raise GetTimeoutError(
                    f"a prefetch waited {self._timeout_s:g} s for the next item\n"
                    "its source has not returned one"
                ) from None
        kind, item, ready = entry
        if kind == "item":
            if self._mover is not None:
                self._mover.hand_over(item, ready)
            value: T = item
            return value
        self.close()
        if kind == "error":
            raise item
        raise StopIteration

    def _reached(self) -> int:
        return 0 if self._progress is None else self._progress()

    def close(self) -> None:
        """End the thread; there are no further items."""
        thread = self._tell_to_end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _tell_to_end(self) -> threading.Thread | None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            if self._interrupt is not None:
                self._interrupt()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
        return thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._tell_to_end()  # and does not wait: this may be any thread


def _run(
    items: Iterator[Any],
    into: queue.Queue[tuple[str, Any, Any]],
    stop: threading.Event,
    mover: _CudaMover | None,
) -> None:
    """Take items until there are none or it is told to stop. It knows nothing of its Prefetch."""
    last: tuple[str, Any, Any] = ("end", None, None)
    try:
        for item in items:
            moved = (item, None) if mover is None else mover.move(item)
            del item
            if not _put(into, ("item", *moved), stop):
                break
            del moved
    except BaseException as error:  # it is raised in the consumer
        last = ("error", error, None)
    try:
        close = getattr(items, "close", None)
        if close is not None:
            close()
    except BaseException as error:
        if last[0] == "end":
            last = ("error", error, None)
    _put(into, last, stop)


def _put(into: queue.Queue[Any], entry: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        with contextlib.suppress(queue.Full):
            into.put(entry, timeout=_POLL_S)
            return True
    return False


def _mover(device: Any) -> _CudaMover | None:
    if device is None:
        return None
    import torch

    known = torch.device(device)
    return None if known.type == "cpu" else _CudaMover(known)


class _CudaMover:
    """Copies to a CUDA device by way of pinned memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        import torch
        from torch.utils._pytree import tree_map

        self._torch, self._device, self._tree_map = torch, device, tree_map
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(self, item: Any) -> tuple[Any, Any]:
        """Return the item on the device, and the event after which it is there (the thread)."""
        cuda = self._torch.cuda
        with cuda.stream(self._stream):
            moved = self._mapped(item, self._moved)
            ready = cuda.Event()
            ready.record(self._stream)
        return moved, ready

    def hand_over(self, item: Any, ready: Any) -> None:
        """Have the consumer's stream wait for an item, and the allocator know that it uses it."""
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        self._mapped(item, lambda tensor: tensor.record_stream(current))

    def _moved(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _mapped(self, item: Any, fn: Callable[[Any], Any]) -> Any:
        is_tensor = self._torch.is_tensor
        return self._tree_map(lambda one: fn(one) if is_tensor(one) else one, item)
