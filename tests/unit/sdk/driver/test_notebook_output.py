"""Messages to a notebook: what names its cell, and what goes where other output goes."""

from __future__ import annotations

import io
import sys
import types
from typing import TYPE_CHECKING, Any

from stoker.runtime.driver import notebook_output as module
from stoker.runtime.driver.notebook_output import NotebookOutput, notebook_output
from stoker.runtime.driver.printing import Printer
from stoker.runtime.driver.progress_bars import Bar, NotebookBars
from stoker_wire.messages.control import LogLine

if TYPE_CHECKING:
    import pytest


class Stream(io.StringIO):
    """A kernel's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.parent_header: dict[str, Any] = {}


class Session:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, dict[str, Any]]] = []

    def send(self, socket: object, kind: str, content: Any, parent: Any, ident: bytes) -> None:
        self.sent.append((kind, parent["msg_id"], content))


class Notebook:
    """A kernel, as far as output knows of it."""

    def __init__(self) -> None:
        self.session = Session()
        self.iopub_socket = object()
        self.stdout = Stream()
        self.run("first")

    @property
    def kernel(self) -> Notebook:
        return self

    @property
    def sent(self) -> list[tuple[str, str, dict[str, Any]]]:
        return self.session.sent

    def get_parent(self) -> dict[str, Any]:
        return {"header": self.stdout.parent_header}

    def run(self, cell: str, kind: str = "execute_request") -> None:
        """Begin a cell."""
        self.stdout.parent_header = {"msg_id": cell, "msg_type": kind}


def begin(monkeypatch: pytest.MonkeyPatch) -> tuple[Notebook, NotebookOutput]:
    """Be a kernel; no fixture, as pytest puts its own streams in place before the test."""
    notebook = Notebook()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: notebook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stdout", notebook.stdout)
    monkeypatch.setattr(sys, "stderr", Stream())
    output = notebook_output()
    assert output is not None and notebook_output() is output
    return notebook, output


def line(text: str, cell: str) -> LogLine:
    return LogLine(node_id="n", worker_id="w", pid=1, name="f", text=text, cell=cell)


def test_lines_go_below_their_cells_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)
    first = output.cell()
    notebook.run("second")
    second = output.cell()
    assert len({first, second, ""}) == 3 and output.cell() == second
    printer = Printer()
    for text, cell in (("a", first), ("b", first), ("c", second), ("d", "of another"), ("e", "")):
        printer.put(line(text, cell))
    printer.close(30.0)
    printed: dict[str, str] = {}
    for kind, cell, content in notebook.sent:
        assert (kind, content["name"]) == ("stream", "stdout")
        printed[cell] = printed.get(cell, "") + content["text"]
    assert printed == {"first": "(f pid=1) a\n(f pid=1) b\n", "second": "(f pid=1) c\n"}
    assert notebook.stdout.getvalue() == "(f pid=1) d\n(f pid=1) e\n"


def test_the_events_of_widgets_and_what_was_before_any_cell_are_no_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook, output = begin(monkeypatch)
    notebook.run("click", "comm_msg")
    assert output.cell() == ""
    notebook.stdout.parent_header = {}
    assert output.cell() == ""
    assert not output.show("", "d", "<b>", "b", again=False) and not notebook.sent


def test_a_cell_that_collects_its_output_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)
    first = output.cell()
    notebook.run("second")
    second = output.cell()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert output.write(first, "stdout", "x")
    assert not output.write(second, "stdout", "x")
    assert output.write(second, "stderr", "x")


def test_the_cells_that_called_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)
    monkeypatch.setattr(module, "_MAX_CELLS", 2)
    cells = []
    for name in ("one", "two", "three"):
        notebook.run(name)
        cells.append(output.cell())
    assert [output.write(cell, "stdout", "x") for cell in cells] == [False, True, True]


def test_a_kernel_that_ends_takes_no_printer_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)

    def ended(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no socket")

    monkeypatch.setattr(notebook.session, "send", ended)
    printer = Printer()
    printer.put(line("lost", output.cell()))
    printer.put(line("shown", ""))
    printer.close(30.0)
    assert notebook.stdout.getvalue() == "(f pid=1) shown\n"


def test_an_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert notebook_output() is None


def test_a_bar_is_drawn_in_one_place_and_never_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)
    bars, cell = NotebookBars(output), output.cell()
    notebook.run("second")
    for done in range(5):
        bars.update("a", Bar(1, done, 5, "<b>"), cell)
    bars.update("a", Bar(1, 5, 5, "<b>", closed=True), cell)
    assert [(kind, cell) for kind, cell, _ in notebook.sent] == [
        ("display_data", "first"),
        ("update_display_data", "first"),
    ]
    (_, _, first), (_, _, last) = notebook.sent
    assert first["transient"] == last["transient"]
    assert "&lt;b&gt;" in last["data"]["text/html"] and "5/5" in last["data"]["text/plain"]
    notebook.sent.clear()
    bars.update("b", Bar(2, 1, 0, leave=False))
    bars.update("b", Bar(2, 9, 0, leave=False, closed=True))
    (_, cell, first), (_, _, last) = notebook.sent
    assert cell == "second" and "<progress>" in first["data"]["text/html"]
    assert last["data"] == {"text/html": "", "text/plain": ""}


def test_a_cell_shows_so_many_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, output = begin(monkeypatch)
    bars = NotebookBars(output)
    for number in range(30):
        bars.update(number, Bar(number, 1, 5))
    assert len(notebook.sent) == 20
    for number in range(200):
        bars.update(number, Bar(number, 5, 5, closed=True))
    assert len({content["transient"]["display_id"] for _, _, content in notebook.sent}) == 100
