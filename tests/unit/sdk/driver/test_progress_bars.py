"""Progress bars: their text, their way through a worker's output, and how they are shown."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.driver import progress_bars
from stoker.runtime.driver.progress_bars import Bar, Bars, report, reported
from stoker.runtime.process.terminal import clean
from stoker.util.progress import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(progress_bars, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(progress_bars, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(progress_bars, "_DRAW_S", 0.0)
    return stream


@pytest.fixture(autouse=True)
def bars() -> Iterator[None]:
    progress_bars._bars_of.cache_clear()
    yield
    progress_bars._bars_of.cache_clear()


def test_a_bar_as_text() -> None:
    assert Bar(1, 5, 10, "read", took_s=2.0).line(10) == (
        "read:  50% |#####.....| 5/10 [2 s < 2 s, 2.5 it/s]"
    )
    assert Bar(1, 3, unit="row").line() == "3 row [0 s, ? row/s]"
    assert "\x1b" not in Bar(1, 0, 4, "\x1b]0;title\x07").line()
    assert Bar(1, 20, 10, took_s=1).line(4).startswith("100% |####|")


def test_a_report_is_read_again_and_no_terminal_shows_it() -> None:
    bar = Bar(7, 2.0, 4.0, "a\nb", took_s=1.0)
    assert reported(report(bar)) == bar
    assert "\n" not in report(bar)
    assert clean(report(bar)) == ""
    for text in ("done", "\x1b]7717;stoker-bar;{}\x07", "\x1b]7717;stoker-bar;no\x07"):
        assert reported(text) is None


def test_in_a_pipe_there_is_a_line_now_and_then_and_one_at_the_end(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Bars()
    for done in range(5):
        shown.update("a", Bar(1, done, 5))
    assert stderr.getvalue() == ""
    monkeypatch.setattr(progress_bars, "_LINE_S", 0.0)
    shown.update("a", Bar(1, 4, 5))
    shown.update("a", Bar(1, 5, 5, closed=True))
    shown.update("b", Bar(2, 5, 5, closed=True, leave=False))
    assert stderr.getvalue().count("\n") == 2


def test_on_a_terminal_bars_are_drawn_again_below_what_is_printed(terminal: Terminal) -> None:
    shown = Bars()
    shown.update("a", Bar(1, 1, 4, "first"))
    shown.update("b", Bar(2, 1, 4, "second"))
    assert terminal.getvalue().endswith("\x1b[1A\r")
    with shown.hidden():
        terminal.write("a line\n")
    text = terminal.getvalue()
    assert "\r\x1b[Ja line\n" in text
    assert text.rindex("first") > text.index("a line")
    shown.update("a", Bar(1, 4, 4, "first", closed=True))
    shown.update("b", Bar(2, 4, 4, "second", closed=True, leave=False))
    assert "100%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[J")


def test_tqdm_counts_what_passes(stderr: io.StringIO) -> None:
    assert list(tqdm(range(3), desc="read")) == [0, 1, 2]
    assert "read: 100%" in stderr.getvalue()
    with tqdm(total=4, leave=False) as bar:
        bar.update(3)
        bar.set_description("x")
        bar.set_postfix(loss=0.12345)
        assert (bar.n, len(bar)) == (3, 4)
    assert list(tqdm(iter([1]), disable=True)) == [1]
    tqdm.write("between")
    with pytest.raises(TypeError, match="no iterable"):
        next(iter(tqdm(total=3)))
