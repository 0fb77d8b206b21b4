"""Text of users' programs on a terminal: colours and progress bars stay, all other control sequences go."""

from __future__ import annotations

import time

import pytest

from stoker.runtime.process.terminal import clean, clean_output, line_of, printable

RED = "\x1b[1;31mred\x1b[0m"
HARMFUL = [
    "\x1b]0;title\x07",  # the title of the window
    "\x1b]52;c;ZXZpbA==\x1b\\",  # the clipboard
    "\x9d52;c;ZXZpbA==\x9c",  # the same, in the eight-bit form
    "\x1bP$q\"p\x1b\\",  # asks a terminal to type
    "\x1b_x\x1b\\", "\x1b^x\x1b\\", "\x1bXx\x1b\\",
    "\x1b[2J", "\x1b[H", "\x1b[6n", "\x1b[?1049h", "\x9b2J", "\x1b[1;1f", "\x1b[5B", "\x1b[>4;2m",
    "\x1bc", "\x1b(0", "\x1b#8", "\x1b7", "\x1b",
    "\x07", "\x08", "\x00", "\x0b", "\x0c", "\x0e", "\x1e", "\x7f", "\x85", "\x9b",
]  # fmt: skip


@pytest.mark.parametrize("sequence", HARMFUL, ids=ascii)
def test_a_control_sequence_does_not_reach_a_terminal(sequence: str) -> None:
    assert clean(f"a{sequence}\nb") == "a\nb"
    assert clean_output(f"a{sequence}\nb") == "a\nb"
    shown = line_of("(f pid=1)", f"a{sequence}\tb", is_terminal=True)
    assert shown.partition("\x1b[36m(f pid=1)\x1b[0m ")[2].removesuffix("\x1b[0m") == "a\tb"


def test_an_escape_without_its_end_hides_no_text() -> None:
    assert clean("\x1b]0;see this") == "0;see this"


def test_colours_lines_and_tabs_stay() -> None:
    text = f"{RED}\tand\n\x1b[38:5:1mmore\x1b[m"
    assert clean(text) == clean_output(text) == text


def test_a_progress_bar_draws_itself_again() -> None:
    bars = "\r 10%|#  |\x1b[K\n\r 50%|## |\x1b[A"
    assert clean_output(bars) == bars
    assert "\r" not in clean(bars)


def test_no_output_can_stand_behind_the_name_of_another() -> None:
    shown = line_of("(f pid=1)", "\r(root pid=2) paid\x1b[A\x1b[8m", is_terminal=True)
    assert "\x1b[A" not in shown
    assert "\r\x1b[0m\x1b[36m(f pid=1)\x1b[0m (root pid=2)" in shown
    assert shown.endswith("\x1b[0m")
    named = line_of("(f\r\n(root\x1b[2J pid=1)", "x", is_terminal=False)
    assert "\r" not in named
    assert "\n" not in named
    assert "\x1b" not in named


def test_a_pipe_gets_the_text_of_output_unchanged() -> None:
    text = "".join(HARMFUL) + RED
    assert line_of("(f pid=1)", text, is_terminal=False) == f"(f pid=1) {text}"


def test_a_name_is_one_line_without_control_characters() -> None:
    assert printable("a\r\nb\x1b]0;x\x07\u202ec") == "a  b\ufffd]0;x\ufffd\ufffdc"


def test_cleaning_takes_time_in_proportion_to_the_text() -> None:
    began_s = time.process_time()
    for unit in ("\x1b]", "\x9d", "\x1b]a", "\x1b[", "\x1b[1", "\x1b[ ", "\x1b "):
        clean(unit * 100_000)
        clean_output(unit * 100_000)
    assert time.process_time() - began_s < 10.0
