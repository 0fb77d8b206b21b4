"""What notebooks show: small, escaped, and without IPython where it is not loaded."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types

import msgspec
import pytest

from stoker import ClusterInfo
from stoker.exceptions import JobFinishedError, UnavailableError
from stoker.runtime.process.notebook import Records, html_table, is_interactive, shown_records
from stoker_wire.messages.control import LogStream


def test_texts_are_escaped_cut_and_left_out_where_empty() -> None:
    shown = html_table("<a>", {"class": "<script>", "long": "x" * 5000, "none": ""})
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "&lt;a&gt;" in shown
    assert len(shown) < 800 and "none" not in shown


def test_a_list_of_records_is_a_table_in_notebooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"name": "<a>", "state": None, "token": "secret"}, {"state": LogStream.STDERR}]
    assert shown_records("All", ("name", "state"), records) is records
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    shown = shown_records("All", ("name", "state"), records)
    assert isinstance(shown, Records) and shown == records
    assert pickle.loads(pickle.dumps(shown)) == records
    assert json.loads(json.dumps(shown)) == msgspec.json.decode(msgspec.json.encode(shown))
    html = shown._repr_html_()
    assert (
        "&lt;a&gt;" in html and ">stderr<" in html and "secret" not in html and "None" not in html
    )


def test_a_long_list_shows_its_beginning() -> None:
    html = Records("All", ("n",), [{"n": n} for n in range(250)])._repr_html_()
    assert html.count("<tr>") == 101 and "the first 100 of 250" in html


def test_the_dashboard_is_a_link_and_nothing_else_becomes_one() -> None:
    info = ClusterInfo("http://127.0.0.1:1,http://127.0.0.1:2", "job-1", "default", "n", "/s", "t")
    assert "<a href='http://127.0.0.1:1/'" in info._repr_html_()
    shown = html_table("t", {}, links={"evil": "javascript:alert(1)", "quote": "http://h/'><b>"})
    assert "href='javascript" not in shown and "<b>" not in shown and shown.count("<a ") == 1


def test_a_token_is_not_shown() -> None:
    info = ClusterInfo("http://127.0.0.1:1", "job-1", "default", "n", "/s", "secret-token")
    assert "job-1" in info._repr_html_() and "secret-token" not in info._repr_html_()


@pytest.mark.parametrize("kind", [UnavailableError, JobFinishedError])
def test_a_lost_cluster_is_one_line(kind: type[UnavailableError]) -> None:
    error = kind("the local cluster is gone\nits head ended\ncall stoker.init() to go on")
    (line,) = error._render_traceback_()
    assert line == (
        f"{kind.__name__}: the local cluster is gone; its head ended; call stoker.init() to go on"
    )


def test_ipython_counts_only_where_a_shell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not is_interactive()
    ipython.get_ipython = lambda: None  # type: ignore[attr-defined]
    assert not is_interactive()
    ipython.get_ipython = object  # type: ignore[attr-defined]
    assert is_interactive()


def test_stoker_does_not_import_ipython() -> None:
    program = (
        "import sys, stoker; from stoker.runtime.process.notebook import is_interactive; "
        "assert not is_interactive(); sys.exit('IPython' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
