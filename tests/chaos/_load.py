"""A steady load on a cluster: threads that call again and again while services come and go."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GET_S = 40.0


class Load:
    """Threads that call again and again; each notes how many calls succeeded and the slowest one.

    ``enough`` has the rounds of each kind that must succeed after a fault; between two rounds ``pause_s``
    leaves the machine to others.
    """

    def __init__(
        self, enough: Mapping[str, int], *, pause_s: float = 0.0, **kinds: Callable[[int], None]
    ) -> None:
        self._pause_s = pause_s
        self.counts = dict.fromkeys(kinds, 0)
        self.slowest_s = dict.fromkeys(kinds, 0.0)
        self.failures: list[str] = []
        self._enough = enough
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=item, daemon=True) for item in kinds.items()
        ]

    def _run(self, kind: str, call: Callable[[int], None]) -> None:
        while not self._end.is_set():
            began_s = time.monotonic()
            try:
                call(self.counts[kind])
            except Exception as error:
                self.failures.append(f"{kind} {self.counts[kind]}: {error!r}")
                return
            self.slowest_s[kind] = max(self.slowest_s[kind], time.monotonic() - began_s)
            self.counts[kind] += 1
            self._end.wait(self._pause_s)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(GET_S)

    def goes_on(self) -> None:
        """Wait until each kind has done as many rounds again as are enough."""
        before = dict(self.counts)

        def done() -> bool:
            return bool(self.failures) or all(
                count >= before[kind] + self._enough[kind] for kind, count in self.counts.items()
            )

        try:
            until(done, GET_S, "the load goes on")
        except TimeoutError as error:
            raise AssertionError(f"{error}: {before} became {self.counts}") from None
        assert not self.failures, "\n".join(self.failures)
