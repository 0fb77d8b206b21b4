"""What notebooks show: small, escaped, and without IPython where it is not loaded."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from stoker import ClusterInfo
from stoker.exceptions import JobFinishedError, UnavailableError
from stoker.runtime.process.notebook import html_table, is_interactive


def test_texts_are_escaped_cut_and_left_out_where_empty() -> None:
    shown = html_table("<a>", {"class": "<script>", "long": "x" * 5000, "none": ""})
    assert "<script>" not in shown and "&lt;script&gt;" in shown and "&lt;a&gt;" in shown
    assert len(shown) < 800 and "none" not in shown


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
