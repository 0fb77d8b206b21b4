"""A whole terminal for one command: frames over each other, keys, its size; at the end all is as it was."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import click

from stoker.cli.output import no_colour

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The terminal of this process; others :meth:`wake` whoever waits for a key."""

    def __init__(self) -> None:
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal shows frames alone, until the end of the context, whatever ends it."""
        with _handled(self._resized), _keys():
            try:
                _write(_ENTER)
                yield
            finally:
                _write(_LEAVE)

    def draw(self, lines: Sequence[str]) -> None:
        """Show a frame in place of the one before."""
        texts = [click.unstyle(line) for line in lines] if no_colour() else lines
        body = "\n".join(f"{text}{_END_OF_LINE}" for text in texts)
        _write(f"{_HOME}{body}{_BELOW}")

    def size(self) -> tuple[int, int]:
        """Return its width and height in cells."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def wake(self) -> None:
        """End a wait for a key (any thread)."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b".")

    def key(self, wait_s: float) -> str:
        """Return the next keys that are pressed; nothing once woken, or after ``wait_s``."""
        sources: list[int] = [self._woken]
        if sys.stdin.isatty():
            sources.append(sys.stdin.fileno())
        ready, _, _ = select.select(sources, [], [], wait_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        pressed = [source for source in ready if source != self._woken]
        if not pressed:
            return ""
        typed = os.read(pressed[0], 64)
        if not typed:  # the other end of the terminal is gone
            raise EOFError
        return typed.decode(errors="replace")

    def _resized(self, signum: int, stack: FrameType | None) -> None:
        if signum == signal.SIGWINCH:
            self.wake()
        else:
            sys.exit(128 + signum)


@contextlib.contextmanager
def _handled(handler: object) -> Iterator[None]:
    before = {
        signum: signal.signal(signum, handler)  # type: ignore[arg-type]
        for signum in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one and are not shown; Ctrl-C interrupts as ever."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
