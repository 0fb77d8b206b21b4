"""A worker's stdout and stderr: they say which task printed, without a cost for those that do not.

A worker runs tasks of many functions in turn. Before the first output of another function than the
last, a mark line goes into the log file; the nodelet reads it as "from here on it is that one".
"""

from __future__ import annotations

import io
import sys

from stoker._context import current_task
from stoker_wire.messages.control import NAME_MARK


class _Printed:
    """What both streams share: whose output came last, and whether its line is unfinished."""

    def __init__(self) -> None:
        self.name = ""
        self.open_line = False


class NamedOutput(io.TextIOWrapper):
    """A line-buffered text stream that marks whose output follows."""

    def __init__(self, stream: io.TextIOWrapper, printed: _Printed) -> None:
        super().__init__(
            stream.buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._printed = printed

    def write(self, text: str, /) -> int:
        """Write, after a mark if another task prints now."""
        info, printed = current_task.get(), self._printed
        if info is not None and not info.actor_id and info.name != printed.name and text:
            super().write(f"{chr(10) * printed.open_line}{NAME_MARK}{info.name}\n")
            printed.name = info.name
        if text:
            printed.open_line = not text.endswith("\n")
        return super().write(text)

    def close(self) -> None:
        """Flush, and stay open: the next task of this worker prints here as well."""
        self.flush()


def mark_output() -> None:
    """Have everything that is printed in this process say whose it is."""
    printed = _Printed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            setattr(sys, name, NamedOutput(stream, printed))
