"""A terminal for a command: what it writes, the keys that it is sent, its size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WAIT_S = 60.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A process whose stdin, stdout and stderr are a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], leading: int) -> None:
        self.process = process
        self.written = ""
        self._leading = leading

    def type(self, keys: bytes) -> None:
        os.write(self._leading, keys)

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._leading, termios.TIOCSWINSZ, size)

    def until(self, text: str, *, since: int = 0) -> str:
        """Read until ``text`` stands in what was written from ``since`` on; return that."""
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.written[since:]:
            assert self._read(deadline_s), f"it ended without {text!r}:\n{self.written}"
        return self.written[since:]

    def end(self) -> int:
        """Read to the end; return the exit code."""
        deadline_s = time.monotonic() + WAIT_S
        while self._read(deadline_s):
            pass
        return self.process.wait(WAIT_S)

    def _read(self, deadline_s: float) -> bool:
        left_s = deadline_s - time.monotonic()
        ready, _, _ = select.select([self._leading], [], [], max(0.0, left_s))
        assert ready, f"nothing came for too long:\n{self.written}"
        try:
            data = os.read(self._leading, 65536)
        except OSError:  # all ends of the terminal are closed
            return False
        self.written += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], environ: Mapping[str, str], *, columns: int = 80, lines: int = 24
) -> Iterator[Terminal]:
    """A command in a terminal of this size; it is killed at the end."""
    leading, following = pty.openpty()
    kept = {k: v for k, v in environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    kept |= {k: v for k, v in environ.items() if k == "NO_COLOR" and v}
    fcntl.ioctl(following, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        command,
        env={**kept, "TERM": "xterm"},
        stdin=following,
        stdout=following,
        stderr=following,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(following)
    try:
        yield Terminal(process, leading)
    finally:
        process.kill()
        process.wait()
        os.close(leading)


def plain(text: str) -> str:
    """What was written, without its colours."""
    return _COLOUR.sub("", text)
