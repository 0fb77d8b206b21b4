"""A stream whose results are taken by a thread of its own, so that all calls are made whoever reads them."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker.runtime import current

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.util.streams import Stream

R = TypeVar("R")


class Drain(Generic[R]):
    """The results of a stream as its thread takes them, in groups, until the first error."""

    def __init__(self, stream: Stream[R]) -> None:
        self._stream = stream
        self._groups: queue.SimpleQueue[list[R] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stoker-map", daemon=True)
        self._thread.start()

    def results(self, timeout_s: float | None) -> Iterator[R]:
        """Yield the results; TimeoutError after ``timeout_s`` seconds from now. Its end cancels the rest."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

        def generate() -> Iterator[R]:
            try:
                while (group := self._next(deadline_s)) is not None:
                    if isinstance(group, BaseException):
                        raise group
                    group.reverse()
                    while group:
                        yield group.pop()
            finally:
                self.cancel()

        return generate()

    def settle(self) -> None:
        """Wait until all calls were made and have ended."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            runtime = current.maybe_runtime()
            if runtime is None:
                return
            with runtime.objects.waits.blocked():
                self._thread.join()

    def is_alive(self) -> bool:
        """Return whether calls are under way."""
        return self._thread.is_alive()

    def stop(self) -> list[Any]:
        """Make no more calls; return the refs of those under way."""
        return self._stream.stop()

    def cancel(self) -> None:
        """Cancel what is under way."""
        if self._thread.is_alive():
            self._stream.cancel()

    def _next(self, deadline_s: float | None) -> list[R] | BaseException | None:
        if self._groups.empty():
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            with current.runtime().objects.waits.blocked():
                try:
                    return self._groups.get(timeout=left_s)
                except queue.Empty:
                    raise TimeoutError("the results were not there in time") from None
        return self._groups.get()

    def _run(self) -> None:
        put, stream = self._groups.put, self._stream
        failed = False
        while True:
            try:
                group = stream.next_group()
            except StopIteration:
                break
            except BaseException as error:
                if not failed:  # the others are called all the same, as in the standard library
                    put(error)
                failed = True
            else:
                stream.count_taken(len(group))
                if not failed:
                    put(group)
        if not failed:
            put(None)
