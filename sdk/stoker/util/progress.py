"""``tqdm``: progress bars of tasks on any node, each shown once, at the driver's terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from stoker.runtime import current
from stoker.runtime.driver.progress_bars import Bar, report, shown_bars
from stoker.runtime.driver.wait_notices import COUNTED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from stoker.runtime.objects.refs import ObjectRef

T = TypeVar("T")
_NUMBERS = itertools.count(1)
_LOCAL_S, _REMOTE_S = 0.1, 0.5
"""How often a bar is told of, in a driver and in a worker."""


class tqdm(Generic[T]):
    """A progress bar, around an iterable or moved by ``update``, as the library of that name has it.

    ::

        for path in stoker.tqdm(paths, desc="read"):   # in a task, or in the driver
            ...

    In a task it is shown at the driver, beside those of other tasks, and never in the task's log as
    text. In a notebook it is a widget below its cell. Where else the driver's stderr is no terminal a
    line is printed every 5 seconds, and one at the end. ``total`` is the number of steps,
    ``leave=False`` takes the bar away at its end, ``disable`` shows none. Other keywords of the library
    are taken and have no effect.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        desc: str | None = None,
        total: float | None = None,
        leave: bool = True,
        *,
        unit: str = "it",
        disable: bool | None = False,
        initial: float = 0,
        **ignored: Any,
    ) -> None:
        if total is None and hasattr(iterable, "__len__"):
            total = len(cast("Sized", iterable))
        self.iterable = iterable
        self.total = total
        self.desc = desc or ""
        self.n = initial
        self.unit = unit
        self.leave = leave
        self.disable = bool(disable)
        self._postfix = ""
        self._number = next(_NUMBERS)
        self._began_s = time.monotonic()
        runtime = current.maybe_runtime()
        self._is_remote = runtime is not None and runtime.worker is not None
        self._period_s = _REMOTE_S if self._is_remote else _LOCAL_S
        self._told_s = self._began_s
        self._closed = False

    def __iter__(self) -> Iterator[T]:
        if self.iterable is None:
            raise TypeError("this bar has no iterable: move it with update()")
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def __len__(self) -> int:
        return int(self.total or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        """Move the bar by ``n`` steps."""
        self.n += n
        now_s = time.monotonic()
        if now_s - self._told_s >= self._period_s:
            self._told_s = now_s
            self.refresh()

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Set the text before the bar."""
        self.desc = desc or ""
        if refresh:
            self.refresh()

    def set_postfix(self, *args: Any, refresh: bool = True, **values: Any) -> None:
        """Set values to be shown behind the text."""
        pairs = {**(args[0] if args else {}), **values}
        shown = ((k, f"{v:.3g}" if isinstance(v, float) else v) for k, v in pairs.items())
        self._postfix = ", ".join(f"{key}={value}" for key, value in shown)
        if refresh:
            self.refresh()

    def refresh(self) -> None:
        """Show the bar as it is now."""
        if self.disable or self._closed:
            return
        self._tell(closed=False)

    def close(self) -> None:
        """End the bar."""
        if not self._closed:
            self._closed = True
            if not self.disable:
                self._tell(closed=True)

    @staticmethod
    def write(s: str, file: Any = None, end: str = "\n") -> None:
        """Print a text between the bars."""
        with shown_bars().hidden():
            (file or sys.stdout).write(f"{s}{end}")

    def _tell(self, *, closed: bool) -> None:
        text = f"{self.desc} {self._postfix}".strip()
        took_s = time.monotonic() - self._began_s
        bar = Bar(
            self._number,
            float(self.n),
            float(self.total or 0),
            text,
            self.unit,
            took_s,
            closed,
            self.leave,
        )
        if self._is_remote:
            sys.stderr.write(f"{report(bar)}\n")
            sys.stderr.flush()
        else:
            shown_bars().update(self._number, bar)


@contextlib.contextmanager
def arrivals(refs: Sequence[ObjectRef[Any]]) -> Iterator[None]:
    """Show a bar that counts those of the objects that are there, while the context waits for them."""
    bar: tqdm[None] = tqdm(total=len(refs), desc="get", unit="objects")
    ended = threading.Event()
    counter = threading.Thread(
        target=_count, args=(bar, refs, ended), name="stoker-progress", daemon=True
    )
    bar.refresh()
    counter.start()
    token = COUNTED.set(True)
    try:
        yield
    finally:
        COUNTED.reset(token)
        ended.set()
        counter.join()
        bar.close()


def _count(bar: tqdm[None], refs: Sequence[ObjectRef[Any]], ended: threading.Event) -> None:
    """Move a bar until the end, and once after it."""
    missing = list(refs)
    last = False
    while True:
        missing = [ref for ref in missing if ref._entry.location is None]
        bar.n = len(refs) - len(missing)
        if last:
            return
        bar.refresh()
        last = ended.wait(bar._period_s)
