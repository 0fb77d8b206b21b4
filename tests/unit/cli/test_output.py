"""Texts of users' programs: none controls a terminal, and pipes get logs as they are."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import stoker.cli
from stoker.cli.output import echo, heading, print_json, print_output, print_prose, print_table
from stoker.runtime.driver.printing import Printer
from stoker_wire.messages.control import LogLine

if TYPE_CHECKING:
    import pytest

TITLE = "\x1b]0;owned\x07"
RED = "\x1b[31mred\x1b[0m"


class Terminal(io.StringIO):
    """A stdout that says it is one."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


def line(text: str, name: str = "f") -> LogLine:
    return LogLine(node_id="n", worker_id="w", pid=1, name=name, text=text)


def test_a_log_on_a_terminal_keeps_its_colours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    print_output(line(f"a{TITLE}{RED}"))
    assert shown.getvalue() == f"a{RED}\n"


def test_a_log_in_a_pipe_is_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    print_output(line(f"a{TITLE}{RED}"))
    print_output(line(f"a{TITLE}{RED}"), named=True)
    assert capsys.readouterr().out == f"a{TITLE}{RED}\n(f pid=1) a{TITLE}{RED}\n"


def test_a_driver_cleans_what_its_workers_print(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    printer = Printer()
    printer.put(line(f"a{TITLE}\x1b[A{RED}", name=f"f{TITLE}"))
    printer.close(30.0)
    assert "\x1b]" not in shown.getvalue()
    assert "\x1b[A" not in shown.getvalue()
    assert RED in shown.getvalue()


def test_names_and_messages_are_cleaned_on_a_terminal_and_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"job{TITLE}\x9b2J\r"
    for shown in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", shown)
        echo(f"{heading(name)} {name}")
        print_prose(name, label=name)
        print_table([{"name": name}], {"name": "name"}, empty=name)
        print_table([], {"name": "name"}, empty=name)
        text = shown.getvalue()
        assert text.count("job") == 6
        assert not any(mark in text for mark in ("\x1b]", "\x07", "\x9b", "\r"))


def test_json_on_a_terminal_holds_no_control_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    print_json({"name": f"{TITLE}\x9d52;c;x\x9c"})
    assert not any(mark in shown.getvalue() for mark in ("\x1b", "\x9d"))


def test_every_command_prints_through_the_functions_that_clean() -> None:
    folder = Path(stoker.cli.__file__).parent
    own = {folder / "__init__.py", folder / "output.py"}
    raw = [
        path.name
        for path in folder.rglob("*.py")
        if "click.echo" in path.read_text() and path not in own
    ]
    assert raw == []
