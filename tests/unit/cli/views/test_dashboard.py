"""The way of the dashboard's link into a browser: by a file that only its user can read."""

from __future__ import annotations

import stat
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.cli.views.dashboard import _has_display, _open

URL = "http://127.0.0.1:1/#login=a'b&\"c"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    return opened


def test_a_browser_is_given_a_private_file_and_no_link(opened: list[str], tmp_path: Path) -> None:
    page = tmp_path / ".stoker" / "login.html"
    page.parent.mkdir()
    page.write_text("one of before, which others can read")
    page.chmod(0o644)
    _open(URL)
    (given,) = opened
    assert "login=" not in given and Path(urlsplit(given).path) == page
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    assert "#login=a&#x27;b&amp;&quot;c" in text and "before" not in text


def test_a_link_in_the_place_of_the_file_is_not_followed(opened: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / ".stoker").mkdir()
    (tmp_path / ".stoker" / "login.html").symlink_to(other)
    _open(URL)
    assert other.read_text() == "kept" and len(opened) == 1


def test_without_a_browser_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    _open(URL)
    assert "open the link in one yourself" in capsys.readouterr().err


def test_a_shell_without_a_display_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not _has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert _has_display()
